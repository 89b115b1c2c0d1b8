"""What every Backend promises: the same actions in, the same order of event kinds out. On the
simulator and on Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT

from elastic.driver import Backend
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    Abort,
    Action,
    CopyStored,
    EnterPlan,
    Event,
    Holding,
    Job,
    Layout,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    Plan,
    PlanEntered,
    Pool,
    Prepare,
    Probed,
    Quarantine,
    Quiesce,
    Quiesced,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    Resume,
    StepDone,
    Stop,
    StoreCopy,
    WorkerId,
)  # fmt: skip

POOL = Pool("spot", market_type="spot", gpus_per_node=2, max_nodes=2)
JOB: dict[str, Any] = {
    "name": "contract", "folder": str(ROOT),
    "program": str(ROOT / "tests" / "programs" / "tiny_slow.py"), "steps": 100_000,
    "global_batch": 12, "seed": 1, "eval_every": 0, "eval_samples": 0, "clip_grad_norm": 1.0,
    "orphan_lease_s": 900.0, "drill": [],
}  # fmt: skip
MOST_S = 300.0


@pytest.fixture(params=["simulator", pytest.param("ray", marks=[pytest.mark.e2e])])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "simulator":
        yield SimBackend((POOL,), Job.from_plain(JOB))
        return
    from elastic.cluster.backend.ray_backend import RayBackend, RayRun
    from elastic.cluster.local.local_cluster import LocalCluster

    with LocalCluster((str(ROOT),)) as cluster:
        made = RayBackend(
            RayRun("contract", str(tmp_path), JOB, (POOL,), python_path=(str(ROOT),)), cluster
        )
        yield made
        made.close()


class Talk:
    """Gives orders and listens; `heard` are the events since the last order."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.heard: list[Event] = []

    def order(self, *actions: Action) -> None:
        self.heard = []
        for action in actions:
            self.backend.execute(action)

    def until(self, done: Callable[[], bool], what: str) -> None:
        patience = time.monotonic() + MOST_S
        while not done():
            assert time.monotonic() < patience, f"no {what}; heard {self.heard[-6:]}"
            self.heard += self.backend.poll(self.backend.now_s() + 1.0)

    def of(self, kind: type, generation: int | None = None) -> list[Any]:
        return [
            e
            for e in self.heard
            if isinstance(e, kind) and generation in (None, getattr(e, "generation", None))
        ]

    def first(self, kind: type, generation: int) -> int:
        return next(
            i
            for i, e in enumerate(self.heard)
            if isinstance(e, kind) and getattr(e, "generation", None) == generation
        )


