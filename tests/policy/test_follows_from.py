"""What is known of a state while some of its fields are the same: those fields are all that is
read, and what is known is what would be found now."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chaos.simulated import play
from support.sim.on_markets import on_markets

import elastic.policy
from elastic.policy.state.state import State

FIELDS = frozenset(State.__dataclass_fields__)


class Watched(State):
    """Notes which fields are read, also by what is derived of them."""

    reads: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            object.__getattribute__(self, "__dict__")["reads"].add(name)
        return object.__getattribute__(self, name)


def watched(state: State) -> Watched:
    made = object.__new__(Watched)
    values = object.__getattribute__(state, "__dict__")
    made.__dict__.update({name: values[name] for name in FIELDS}, reads=set())
    return made


def decorated() -> Iterator[tuple[Any, str, Any]]:
    """Module, name there, function: once for each module that has it."""
    for info in pkgutil.walk_packages(elastic.policy.__path__, "elastic.policy."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            of_policy = getattr(value, "__module__", "").startswith("elastic.policy")
            if of_policy and hasattr(value, "fields_read"):
                yield module, name, value


def asserting(func: Any, seen: set[str]) -> Callable[..., Any]:
    name = f"{func.__module__}.{func.__name__}"

    def asked(state: State, *others: Any, **named: Any) -> Any:
        seen.add(name)
        looked = watched(state)
        fresh = func.__wrapped__(looked, *others, **named)
        reads = looked.__dict__["reads"]
        if func.fields_read:
            more = reads - set(func.fields_read)
            assert not more, f"{name} also reads {', '.join(sorted(more))}"
        if isinstance(state, Watched):
            state.__dict__["reads"] |= reads
            return fresh
        known = func(state, *others, **named)
        same = repr(known) == repr(fresh) if isinstance(fresh, Exception) else known == fresh
        assert same, f"{name}: known {known}, found now {fresh}"
        return known

    return asked


def test_what_follows_from_fields_reads_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    found = list(decorated())
    for module, name, func in found:
        monkeypatch.setattr(module, name, asserting(func, seen))
    ended = on_markets(purpose="deadline", deadline_h=5.0)
    assert ended.done, ended.reason
    ended = on_markets(purpose="cheapest", keep_best=1)
    assert ended.done, ended.reason
    for seed in (0, 1826):
        played = play(seed, None)
        assert not played.wrong, played.wrong
    names = {f"{func.__module__}.{func.__name__}" for _, _, func in found}
    assert names == seen, f"never asked: {', '.join(sorted(names - seen))}"
