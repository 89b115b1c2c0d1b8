"""What optimizers keep beside the state of their parameters: settings of their groups that a step
changes (`group['step']`), numbers on the object (`self.n`), what their state has under a text
(`state['k']`).

It is the same on every rank, since it follows from no tensor (element_wise.py tries that), and
travels as extra state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic.errors import SpecError

COUNTERS = "param_groups"  # the name among the extra state; scripts have all settings there
NO_SETTINGS = ("params", "param_names")  # of what stands in a group
GROUP, OBJECT, STATE = "group", "self", "state"
NUMBER = "number"  # is written as a tensor: however large it grows, it takes as many bytes
Optimizer = torch.optim.Optimizer
# of each group its settings, and last what the object has
Values = list[dict[str, Any]]


def settings_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each group, as they stand in it."""
    return [{k: v for k, v in group.items() if k not in NO_SETTINGS} for group in groups]


def own_of(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers on the object (`self.n`), and what its state has under a text (`state.k`)."""
    numbers = {f"{OBJECT}.{k}": v for k, v in vars(optimizer).items() if _is_number(k, v)}
    return numbers | {f"{STATE}.{k}": v for k, v in optimizer.state.items() if isinstance(k, str)}


def _is_number(name: str, value: Any) -> bool:
    """torch and its schedulers have flags of their own there, under names that begin with `_`."""
    if isinstance(value, bool):
        return not name.startswith("_")
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or isinstance(value, int | float)


def values_of(optimizer: Optimizer) -> Values:
    """Copies: a step may change them in place."""
    return [_copied(one) for one in (*settings_of(optimizer.param_groups), own_of(optimizer))]


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    tensor = torch.Tensor
    return {k: v.clone() if isinstance(v, tensor) else copy.deepcopy(v) for k, v in values.items()}


def put_back(optimizer: Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """All of `values_of`, as they were then."""
    *settings, own = map(_copied, values)
    for group, had in zip(optimizer.param_groups, settings, strict=True):
        for key in group.keys() - had.keys() - set(NO_SETTINGS):
            del group[key]
        group.update(had)
    set_own(optimizer, own)


def set_own(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """What is not there any more is the class's again."""
    for name in own_of(optimizer).keys() - own.keys():
        where, _, key = name.partition(".")
        if where == STATE:
            del optimizer.state[key]  # type: ignore[arg-type]
        elif hasattr(type(optimizer), key):
            delattr(optimizer, key)
    for name, value in own.items():
        _set(optimizer, name, value)


def _set(optimizer: Optimizer, name: str, value: Any) -> None:
    where, _, key = name.partition(".")
    if where == STATE:
        optimizer.state[key] = value  # type: ignore[index]
    else:
        setattr(optimizer, key, value)


def changed(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of what steps have changed: `group.step`, `self.n`, `state.k`."""
    found = []
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        prefix = f"{GROUP}." if i < len(before) - 1 else ""
        found += [
            prefix + key
            for key in dict.fromkeys([*old, *new])
            if key not in old or key not in new or not same(old[key], new[key])
        ]
    return list(dict.fromkeys(found))


def same(one: Any, other: Any) -> bool:
    """Values of one name; numbers to rounding."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return tensors and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return type(one) is type(other) and bool(one == other)


class OptimizerCounters:
    """As extra state. `names`: by optimizer, of what its steps change; `each`: the optimizers that
    count, those of the generation that runs."""

    def __init__(self, each: Mapping[str, Optimizer], names: Mapping[str, Sequence[str]]) -> None:
        self.each, self.names = each, names

    def state_dict(self) -> dict[str, Any]:
        return {name: self._taken(self.each[name], wanted) for name, wanted in self.names.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in state.items():
            optimizer = self.each[name]
            *settings, own = values
            for group, saved in zip(optimizer.param_groups, settings, strict=True):
                for key, value in saved.items():
                    if (found := _read(value, group.get(key))) is None:
                        group.pop(key, None)
                    else:
                        group[key] = found[0]
            there = own_of(optimizer)
            read = {key: _read(value, there.get(key)) for key, value in own.items()}
            kept = {k: v for k, v in there.items() if k not in own}
            set_own(optimizer, kept | {k: v[0] for k, v in read.items() if v is not None})

    def _taken(self, optimizer: Optimizer, names: Sequence[str]) -> Values:
        *settings, own = values_of(optimizer)
        keys = [name.partition(".")[2] for name in names if name.startswith(f"{GROUP}.")]
        mine = [name for name in names if not name.startswith(f"{GROUP}.")]
        groups = [{key: _written(one, key) for key in keys} for one in settings]
        return [*groups, {name: _written(own, name) for name in mine}]


def _written(values: Mapping[str, Any], key: str) -> Any:
    """NaN = it is not there, as before the first step."""
    value = values.get(key, math.nan)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    return (NUMBER, torch.tensor(value, dtype=dtype))


def _read(value: Any, there: Any) -> tuple[Any] | None:
    """None = it is not there. `there`: what is in its place now."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == NUMBER:
        number = value[1].item()
        return None if isinstance(number, float) and math.isnan(number) else (number,)
    if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
        return (value.to(there.device),)
    return (value,)


def with_counters(
    extra: Mapping[str, Any], each: Mapping[str, Optimizer], names: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A program's extra state and its optimizers' counters, where they have some. Raises SpecError
    where the name is taken."""
    if not names:
        return dict(extra)
    if COUNTERS in extra:
        raise SpecError(
            f"extra_state['{COUNTERS}']: the name is taken by what the optimizers count; choose "
            "another"
        )
    return {**extra, COUNTERS: OptimizerCounters(each, names)}
