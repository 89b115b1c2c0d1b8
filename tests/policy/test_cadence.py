"""How often copies are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from story import SPOT, job

from elastic.policy.cadence import durable_every, peer_every
from elastic.policy.state import State
from elastic.types import Node

NODES = [Node(name, "spot") for name in "abcd"]
STATE = State(run="r", job=job(steps=10_000), pools=(SPOT,))


@pytest.mark.parametrize(
    ("stall_s", "step_s", "every"),
    [(0.0, 0.0, 5), (0.0, 1.0, 5), (0.02, 1.0, 2), (0.025, 1.0, 3), (0.01, 1.0, 1), (0.001, 1.0, 1), (9.0, 1.0, 50)],
)
def test_peer_copies_cost_less_than_one_percent(stall_s: float, step_s: float, every: int) -> None:
    state = replace(STATE, copy_stall_s=stall_s, step_time_s=step_s)
    assert peer_every(state, 4) == every
    if 1 < every < 50 and stall_s:
        assert stall_s / (every * step_s) <= 0.01


def test_given_numbers_are_taken_as_they_are_and_a_single_node_has_no_peer() -> None:
    state = replace(STATE, job=job(peer_every=7, durable_every=3))
    assert (peer_every(state, 2), peer_every(state, 1)) == (7, 0)
    assert durable_every(state, NODES) == durable_every(state, NODES[:1]) == 3
    assert durable_every(replace(STATE, job=job(durable_every=0)), NODES) == 0


def test_durable_copies_follow_young_and_daly() -> None:
    measured = replace(STATE, step_time_s=1.0, durable_stall_s=0.5)
    every = durable_every(measured, NODES)  # 4 nodes x 0.05 losses per hour: one in 5 h; sqrt(2 x 0.5 x 18000)
    assert every == pytest.approx(134, abs=1)
    assert durable_every(replace(measured, durable_stall_s=2.0), NODES) == pytest.approx(2 * every, abs=2)
    assert durable_every(replace(measured, n_losses=20), NODES) < every / 3
    assert durable_every(replace(measured, step_time_s=60.0), NODES) == 20
    assert durable_every(STATE, NODES) == 20
    assert durable_every(replace(measured, job=job(steps=200)), NODES) == 50


def test_a_single_node_stores_at_least_every_ten_steps() -> None:
    assert durable_every(replace(STATE, step_time_s=1.0, durable_stall_s=0.5), NODES[:1]) == 10
