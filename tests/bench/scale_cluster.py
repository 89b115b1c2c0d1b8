"""A made-up cluster: what RayBackend calls of Ray, and workers that answer as real ones do, all in
this process.

The driver loop, the policy, the journal, the backend and its pieces (worker group, gather, silence,
admission, the store that a generation meets at) are the real ones. Rank 0 tells of a step every
`step_s`; a worker without news holds its poll as long as it was asked to. Nothing is trained.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from elastic.cluster.backend import driver_hold, ray_backend
from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.local.local_cluster import NodeOrder
from elastic.cluster.workers import neighbor_links, worker_group
from elastic.driver import drive
from elastic.ledger.journal import Journal
from elastic.policy.decide import decide
from elastic.policy.state.fold import State
from elastic.types import (
    Abort,
    Action,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Holding,
    ModelProfile,
    NodePrepared,
    Plan,
    PlanEntered,
    Pool,
    Prepare,
    Quiesce,
    Quiesced,
    ShardStored,
    StepDone,
    WorkerId,
)
from elastic.types.orders import WorkerOrder
from elastic.worker.process.beat import Beat

IDLE_STEPS = 6  # in the middle of a generation, of which the CPU is counted
NOTICE_AT = 4
STEPS = 24


@dataclass(eq=False)
class Ref:
    """The answer to a call; a poll has one at `until_s` at the latest."""

    value: Any = None
    until_s: float = 0.0  # 0 = it is there
    worker: Worker | None = None


@dataclass(eq=False)
class Worker:
    """Its session, with numbered messages until they are acknowledged."""

    cluster: MadeUpCluster
    me: WorkerId
    outbox: list[tuple[int, Event]] = field(default_factory=list)
    n: int = 0
    rank: int = -1
    plan: Plan | None = None
    step: int = 0
    next_s: float = inf
    left: bool = False
    poll_ref: Ref | None = None

    def say(self, event: Event) -> None:
        self.n += 1
        self.outbox.append((self.n, event))
        if self.poll_ref is not None:
            self.poll_ref.until_s = 0.0

    def order(self, order: Ref | WorkerOrder) -> None:
        given = order.value if isinstance(order, Ref) else order
        match given.action:
            case Prepare():
                self.say(NodePrepared(self.me.node_id, (0,), 1_000_000))
            case EnterPlan(plan):
                self.enter(plan)
            case Quiesce(generation) | Abort(generation):
                if self.plan is not None and self.plan.generation == generation and self.rank >= 0:
                    self.leave()

    def enter(self, plan: Plan) -> None:
        if self.plan is not None and not self.left:
            self.leave()
        self.plan, self.left = plan, False
        self.rank = self.cluster.rank(plan, self.me)
        self.step = plan.resume.step
        if self.rank == 0:
            self.say(PlanEntered(plan.generation, self.step))
            self.next_s = time.monotonic() + self.cluster.step_s
            self.cluster.first = self
        elif self.rank < 0:
            self.leave()

    def leave(self) -> None:
        assert self.plan is not None
        first = self.cluster.first
        step = first.step if first is not None else self.step
        held = (
            ()
            if self.rank < 0
            else (Holding(self.me, self.plan.generation, self.rank, step, "live"),)
        )
        self.next_s, self.left = inf, True
        self.say(Quiesced(self.me, self.plan.generation, step, held))

    def advance(self, now_s: float) -> None:
        """Of rank 0."""
        if now_s >= self.next_s and self.plan is not None:
            self.step, self.next_s = self.step + 1, now_s + self.cluster.step_s
            took_s, digest = self.cluster.step_s, "0123456789abcdef"
            self.say(
                StepDone(
                    self.plan.generation, self.step, 1.0, 10, took_s, grad_norm=1.0, digest=digest
                )
            )
            if self.step >= STEPS:
                self.next_s = inf
                self.cluster.store_last(self.plan)

    def beat(self, seen: int) -> Beat:
        generation = self.plan.generation if self.plan is not None else 0
        step = self.cluster.first.step if self.cluster.first is not None else 0
        messages = tuple(m for m in self.outbox if m[0] > seen)
        phase = "stepping" if generation else "idle"
        return Beat(messages, generation, phase, step=step, progress=step, pid=0)


class Method:
    """`actor.method.remote(epoch, ...)`."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name = worker, name

    def remote(self, epoch: int, *arguments: Any) -> Ref:
        worker = self.worker
        if self.name == "poll":
            seen, wait_s = arguments
            worker.outbox = [m for m in worker.outbox if m[0] > seen]
            until_s = 0.0 if worker.outbox else time.monotonic() + wait_s
            worker.poll_ref = Ref(seen, until_s, worker)
            return worker.poll_ref
        order = getattr(worker, self.name, None)
        if order is not None:
            order(*arguments)
        return Ref()


