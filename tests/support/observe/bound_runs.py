"""Journals of made-up runs, each bound by one thing: a run without a fault, and what is changed
in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.observe.small_run import T0

from elastic.ledger.journal import Line
from elastic.observe.accounting.accounts import Books
from elastic.observe.diagnosis.evidence import Evidence, EvidenceReader
from elastic.policy.state.fold import changes
from elastic.types import (
    Admission,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    HardwareProfile,
    Layout,
    Matmul,
    ModelProfile,
    Node,
    NodePrepared,
    NodeReady,
    Plan,
    PlanEntered,
    Pool,
    RanksTimed,
    SampleProfile,
    StepDone,
    Stop,
    WorkerId,
)

LAYERS, STEPS, BATCH = 4, 40, 16
SAMPLE = SampleProfile(
    4e12, (("none", 1 << 20), ("selective", 1 << 19), ("full", 1 << 18)), 1 << 16, 1 << 16,
    sequence=1024, matmuls=(Matmul(1024, 4096, 4096, 12, "n"),), moved_bytes=1 << 24, n_ops=20,
    tokens=1024,
)  # fmt: skip
MODEL = ModelProfile(LAYERS, 1_000_000, (), sample=SAMPLE)
GPU = HardwareProfile(
    "H100", 9.9e14, 80 << 30, 5e10, (("bfloat16", 9.9e14), ("float32", 4.9e14)), reached=0.8,
    units=132, memory_bytes_per_s=3.35e12, node_bytes_per_s=4.5e11, arch="Hopper",
)  # fmt: skip
JOB: dict[str, Any] = {
    "name": "bound", "steps": STEPS, "global_batch": BATCH, "precision": "bfloat16",
    "compile": True,
}  # fmt: skip


@dataclass(frozen=True)
class BoundRun:
    """`unit_s`: of each rank; `step`: what is changed in each StepDone; `at_step`: events behind
    the step of that number, and `pause_s` later; `late_s`: between two steps; `waits_s`: prepared
    nodes wait for the plan."""

    layout: Layout = Layout(dp_shard=4)
    job: tuple[tuple[str, Any], ...] = ()
    unit_s: Sequence[float] = (0.02, 0.02, 0.02, 0.02)
    data_s: Sequence[float] = ()
    step_s: float = 1.0
    step: Callable[[StepDone], StepDone] = lambda done: done
    at_step: tuple[tuple[int, tuple[Event, ...]], ...] = ()
    late_s: float = 0.0
    n_microbatches: int = 2
    hardware: tuple[HardwareProfile, ...] = ()
    kind: str = "H100"
    model: ModelProfile = MODEL
    prepared_s: float = 1.0
    links: tuple[float, ...] = ()
    pause_s: float = 0.0
    waits_s: float = 0.0

    def plan(self) -> Plan:
        ranks = tuple(WorkerId(name, 0) for name in self.nodes)
        share = BATCH // self.layout.dp
        stages = self.layout.n_stages
        return Plan(
            1, self.layout, ranks, (share,) * self.layout.dp, (LAYERS // stages,) * stages,
            n_microbatches=self.n_microbatches,
        )  # fmt: skip

    @property
    def nodes(self) -> list[str]:
        return [f"n{k}" for k in range(self.layout.world_size)]

    def lines(self) -> list[Line]:
        pool = Pool(
            "spot", self.kind, 1, "spot", usd_per_node_h=2.0, max_nodes=len(self.nodes)
        )  # fmt: skip
        start = DriverStarted("bound-1", 1, {**JOB, **dict(self.job)}, (pool,), self.model,
            hardware=self.hardware)  # fmt: skip
        ready = [NodeReady(Node(name, "spot", 1)) for name in self.nodes]
        found = [line(0.0, start, *ready)]
        prepared = (self._prepared(k, name) for k, name in enumerate(self.nodes))
        began_s = self.prepared_s + self.waits_s
        found += [
            line(self.prepared_s, *prepared),
            line(began_s, actions=(EnterPlan(self.plan()),)),
            line(began_s, PlanEntered(1, 0)),
        ]
        return [*found, *self._steps(began_s)]

    def _prepared(self, k: int, name: str) -> NodePrepared:
        if not self.links:
            return NodePrepared(name)
        found = Admission(0.1, 0.0, {}, 1e12, 0, link_bytes_per_s=self.links[k], neighbor="n0")
        return NodePrepared(name, admission=found)

    def _steps(self, at_s: float) -> Iterable[Line]:
        behind = dict(self.at_step)
        for step in range(1, STEPS + 1):
            at_s += self.step_s + self.late_s
            done = StepDone(1, step, 5.0 - 0.05 * step, BATCH * 1024, self.step_s)
            yield line(at_s, self.step(done))
            if step == 10 and self.unit_s:
                yield line(at_s, RanksTimed(1, step, 8, tuple(self.unit_s), (), tuple(self.data_s)))
            if step in behind:
                at_s += self.pause_s
                yield line(at_s, *behind[step])
        yield line(at_s, actions=(Stop("succeeded", "done"),))

    def with_(self, **more: Any) -> BoundRun:
        return replace(self, **more)


def line(at_s: float, *events: Event, actions: tuple[Any, ...] = ()) -> Line:
    decision = Decision(actions, "because") if actions else None
    return Line(T0 + at_s, 1, tuple((T0 + at_s, event) for event in events), decision)


def evidence_of(lines: Iterable[Line]) -> Evidence:
    """Of a whole journal."""
    reader, books = EvidenceReader(), Books()
    for change in changes(lines):
        reader.take(change)
        books.take(change)
    return reader.found(books.closed())
