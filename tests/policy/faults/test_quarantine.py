"""A quarantined node of a cluster that has no others is given again when a node is asked for: for
how long it is not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, orders

from elastic.policy.faults.quarantine import DAY_S
from elastic.policy.faults.unreached import OUT_MOST_S, OUT_S
from elastic.policy.speed import relayout
from elastic.policy.state.fold import fold
from elastic.types import (
    Decided,
    Decision,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    Plan,
    Prepare,
    Quarantine,
    ReleaseNode,
    RequestFailed,
    WorkerFailed,
    WorkerId,
)

ECC = "CUDA error: uncorrectable ECC error encountered"
ADDRESS = "CUDA error: an illegal memory access was encountered"


def story(*names: str, keeps_out: bool = True, **changes: Any) -> Story:
    """A generation on these nodes, five steps old."""
    made = Story(**changes)
    made.state = replace(made.state, keeps_out=keeps_out)
    made.running(*names, steps=5)
    return made


def beside(keeps_out: bool = True) -> Story:
    """One that trains on a, and b, which is prepared."""
    made = story("a", keeps_out=keeps_out, max_workers=1)
    made.nodes("b")
    return made


def quarantines(made: Story) -> list[Quarantine]:
    return [order for one in made.decisions for order in orders(one, Quarantine)]


def device_fails(made: Story, error: str) -> Quarantine:
    """That of a; the others continue, and a is quarantined."""
    plan = made.state.plan
    assert isinstance(plan, Plan)
    made.tick(WorkerFailed(WorkerId("a", 0), plan.generation, "device", error, 0, 6))
    held = {
        worker.node_id: [((rank - 1) % len(plan.ranks), 5, "peer")]
        + [(rank, 5, "live")] * (worker.node_id != "a")
        for rank, worker in enumerate(plan.ranks)
    }
    made.quiesced(plan, held)
    made.entered()
    made.tick(after_s=6.0)
    (found,) = quarantines(made)
    return found


def aside(made: Story, name: str, out_s: float) -> None:
    """The order is given and carried out."""
    decision = Decision((Quarantine(name, "why", out_s), ReleaseNode(name)))
    made.state = fold(made.state, Decided(decision), made.now_s)
    made.tick(NodeLost(name, "released"))


def back(made: Story, name: str, after_s: float = 0.1) -> Decision:
    return made.tick(NodeReady(Node(name, "spot", 1)), after_s=after_s)


def prepares(decision: Decision) -> bool:
    return bool(orders(decision, Prepare))


@pytest.mark.parametrize(
    ("error", "out_s"), [(ECC, DAY_S), (ADDRESS, OUT_S)], ids=["hardware", "may pass"]
)
def test_how_long_depends_on_what_was_wrong(error: str, out_s: float) -> None:
    made = story("a", "b", "c")
    assert device_fails(made, error).out_s == out_s
    made.tick(NodeLost("a", "released"))
    early = back(made, "a", after_s=out_s / 2)
    assert not prepares(early) and "is not used for another" in early.reason
    assert made.state.nodes["a"].status == "quarantined"
    made.tick(NodeLost("a", "released"))
    assert prepares(back(made, "a", after_s=out_s / 2))


def test_who_gave_wrong_results_is_out_for_a_day() -> None:
    made = story("a", "b", "c")
    made.state = replace(made.state, blamed={"a": "step 4: silent data corruption"})
    made.tick()
    assert [(one.node_id, one.out_s) for one in quarantines(made)] == [("a", DAY_S)]


def test_one_that_comes_back_early_is_released_and_does_not_sit_there_paid_for() -> None:
    made = beside()
    aside(made, "b", OUT_S)
    died = made.state.history["spot"]
    decision = back(made, "b")
    (quarantine,) = orders(decision, Quarantine)
    assert quarantine.out_s == pytest.approx(OUT_S - 0.2), "what gives nodes may be another one now"
    assert orders(decision, ReleaseNode) == [ReleaseNode("b")] and not orders(decision, Prepare)
    assert made.state.kept_out["b"] == (1, pytest.approx(made.now_s + OUT_S - 0.2))
    assert made.state.history["spot"].deaths == died.deaths, "it was no start"


def test_each_time_is_longer_and_an_older_journal_knows_none() -> None:
    made, waits = beside(), []
    for _ in range(6):
        ready = replace(made.state.nodes["b"], status="ready")
        made.state = replace(
            made.state, nodes={**made.state.nodes, "b": ready}, refused={"b": "it lacks memory"}
        )
        (order,) = orders(made.tick(), Quarantine)
        waits.append(order.out_s)
        made.tick(NodeLost("b", "released"))
        assert prepares(back(made, "b", after_s=order.out_s))
        made.tick(NodePrepared("b"))
    assert waits == [OUT_S, 2 * OUT_S, 4 * OUT_S, 8 * OUT_S, OUT_MOST_S, OUT_MOST_S]
    old = beside(keeps_out=False)
    aside(old, "b", 0.0)
    assert prepares(back(old, "b")) and not old.state.kept_out


def test_a_node_that_was_never_prepared_is_left_to_the_patience_with_its_pool() -> None:
    made = story("a")
    back(made, "b")
    (order,) = orders(made.tick(NodeRefused("b", "it lacks memory")), Quarantine)
    assert order.out_s == 0.0
    made.tick(NodeLost("b", "released"))
    assert prepares(back(made, "b"))


def test_one_that_is_no_better_when_it_comes_back_is_out_for_longer_and_its_pool_is_not_blamed() -> (
    None
):
    made = beside()
    aside(made, "b", OUT_S)
    back(made, "b", after_s=OUT_S)
    (order,) = orders(made.tick(NodeRefused("b", "it lacks memory")), Quarantine)
    assert order.out_s == 2 * OUT_S and made.state.history["spot"].deaths == 0


def test_that_all_nodes_are_out_is_said() -> None:
    made = Story()
    made.state = replace(made.state, keeps_out=True)
    made.nodes("a")
    aside(made, "a", OUT_S)
    why = "no capacity: all that the cluster has of it are in use (0); 1 node of it quarantined"
    decision = made.tick(*(RequestFailed("spot", name, why) for name in made.state.requests))
    assert decision.reason.startswith("waiting for workers") and why in decision.reason


def test_what_was_out_long_ago_is_forgotten() -> None:
    made = story("a", "b", "c")
    aside(made, "b", OUT_S)
    made.now_s += OUT_S + DAY_S
    aside(made, "c", OUT_S)
    assert made.state.kept_out == {"c": (1, pytest.approx(made.now_s + OUT_S - 0.1))}


def test_a_slow_node_that_has_come_back_is_not_left_for_another_one() -> None:
    """It was left for another one, and it was given: its pool has no other."""
    made = story("a", "b")
    node = made.state.nodes["b"]
    assert relayout._can_be_had(made.state, node, made.now_s)
    came_back = replace(made.state, kept_out={"b": (1, 0.0)})
    assert not relayout._can_be_had(came_back, node, made.now_s)
    assert relayout._can_be_had(replace(came_back, keeps_out=False), node, made.now_s)


# ------------------------------------------------------------------------------- another driver came


@pytest.mark.parametrize("ends_quarantined", [True, False])
def test_the_next_driver_releases_what_was_quarantined_and_not_released(
    ends_quarantined: bool,
) -> None:
    made = story("a", "b")
    decision = Decision((Quarantine("b", "why", OUT_S), ReleaseNode("b")))
    made.state = fold(made.state, Decided(decision), made.now_s)
    assert not orders(made.tick(), ReleaseNode), "it is being released"
    gates = {"keeps_out": True, "ends_quarantined": ends_quarantined}
    made.tick(replace(made.start, epoch=2, attached=True, **gates))
    found = [made.tick(*(NodeReady(Node(name, "spot", 1)) for name in "ab")), made.tick()]
    assert [one for each in found for one in orders(each, ReleaseNode)] == (
        [ReleaseNode("b")] if ends_quarantined else []
    )
    again = [one.out_s for each in found for one in orders(each, Quarantine)]
    assert again == ([pytest.approx(OUT_S, abs=1.0)] if ends_quarantined else [])


def test_a_node_that_the_next_driver_has_only_not_heard_of_may_come_back() -> None:
    made = story("a", "b")
    made.tick(replace(made.start, epoch=2, attached=True, keeps_out=True))
    made.tick(NodeReady(Node("a", "spot", 1)))
    made.tick(after_s=31.0)
    (order,) = quarantines(made)
    assert (order.node_id, order.out_s) == ("b", 0.0)