def shares(n: int) -> tuple[int, ...]:
    return (12 // n,) * n


def test_same_actions_in_same_order_of_events_out(backend: Backend) -> None:
    talk = Talk(backend)
    talk.order(RequestNodes("spot", 2, "r1"))
    talk.until(lambda: len(talk.of(NodeReady)) == 2, "two nodes")
    names = [e.node.node_id for e in talk.of(NodeReady)]
    assert {type(e) for e in talk.heard} == {NodeReady}

    talk.order(RequestNodes("spot", 1, "r2"))
    talk.until(lambda: bool(talk.of(RequestFailed)), "a refusal")
    assert [(e.pool, e.request_id) for e in talk.of(RequestFailed)] == [("spot", "r2")]

    talk.order(*(Prepare(name) for name in names))
    talk.until(lambda: len(talk.of(NodePrepared)) == 2, "two prepared nodes")
    assert {type(e) for e in talk.heard} == {NodePrepared}

    workers = tuple(WorkerId(name, k) for name in names for k in range(2))
    first = Plan(
        1,
        Layout(dp_shard=4),
        workers,
        shares(4),
        (4,),
        peer_every=3,
        copies_to=((2,), (3,), (0,), (1,)),
    )
    talk.order(EnterPlan(first))
    talk.until(
        lambda: any(e.step >= 8 for e in talk.of(StepDone)) and bool(talk.of(CopyStored)),
        "eight steps and a copy",
    )
    assert isinstance(next(e for e in talk.heard if not isinstance(e, Probed)), PlanEntered)
    assert [e.step for e in talk.of(StepDone)] == list(range(1, len(talk.of(StepDone)) + 1))
    assert {e.copy.kind for e in talk.of(CopyStored)} == {"peer"}

    talk.order(StoreCopy(1))
    talk.until(lambda: any(e.copy.kind == "durable" for e in talk.of(CopyStored)), "a checkpoint")

    _live_to_one_node(talk, first)
    _ends(talk, names, workers)


def _live_to_one_node(talk: Talk, first: Plan) -> None:
    """The old generation is left, the new one entered at the same step, then stepped; senders leave
    it with nothing."""
    holdings = tuple(
        Holding(worker, 1, rank, -1, "live") for rank, worker in enumerate(first.ranks)
    )
    resume = Resume("live", -1, 1, first.layout, first.layers, holdings)
    talk.order(
        EnterPlan(
            Plan(
                2,
                Layout(dp_shard=2),
                first.ranks[:2],
                shares(2),
                (4,),
                resume=resume,
                cause="notice",
            )
        )
    )
    talk.until(
        lambda: bool(talk.of(StepDone, 2)) and len(talk.of(Quiesced, 2)) == 2,
        "a step of generation 2 and its senders",
    )
    entered = talk.first(PlanEntered, 2)
    assert entered < talk.first(StepDone, 2)
    assert {
        e.worker for e in talk.heard[:entered] if isinstance(e, Quiesced) and e.generation == 1
    } >= set(first.ranks[:2])
    assert talk.of(StepDone, 2)[0].step == talk.of(PlanEntered, 2)[0].step + 1
    assert {e.worker for e in talk.of(Quiesced, 2)} == set(first.ranks[2:])
    assert all(e.holdings == () for e in talk.of(Quiesced, 2))


def _refuses(talk: Talk) -> None:
    """A node that may not take part is told with a reason, and stays until it is released."""
    if isinstance(talk.backend, SimBackend):
        talk.backend._fault(Fault(0.0, "refuse", pool="spot", lasts_s=1e6))
    else:
        talk.backend.entrance.known["torch"] = "0.0"  # type: ignore[attr-defined]
    talk.order(RequestNodes("spot", 1, "r3"))
    talk.until(lambda: bool(talk.of(NodeReady)), "a node")
    node = talk.of(NodeReady)[0].node
    talk.order(Prepare(node.node_id))
    talk.until(lambda: bool(talk.of(NodeRefused)), "its refusal")
    refused = talk.of(NodeRefused)[0]
    assert (refused.node_id, refused.pool) == (node.node_id, "spot") and refused.reason
    assert not talk.of(NodeLost) and not talk.of(NodePrepared)
    talk.order(Quarantine(node.node_id, refused.reason), ReleaseNode(node.node_id))
    talk.until(lambda: bool(talk.of(NodeLost)), "the refused node released")
    assert [(e.node_id, e.cause) for e in talk.of(NodeLost)] == [(node.node_id, "released")]


def _ends(talk: Talk, names: list[str], workers: tuple[WorkerId, ...]) -> None:
    talk.order(ReleaseNode(names[1]))
    talk.until(lambda: bool(talk.of(NodeLost)), "the node released")
    assert [(e.node_id, e.cause) for e in talk.of(NodeLost)] == [(names[1], "released")]

    _refuses(talk)

    talk.order(Quiesce(2, save=True))
    talk.until(
        lambda: len(talk.of(Quiesced, 2)) == 2 and bool(talk.of(CopyStored)),
        "the end of generation 2 and its copy",
    )
    assert {(e.copy.kind, e.copy.generation) for e in talk.of(CopyStored)} == {("durable", 2)}
    assert len({e.step for e in talk.of(Quiesced, 2)}) == 1, "all stop at the same boundary"

    talk.order(Abort(2))
    talk.until(
        lambda: {e.worker for e in talk.of(Quiesced)} == set(workers[:2]), "an answer to the abort"
    )
    assert all(h.step == e.step for e in talk.of(Quiesced) for h in e.holdings if h.kind == "live")

    talk.order(Stop("stopped", "the contract ends"))
    assert talk.backend.poll(talk.backend.now_s() + 1.0) == []
