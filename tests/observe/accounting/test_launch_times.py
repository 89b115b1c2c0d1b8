"""From a node's request to its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.ledger.journal import Line
from elastic.observe.accounting.launch_times import launches, sentence
from elastic.types import (
    Action,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodeReady,
    Plan,
    Pool,
    RequestFailed,
    RequestNodes,
    StepDone,
    WorkerId,
)

POOL = Pool("spot", max_nodes=4)
START = DriverStarted("r", 1, {"steps": 9}, (POOL,), ModelProfile(1, 1, ()))


def tick(at_s: float, *events: Event, orders: tuple[Action, ...] = ()) -> Line:
    return Line(at_s, 1, tuple((at_s, event) for event in events), Decision(orders, "why"))


def ready(node_id: str, pool: str = "spot") -> NodeReady:
    return NodeReady(Node(node_id, pool))


def entering(generation: int, *nodes: str) -> tuple[Action, ...]:
    ranks = tuple(WorkerId(node, 0) for node in nodes)
    return (
        EnterPlan(Plan(generation, Layout(dp_shard=len(ranks)), ranks, (1,) * len(ranks), (1,))),
    )


def step(generation: int, n: int) -> StepDone:
    return StepDone(generation, n, 1.0, 8, 1.0)


BEGIN = [
    tick(100, START, orders=(RequestNodes("spot", 2, "s1"), RequestNodes("fixed", 1, "f1"))),
    tick(130, ready("a"), orders=entering(1, "a")),
    tick(140, step(1, 1)),
]


def test_each_node_counts_once_from_its_own_request_to_its_own_first_step() -> None:
    lines = [
        *BEGIN,
        tick(150, ready("b"), ready("f", "fixed"), step(1, 2), orders=entering(2, "a", "b", "f")),
        tick(160, step(2, 3)),
        tick(161, step(2, 4)),
    ]
    found = launches(lines)
    assert found.seconds == {"spot": [40.0, 60.0], "fixed": [60.0]}
    assert found.medians() == {
        "fixed": {"median_s": 60.0, "nodes": 1},
        "spot": {"median_s": 50.0, "nodes": 2},
    }
    assert sentence(found.medians()) == "fixed 60.0 s (1 node), spot 50.0 s (2 nodes)"


def test_what_never_came_and_what_was_never_asked_for_is_left_out() -> None:
    lines = [
        *BEGIN,
        tick(
            150,
            RequestFailed("fixed", "f1", "no capacity"),
            orders=(RequestNodes("spot", 0, "s1"),),
        ),
        tick(160, ready("b"), ready("f", "fixed"), orders=entering(2, "a", "b", "f")),
        tick(170, step(2, 2), orders=(RequestNodes("spot", 1, "s2"),)),
        tick(180, ready("c")),
        tick(190, NodeLost("c")),
        tick(195, ready("c"), orders=entering(3, "a", "c")),
        tick(200, step(3, 3)),
    ]
    assert launches(lines).seconds == {"spot": [40.0]}
    assert sentence({}) == ""


def test_a_driver_that_attaches_finds_its_nodes_again_and_one_that_does_not_begins_anew() -> None:
    more = tick(150, orders=(RequestNodes("spot", 1, "s3"),))
    attached = [
        *BEGIN,
        tick(145, replace(START, attached=True), ready("a")),
        more,
        tick(155, ready("a"), ready("b")),
    ]
    attached += [
        tick(156, orders=entering(2, "a")),
        tick(170, step(2, 2), orders=entering(3, "a", "b")),
        tick(180, step(3, 3)),
    ]
    assert launches(attached).seconds == {"spot": [40.0, 30.0]}, (
        "b answers the request, not a once more"
    )
    anew = [
        *BEGIN,
        tick(145, START, orders=(RequestNodes("spot", 1, "s1"),)),
        tick(155, ready("a"), orders=entering(2, "a")),
    ]
    assert launches([*anew, tick(165, step(2, 2))]).seconds == {"spot": [40.0, pytest.approx(20.0)]}
