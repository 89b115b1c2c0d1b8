"""Processes that die one after another without a step done: the run ends, whatever nodes come."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, orders, stopped

from elastic.policy.faults.retries import DEATHS_MOST, OUTAGE_S
from elastic.policy.state.fold import fold
from elastic.types import (
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Quarantine,
    Silent,
    Stop,
    WorkerFailed,
    WorkerId,
)


def story(*, bounds_deaths: bool = True, spares_noticed: bool = True) -> Story:
    made = Story()
    made.state = replace(made.state, bounds_deaths=bounds_deaths, spares_noticed=spares_noticed)
    made.running("n0", steps=4)
    return made


def dies(made: Story, node: str, *, then: str, cause: str = "released") -> None:
    """One of the generation that runs, which begins anew on the node `then`."""
    if made.state.plan is None and made.state.target is not None:
        made.entered()
    failed = WorkerFailed(WorkerId(node, 0), 0, "process", "its process is gone; it wrote: abort")
    made.tick(failed)
    if then != node and not any(orders(one, Stop) for one in made.decisions):
        made.tick(NodeLost(node, cause))
    made.nodes(then)


def quarantined(made: Story) -> Quarantine | None:
    """By the last decision."""
    return next(iter(orders(made.decisions[-1], Quarantine)), None)


def dies_at_once(made: Story) -> Quarantine | None:
    """What is ordered of the node, if anything."""
    made.tick(WorkerFailed(WorkerId("n0", 0), 0, "process", "its process is gone"))
    made.tick()
    return quarantined(made) or next(iter(orders(made.decisions[-2], Quarantine)), None)


def test_the_run_ends_and_names_nodes_step_and_cause() -> None:
    made, nodes = story(), [f"n{k // 4}" for k in range(DEATHS_MOST + 1)]
    for node, then in zip(nodes, nodes[1:], strict=False):
        assert not any(orders(one, Stop) for one in made.decisions), node
        dies(made, node, then=then)
    stop = stopped(made)
    assert stop.outcome == "failed"
    assert stop.reason == (
        "processes died 8 times in a row, on n0, n1, and no step was done past 4; the last one: "
        "worker n1/0: its process is gone; it wrote: abort"
    )


@pytest.mark.parametrize("how", ["progress", "reclaimed", "one node", "a journal of before"])
def test_what_is_no_crash_loop_does_not_end_it(how: str) -> None:
    made = story(bounds_deaths=how != "a journal of before")
    for k in range(2 * DEATHS_MOST):
        if how == "progress" and made.state.target is not None:
            made.entered()
            made.steps(made.state.best_step + 1 - made.state.step)
        node, then = ("n0", "n0") if how == "one node" else (f"n{k}", f"n{k + 1}")
        dies(made, node, then=then, cause="preempted" if how == "reclaimed" else "released")
    assert made.state.generation > DEATHS_MOST or how == "one node"
    assert not any(orders(one, Stop) for one in made.decisions)


@pytest.mark.parametrize(
    ("taken_back", "spares_noticed", "ends"),
    [(False, True, False), (True, True, True), (False, False, True)],
    ids=["a notice", "a notice that was withdrawn", "a journal of before"],
)
def test_nodes_that_end_as_their_notices_said_are_no_crash_loop(
    taken_back: bool, spares_noticed: bool, ends: bool
) -> None:
    """Steps longer than the notice: each node is there until it is taken, its process does not
    answer any more, and it is released before anything tells that it is gone."""
    made = story(spares_noticed=spares_noticed)
    for k in range(2 * DEATHS_MOST):
        if any(orders(one, Stop) for one in made.decisions):
            break
        made.tick(Notice(f"n{k}", made.now_s + 1.0))
        if taken_back:
            made.tick(NoticeWithdrawn(f"n{k}"))
        dies(made, f"n{k}", then=f"n{k + 1}")
    assert any(orders(one, Stop) for one in made.decisions) == ends
    assert made.state.generation >= DEATHS_MOST
    assert bool(made.state.deaths) == ends


@pytest.mark.parametrize(("n_nodes", "flag"), [(1, True), (2, True), (1, False)])
def test_on_a_machine_that_has_no_other_beside_it_the_run_ends_too(
    n_nodes: int, flag: bool
) -> None:
    """It dies in the first step after each start, is quarantined, and is had again: not where its
    pool may have another."""
    made = Story((replace(SPOT, market_type="owned", max_nodes=n_nodes),))
    made.state = replace(made.state, bounds_deaths=True, keeps_out=True, bounds_alone=flag)
    made.nodes("n0")
    for _ in range(3 * DEATHS_MOST):
        made.tick(after_s=20)
        made.entered()
        order = dies_at_once(made)
        while order is not None:
            made.tick(NodeLost("n0", "released"))
            made.tick(NodeReady(Node("n0", "spot")), after_s=order.out_s + 1)
            order = quarantined(made)
        if any(orders(one, Stop) for one in made.decisions):
            break
        made.tick(NodePrepared("n0"), after_s=20)
    ends = flag and n_nodes == 1
    assert any(orders(one, Stop) for one in made.decisions) == ends
    assert len(made.state.deaths) == (DEATHS_MOST if ends else 3 * DEATHS_MOST)
    if ends:
        assert (
            "processes died 8 times in a row, on n0, and no step was done" in stopped(made).reason
        )


def test_what_failed_on_nodes_that_are_long_gone_is_forgotten() -> None:
    """A thousand nodes in a day; what is counted is the last hour of each."""
    made = story()
    state, plan = made.state, made.state.plan
    assert plan is not None
    for k in range(1000):
        name, now_s = f"spot-{k}", made.now_s + 86.4 * k
        died = WorkerFailed(WorkerId(name, 0), 0, "process", "exit code 1")
        for event in (NodeReady(Node(name, "spot")), NodePrepared(name), died, NodeLost(name)):
            state = fold(state, event, now_s)
        state = replace(state, silences={**state.silences, name: ((now_s, "silent"),)})
    state = fold(state, Silent(WorkerId("n0", 0), plan.generation, "stepping", 9.0), now_s)
    assert len(state.process_failures) == len(state.silences) - 1 == 3600 // 86.4 + 1


@pytest.mark.parametrize("flag", [True, False])
def test_a_node_whose_time_is_over_is_tried_again_and_goes_at_the_next_death(flag: bool) -> None:
    made = Story((replace(SPOT, market_type="owned"),))
    made.state = replace(made.state, keeps_out=True, tries_again=flag)
    made.nodes("n0")
    died, outs, at = 0, [], []
    while len(outs) < 3:
        made.tick(after_s=20)
        made.entered()
        order, died = dies_at_once(made), died + 1
        while order is not None and len(outs) < 3:
            outs, at = [*outs, order.out_s], [*at, died]
            made.tick(NodeLost("n0", "released"))
            made.tick(NodeReady(Node("n0", "spot")), after_s=order.out_s + 1)
            order = quarantined(made)
        made.tick(NodePrepared("n0"), after_s=20)
    assert outs == [300.0, 600.0, 1200.0]
    assert at == ([4, 5, 6] if flag else [4, 4, 4])


@pytest.mark.parametrize("redone", [0, 1], ids=["", "a step is done again each time"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_network_that_fails_for_minutes_behind_a_step_is_outlasted(
    flag: bool, redone: int
) -> None:
    made = story()
    made.state = replace(made.state, outlasts_breaks=flag)
    begun_s = made.now_s
    while made.state.phase != "failed":
        plan = made.state.plan
        assert plan is not None
        made.tick(WorkerFailed(WorkerId("n0", 0), plan.generation, "collective", "timed out"))
        made.quiesced(plan, {"n0": [(0, 4 - redone, "live")]})
        if made.state.phase != "failed":
            made.tick(after_s=(made.decisions[-1].wake_at_s or 0) - made.now_s)
            made.entered()
            made.steps(redone)
    assert "attempts in a row" in stopped(made).reason
    assert (OUTAGE_S <= made.now_s - begun_s < OUTAGE_S + 60.0) is flag
