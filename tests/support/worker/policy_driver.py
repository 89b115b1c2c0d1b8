"""The policy as the driver of a pool whose workers break where a test wants it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.reference import train
from support.worker.chain import check_stored
from support.worker.faulty_pool import FaultyPool
from support.worker.plans import plan

from elastic.policy.decide import decide
from elastic.policy.state.fold import State, fold
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import (
    Abort,
    Copy,
    CopyStored,
    Decided,
    Decision,
    DriverStarted,
    EnterPlan,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    RollForward,
    StepDone,
    WorkerId,
)
from elastic.types import Pool as NodePool
from elastic.worker.checkpoint import checkpoint_writer
from elastic.worker.hosting.aggregate import CheckpointParts, Gather
from elastic.worker.program.model_profile import trace

AT, STEPS, PEER_EVERY = 4, 8, 2  # the step after AT ones breaks


REPLICAS, SHARDS = Layout(dp_replicate=2, dp_shard=2), Layout(dp_shard=3)


PIPELINE, TENSOR = Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2)


LAYOUTS = (REPLICAS, SHARDS, PIPELINE, TENSOR)


class Driver:
    """The policy over the workers of a pool, one per node: hears what they say and has its orders
    carried out."""

    def __init__(
        self, pool: FaultyPool, job: dict[str, Any], run: Path, layout: Layout, peer_every: int
    ) -> None:
        self.pool, self.job, self.storage = pool, job, open_storage(str(run))
        self.workers = pool.open(job, run, n=layout.world_size)
        nodes = tuple(worker.node_id for worker in self.workers)
        self.program = load_program(job["program"])
        self.state = State()
        self.heard = len(pool.log)
        self.lost: set[WorkerId] = set()
        self.skipped: tuple[int, ...] = ()  # steps that a guard is to skip
        self.decisions: list[Decision] = []
        self.gather = Gather(self.commit_copy, lambda node_id: 1)
        rules = {"layout": "auto", "min_workers": 1, "peer_every": peer_every, "durable_every": 0}
        pools = (NodePool("p", max_nodes=len(nodes)),)
        self.fold(DriverStarted("run", 1, job | rules, pools, self.profile()))
        for name in nodes:
            self.fold(NodeReady(Node(name, "p")), NodePrepared(name))
        self.first = plan(1, layout, self.workers, job["global_batch"], peer_every=peer_every)

    def profile(self) -> ModelProfile:
        return trace(self.program)

    def commit_copy(self, parts: CheckpointParts) -> None:
        plan = parts.plan
        uri = checkpoint_writer.commit(
            self.storage, parts.step, plan.generation, world_size=len(plan.ranks), epoch=1, meta={}
        )
        self.fold(
            CopyStored(
                Copy(parts.step, "durable", plan.generation, plan.layout, plan.layers, uri=uri)
            )
        )

    def fold(self, *events: Any) -> None:
        for event in events:
            self.state = fold(self.state, event, time.monotonic())

    def listen(self) -> None:
        self.pool.drain()
        news, self.heard = self.pool.log[self.heard :], len(self.pool.log)
        for _, worker, message in news:
            self.fold(*self.gather.add(worker, message))
        for worker in self.pool.gone():
            if worker in self.workers and worker not in self.lost:
                self.lost.add(worker)
                self.fold(NodeLost(worker.node_id, "killed"))

    def carry_out(self, decision: Decision) -> None:
        self.fold(Decided(decision))
        for action in decision.actions:
            alive = [worker for worker in self.workers if worker not in self.lost]
            if isinstance(action, EnterPlan):
                self.gather.expect(action.plan)
                with suppress(OSError):
                    self.pool.enter(action.plan)
            for worker in alive:
                with suppress(OSError):  # gone by now: `listen` finds that out
                    if isinstance(action, Abort | RollForward):
                        self.pool.order(worker, action)

    def run(self, timeout_s: float = 300.0) -> None:
        """Until the copy of the last step is stored. What is armed before is armed before the first
        step."""
        until = time.monotonic() + timeout_s
        self.carry_out(Decision((EnterPlan(self.first),), "the test's plan"))
        while self.state.saved_step < self.job["steps"]:
            self.listen()
            decision = decide(self.state, time.monotonic())
            assert self.state.phase not in ("failed", "stopped"), self.state.outcome_reason
            if decision.actions:
                self.decisions.append(decision)
                self.carry_out(decision)
            assert time.monotonic() < until, [d.reason for d in self.decisions]

    def orders(self, kind: type) -> list[Any]:
        return [
            action
            for decision in self.decisions
            for action in decision.actions
            if isinstance(action, kind)
        ]

    def told(self, kind: type) -> list[Any]:
        return [event for _, _, event in self.pool.log if isinstance(event, kind)]

    def check_end(self) -> None:
        """The stored state and the losses are those of a plain trainer."""
        alone = train(self.program, self.job, self.job["steps"], skipped=self.skipped)
        check_stored(self.state.durable[0].uri, alone)
        last = {
            e.step: e.train_loss for e in sorted(self.told(StepDone), key=lambda e: e.generation)
        }
        assert last == {
            step: pytest.approx(alone.losses[step - 1], abs=1e-4, nan_ok=True) for step in last
        }
        assert sorted(self.state.digests) == list(range(1, self.job["steps"] + 1)), (
            "a step was never told of"
        )
