"""Until the moment at which a decision wants to be woken, nothing else would be decided."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.sim.on_markets import on_markets

from elastic.policy.decide import decide
from elastic.policy.pools.deadline import LOOK_LEAST_S
from elastic.policy.state.state import State
from elastic.types import Decision


@pytest.mark.parametrize(
    "keys", [{"purpose": "deadline", "deadline_h": 5.0}, {"purpose": "cheapest"}]
)
def test_nothing_is_decided_before_it_is_looked_at_again(keys: dict[str, Any]) -> None:
    chance, n = random.Random(0), 0

    def looking(state: State, now_s: float) -> Decision:
        nonlocal n
        found = decide(state, now_s)
        if found.actions or found.wake_at_s is None:
            return found
        between_s = now_s + chance.random() * (found.wake_at_s - now_s)
        if between_s < found.wake_at_s - LOOK_LEAST_S:
            between = decide(state, between_s)
            assert not between.actions, f"after {between_s - now_s:.1f} s: {between.reason}"
            n += 1
        return found

    ended = on_markets(looking, **keys)
    assert ended.done, ended.reason
    assert n > 100
