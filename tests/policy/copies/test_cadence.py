"""How often copies are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, durable, job, orders

from elastic.policy.copies.cadence import BURST_BYTES, adjust, durable_every, peer_every
from elastic.policy.copies.replica_placement import Copies
from elastic.policy.state.fold import PoolSeen, State, fold
from elastic.types import (
    Copy,
    CopyStored,
    Decided,
    Decision,
    Job,
    Layout,
    Node,
    Plan,
    SetCadence,
    StoreCopy,
    WorkerId,
)

NODES = [Node(name, "spot") for name in "abcd"]
STATE = State(run="r", job=Job.from_plain(job(steps=10_000)), pools=(SPOT,))


TO = Copies(((1,), (2,), (3,), (0,)))


@pytest.mark.parametrize(
    ("stall_s", "step_s", "every"),
    [
        (0.0, 0.0, 5),
        (0.0, 1.0, 5),
        (0.02, 1.0, 2),
        (0.025, 1.0, 3),
        (0.01, 1.0, 1),
        (0.001, 1.0, 1),
        (2.0, 1.0, 200),
    ],
)
def test_peer_copies_cost_less_than_one_percent(stall_s: float, step_s: float, every: int) -> None:
    state = replace(STATE, copy_stall_s=stall_s, step_time_s=step_s)
    assert peer_every(state, NODES, TO) == every
    if every > 1 and stall_s:
        assert stall_s / (every * step_s) <= 0.01
        assert stall_s / ((every - 1) * step_s) > 0.01


def test_what_a_copy_slows_counts_like_what_it_stalls() -> None:
    state = replace(STATE, copy_stall_s=0.01, copy_slowed_s=0.03, step_time_s=1.0)
    assert peer_every(state, NODES, TO) == 4


def test_many_losses_are_worth_more_than_one_percent() -> None:
    """9 s a copy, one loss in 5 h: sqrt(2 x 9 x 18000) steps of 1 s, where 1 % would ask for
    900."""
    state = replace(STATE, copy_stall_s=9.0, step_time_s=1.0)
    assert peer_every(state, NODES, TO) == 569
    assert peer_every(replace(state, history={"spot": PoolSeen(losses=20)}), NODES, TO) < 200


def test_a_copy_is_not_taken_before_the_one_before_it_has_crossed_the_wire() -> None:
    state = replace(STATE, copy_stall_s=0.001, step_time_s=1.0)
    large = replace(TO, n_bytes=BURST_BYTES + 30_000_000_000, bytes_per_s=1e9)
    assert peer_every(state, NODES, large) == 30
    assert peer_every(replace(state, copy_stall_s=0.0), NODES, large) == 30
    assert peer_every(state, NODES, replace(large, n_bytes=BURST_BYTES)) == 1


def test_given_numbers_are_taken_as_they_are_and_a_single_node_has_no_peer() -> None:
    state = replace(STATE, job=Job.from_plain(job(peer_every=7, durable_every=3)))
    assert (peer_every(state, NODES, TO), peer_every(state, NODES[:1], Copies())) == (7, 0)
    assert durable_every(state, NODES) == durable_every(state, NODES[:1]) == 3
    assert durable_every(replace(STATE, job=Job.from_plain(job(durable_every=0))), NODES) == 0


def test_durable_copies_follow_young_and_daly() -> None:
    measured = replace(STATE, step_time_s=1.0, durable_stall_s=0.5)
    # 4 nodes x 0.05 losses per hour: one in 5 h; sqrt(2 x 0.5 x 18000)
    every = durable_every(measured, NODES)
    assert every == pytest.approx(134, abs=1)
    assert durable_every(replace(measured, durable_stall_s=2.0), NODES) == pytest.approx(
        2 * every, abs=2
    )
    assert (
        durable_every(replace(measured, history={"spot": PoolSeen(losses=20)}), NODES) < every / 3
    )
    assert durable_every(replace(measured, step_time_s=60.0), NODES) == 20
    assert durable_every(STATE, NODES) == 20
    assert durable_every(replace(measured, job=Job.from_plain(job(steps=200))), NODES) == 50


def test_a_single_node_stores_at_least_every_ten_steps() -> None:
    measured = replace(STATE, step_time_s=1.0, durable_stall_s=0.5)
    assert durable_every(measured, NODES[:1]) == 10
    assert durable_every(measured, NODES, alone=True) == 10, (
        "no peer replicas fit: storage is all there is"
    )


# -------------------------------------------------------------------------------- while a plan runs


def running(every: int, **measured: float) -> State:
    plan = Plan(
        1,
        Layout(dp_shard=4),
        tuple(WorkerId(n, 0) for n in "abcd"),
        (3,) * 4,
        (4,),
        peer_every=every,
        copies_to=TO.to,
    )
    nodes = {node.node_id: node for node in NODES}
    state = replace(
        STATE,
        phase="running",
        plan=plan,
        plans={1: plan},
        nodes=nodes,
        step=50,
        step_time_s=1.0,
        n_copies_timed=3,
    )
    return replace(state, **measured)  # type: ignore[arg-type]


def new_every(state: State, now_s: float = 100.0) -> int | None:
    decision = adjust(state, now_s)
    if decision is None:
        return None
    (order,) = decision.actions
    assert isinstance(order, SetCadence) and order.generation == 1 and decision.reason
    return order.peer_every


@pytest.mark.parametrize(
    ("every", "cost_s", "expected"),
    [
        (5, 0.2, 20),  # 4 % of the step time: fewer
        (5, 0.07, None),  # 1.4 %: not worth an order
        (5, 0.002, 1),  # 0.04 %: more
        (5, 0.025, None),  # every 3rd would do, but not if a copy cost half as much again
        (2, 0.01, None),  # on the edge between 1 and 2: stays
        (1, 0.01, None),
        (1, 0.02, 2),
        (2, 0.006, 1),
    ],
)
def test_another_cadence_is_ordered_only_when_it_is_clearly_better(
    every: int, cost_s: float, expected: int | None
) -> None:
    assert new_every(running(every, copy_stall_s=cost_s)) == expected


def test_the_new_cadence_is_stable_whatever_it_was_before() -> None:
    for cost_s in (0.001, 0.004, 0.011, 0.03, 0.1, 0.4):
        for every in (1, 2, 3, 5, 8, 20, 50):
            new = new_every(running(every, copy_stall_s=cost_s))
            assert new is None or new_every(running(new, copy_stall_s=cost_s)) is None, (
                every,
                cost_s,
                new,
            )


def test_a_copy_that_takes_long_to_cross_is_taken_less_often() -> None:
    assert new_every(running(5, copy_stall_s=0.001, copy_flight_s=12.0)) == 12


def test_no_order_before_enough_was_measured_or_when_the_job_says_how_often() -> None:
    dear = running(5, copy_stall_s=0.5)
    assert new_every(dear) == 50
    assert new_every(replace(dear, n_copies_timed=2)) is None
    assert (
        new_every(replace(dear, cadence_at_s=95.0)) is None
        and new_every(replace(dear, cadence_at_s=90.0)) == 50
    )
    assert new_every(replace(dear, entered_at_s=95.0)) is None
    assert new_every(replace(dear, job=Job.from_plain(job(peer_every=5)))) is None
    assert new_every(replace(dear, step=9_990)) is None, "the job is done before"


def test_an_order_changes_the_plan_that_is_known_and_measuring_begins_anew() -> None:
    state = fold(
        running(5, copy_stall_s=0.5), Decided(Decision((SetCadence(1, 50, 7),), "why")), 100.0
    )
    assert state.plan is not None and (state.plan.peer_every, state.plan.durable_every) == (50, 7)
    assert state.plans[1] == state.plan and (state.n_copies_timed, state.cadence_at_s) == (0, 100.0)


def test_what_copies_cost_is_learned_from_what_is_told() -> None:
    def told(state: State, step: int, stall_s: float) -> State:
        return fold(
            state, CopyStored(Copy(step, "peer", 1, Layout(dp_shard=4)), 0.5, stall_s, 0.01), 60.0
        )

    state = told(running(5), 50, 0.2)
    assert (state.copy_stall_s, state.copy_slowed_s, state.copy_flight_s, state.n_copies_timed) == (
        0.2,
        0.01,
        0.5,
        4,
    )
    state = told(state, 55, 0.3)
    assert state.copy_stall_s == pytest.approx(0.23)
    first = replace(state, entered_step=60)
    assert told(first, 60, 9.0).copy_stall_s == state.copy_stall_s, (
        "the first of a generation fills new buffers"
    )


def asked_copies(told: Story) -> list[int]:
    """Numbers of the decisions that order a checkpoint out of turn."""
    return [n for n, decision in enumerate(told.decisions) if orders(decision, StoreCopy)]


def test_the_first_checkpoint_does_not_wait_for_its_turn() -> None:
    """After four minutes of steps, once; again after four more where none was stored."""
    told = Story((SPOT,), durable_every=500, steps=10_000)
    told.running("a", "b", "c", "d")
    for n, copies in ((11, 0), (1, 1), (11, 1), (1, 2)):
        told.steps(n, step_time_s=20.0)
        assert len(asked_copies(told)) == copies, n
    reason = told.decisions[asked_copies(told)[0]].reason
    assert "no checkpoint is stored after 240 s of steps" in reason and "in 9760 s" in reason
    told.tick(durable(told, 24))
    told.steps(40, step_time_s=20.0)
    assert len(asked_copies(told)) == 2


@pytest.mark.parametrize(("every", "step_s"), [(20, 20.0), (500, 0.1), (0, 20.0)])
def test_nor_is_it_ordered_where_one_comes_anyway(every: int, step_s: float) -> None:
    """Soon, or before much was done, or where the job wants none."""
    told = Story((SPOT,), durable_every=every, steps=10_000)
    told.running("a", "b", "c", "d")
    told.steps(15, step_time_s=step_s)
    assert asked_copies(told) == []


def test_it_does_not_stand_for_the_one_that_a_notice_asks_for() -> None:
    told = Story((SPOT,), durable_every=500, steps=10_000, min_workers=4)
    told.running("a", "b", "c", "d")
    told.steps(12, step_time_s=20.0)
    assert told.state.copy_asked_step == 12 and told.state.stored_generation == 0
