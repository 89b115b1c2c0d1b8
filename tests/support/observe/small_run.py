"""A small run as journal lines: start, a notice, a sudden loss with two steps trained again, the
end."""

from __future__ import annotations

from elastic.ledger.journal import Line
from elastic.types import (
    Action,
    Copy,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    Plan,
    PlanEntered,
    Pool,
    RequestNodes,
    Resume,
    StepDone,
    Stop,
    WorkerId,
)

T0 = 1000.0
POOLS = (
    Pool("spot", gpus_per_node=2, market_type="spot", max_nodes=2),
    Pool("on-demand", gpus_per_node=2, market_type="on-demand"),
)
JOB = {
    "name": "tiny",
    "folder": "/jobs/tiny",
    "program": "/jobs/tiny/program.py",
    "steps": 12,
    "global_batch": 8,
}


def workers(*nodes: str) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(node, k) for node in nodes for k in range(2))


def plan(generation: int, text_nodes: tuple[str, ...], layout: Layout, **more: object) -> Plan:
    ranks = workers(*text_nodes)
    n = 8 // layout.dp
    return Plan(generation, layout, ranks, (n,) * layout.dp, (4,) * layout.pp, **more)  # type: ignore[arg-type]


PLANS = (
    plan(1, ("a", "b", "c"), Layout(dp_shard=6)),
    plan(2, ("a", "c"), Layout(pp=2, dp_shard=2), cause="notice", resume=Resume("live", 4)),
    plan(3, ("c",), Layout(tp=2), cause="loss", resume=Resume("peer", 6)),
)


def tick(at_s: float, *events: Event, actions: tuple[Action, ...] = (), reason: str = "") -> Line:
    decision = Decision(actions, reason) if actions or reason else None
    return Line(T0 + at_s, 1, tuple((T0 + at_s, event) for event in events), decision)


def step(at_s: float, number: int, generation: int) -> Line:
    return tick(
        at_s, StepDone(generation, number, 6.0 - 0.1 * number, tokens=1024, step_time_s=0.5)
    )


def lines() -> list[Line]:
    durable = Copy(
        12,
        "durable",
        3,
        Layout(tp=2),
        uri="/runs/tiny-1/checkpoints/step-00000012",
        n_bytes=2_500_000,
    )
    start = DriverStarted("tiny-1", 1, JOB, POOLS, ModelProfile(4, 1000, ()))
    ready = [NodeReady(Node(name, "spot" if name < "c" else "on-demand", 2)) for name in "abc"]
    return [
        tick(
            0,
            start,
            actions=(RequestNodes("spot", 2, "r1"), RequestNodes("on-demand", 1, "r2")),
            reason="6 workers wanted",
        ),
        tick(2, *ready),
        tick(
            3,
            *(NodePrepared(name) for name in "abc"),
            actions=(EnterPlan(PLANS[0]),),
            reason="3 nodes are prepared",
        ),
        tick(4, PlanEntered(1, 0)),
        *(step(4 + 0.5 * n, n, 1) for n in range(1, 5)),
        tick(
            6.1,
            Notice("b", T0 + 36.1),
            actions=(EnterPlan(PLANS[1]),),
            reason="b goes in 30 s: 6 -> 4 workers",
        ),
        tick(6.5, PlanEntered(2, 4, bytes_moved=4000)),
        *(step(6.5 + 0.5 * (n - 4), n, 2) for n in range(5, 9)),
        tick(
            8.6,
            NodeLost("a", "its process is gone"),
            actions=(EnterPlan(PLANS[2]),),
            reason="a is lost: 4 -> 2 workers",
        ),
        tick(9.5, PlanEntered(3, 6)),
        *(step(9.5 + 0.5 * (n - 6), n, 3) for n in range(7, 13)),
        tick(13, Evaluated(3, 12, {"validation_loss": 4.9})),
        tick(
            13.2,
            CopyStored(durable, seconds=0.3),
            actions=(Stop("succeeded", "12 steps"),),
            reason="all 12 steps are done",
        ),
    ]