class Actor:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Method:
        return Method(self._worker, name)


@dataclass
class MadeUpCluster:
    """In place of LocalCluster and of the module ray."""

    step_s: float
    ended = False
    n_nodes: int = 0
    workers: list[Worker] = field(default_factory=list)
    first: Worker | None = None  # rank 0 of the newest generation
    ranked: Plan | None = None
    ranks: dict[WorkerId, int] = field(default_factory=dict)

    def rank(self, plan: Plan, worker: WorkerId) -> int:
        """-1: it has none. Each real one looks for itself, in a process of its own."""
        if self.ranked is not plan:
            self.ranked, self.ranks = plan, {one: rank for rank, one in enumerate(plan.ranks)}
        return self.ranks.get(worker, -1)

    def store_last(self, plan: Plan) -> None:
        """The last step is saved by all, and they leave."""
        for worker in self.workers:
            if worker.plan is plan and worker.rank >= 0:
                worker.say(ShardStored(plan.generation, STEPS, worker.rank, 8, 0.1))
                worker.leave()

    # ------------------------------------------------------------------------------ as LocalCluster

    def add(self, order: NodeOrder) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self.n_nodes += 1
        answer.set_result({"ray_id": f"{self.n_nodes:056x}"})  # Ray looks at its length
        return answer

    def disconnect(self, *_: Any) -> None:
        """Nor has anything to end: nodes and words are none."""

    kill = close = disconnect

    def errors_of(self, pid: int) -> str:
        return ""

    def killed_by(self, pid: int) -> int:
        return 0

    # --------------------------------------------------------------------------------------- as ray

    @property
    def util(self) -> Any:
        return SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def is_initialized(self) -> bool:
        return True

    def put(self, value: Any) -> Ref:
        return Ref(value)

    def get(self, ref: Ref) -> Any:
        return ref.worker.beat(ref.value) if ref.worker is not None else ref.value

    def wait(
        self, refs: Sequence[Ref], num_returns: int, timeout: float
    ) -> tuple[list[Ref], list[Ref]]:
        until_s = time.monotonic() + timeout
        while True:
            now_s = time.monotonic()
            if self.first is not None:
                self.first.advance(now_s)
            ready = [ref for ref in refs if ref.until_s <= now_s]
            if ready or now_s >= until_s:
                return ready, []
            time.sleep(min(0.01, until_s - now_s))

    def remote(self, _: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._start))

    def _start(self, setup: Any) -> Actor:
        self.workers.append(Worker(self, setup.me))
        return Actor(self.workers[-1])


class Survey:
    """Nobody is lost."""

    alive: dict[str, Any] = {}
    draining: dict[str, float] = {}
    gone: dict[str, str] = {}
    head_lost = ""
    suspects = False
    liveness_known = True

    def __init__(self, *_: Any) -> None: ...
    def news(self, _: float) -> list[Any]:
        return []

    def suspect(self, _: Any) -> None: ...
    def check(self, _: str) -> str:
        return ""

    def close(self) -> None: ...


@contextmanager
def made_up(step_s: float) -> Iterator[MadeUpCluster]:
    cluster = MadeUpCluster(step_s)
    ends = patch.object(worker_group, "kill", lambda actor: None)
    with (
        patch.object(driver_hold, "ray", cluster),
        patch.object(worker_group, "ray", cluster),
        patch.object(neighbor_links, "ray", cluster),
    ):
        with patch.object(ray_backend, "Survey", Survey), ends:
            yield cluster


@dataclass
class Timed:
    """CPU seconds. `enter_s`: of the orders to enter a plan; `entered_s`: from there until the
    generation runs."""

    looks_s: list[float] = field(default_factory=list)
    changes_s: list[float] = field(default_factory=list)
    enter_s: list[float] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)
    # by the clock, CPU: where it begins, and ends
    idle: list[tuple[float, float]] = field(default_factory=list)
    ordered_s: float = 0.0

    def decide(self, state: State, now_s: float) -> Decision:
        began_s = time.process_time()
        if state.phase == "running" and len(self.entered_s) < len(self.enter_s) == state.generation:
            self.entered_s.append(began_s - self.ordered_s)
        found = decide(state, now_s)
        changed = any(isinstance(action, EnterPlan) for action in found.actions)
        (self.changes_s if changed else self.looks_s).append(time.process_time() - began_s)
        step = state.step if state.phase == "running" and state.generation > 1 else 0
        if len(self.idle) < 2 and step >= (STEPS - IDLE_STEPS - 2, STEPS - 2)[len(self.idle)]:
            self.idle.append((time.monotonic(), time.process_time()))
        return found

    def execute(self, of: RayBackend, action: Action) -> None:
        began_s = time.process_time()
        RayBackend.execute(of, action)
        if isinstance(action, EnterPlan):
            self.ordered_s = time.process_time()
            self.enter_s.append(self.ordered_s - began_s)


def run(n: int, per_node: int, model: ModelProfile, step_s: float) -> dict[str, float]:
    """A run with one notice: start, move, end."""
    n_nodes, timed = n // per_node, Timed()
    pools = (Pool("spot", "CPU", per_node, "spot", 0.0, 0, n_nodes),)
    job: dict[str, Any] = {
        "name": "scale", "steps": STEPS, "global_batch": 2 * n, "microbatch_size": 1, "seed": 0,
        "layout": "auto", "min_workers": per_node, "peer_every": 0, "durable_every": 0,
        "n_samples": 1_000_000, "drill": [{"at_step": NOTICE_AT, "notice": "any-spot",
        "deadline_s": 12}],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, made_up(step_s) as cluster:
        began_s = time.process_time()
        ray = RayBackend(RayRun("scale", folder, job, pools), cluster, commit=lambda *_: "made up")  # type: ignore[arg-type]
        ray.execute = lambda action: timed.execute(ray, action)  # type: ignore[method-assign]
        path = Path(folder) / "journal.jsonl"
        state = drive(
            ray, Journal(path, 1), DriverStarted("scale", 1, job, pools, model), decide=timed.decide
        )
        took_s = time.process_time() - began_s
        if (
            state.phase != "succeeded"
            or len(timed.changes_s) < 2
            or len(timed.idle) < 2
            or not timed.entered_s
        ):
            raise AssertionError(
                f"{n} workers: {state.phase} after {len(timed.changes_s)} plans: "
                f"{state.outcome_reason}"
            )
        (from_s, from_cpu_s), (to_s, to_cpu_s) = timed.idle
        return {
            "loop_ms": round(1000 * median(timed.looks_s), 3),
            "loop_change_ms": round(1000 * max(timed.changes_s), 1),
            "enter_s": round(max(timed.enter_s), 4),
            "answers_in_s": round(timed.entered_s[-1], 4),
            "idle_cpu": round((to_cpu_s - from_cpu_s) / (to_s - from_s), 3),
            "journal_kb": round(path.stat().st_size / 1e3, 1),
            "run_cpu_s": round(took_s, 2),
        }
