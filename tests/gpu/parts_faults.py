"""Two sessions on one GPU: an error that stays in one of them, a kernel that does not end; and what
certify says of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from one_shot_rows import FORK, Tell, guarded

from elastic.certify.gpu.real_faults import BACK, RealFaultSession
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import job_of, plan_of
from elastic.certify.harness.place import Place, find
from elastic.certify.harness.worker_pool import WorkerPool
from elastic.certify.tasks import Tasks
from elastic.scenarios.limit import Limit
from elastic.types import Action, Layout, Quiesced, StepDone, WorkerFailed, WorkerId
from elastic.types.orders import InjectFault, WorkerOrder
from elastic.worker.hosting import session_processes

MANY, SHORT_BLOCKS = 1_000_000, 4  # steps; blocks of the paced program
NAMED_MOST_S = 20.0
# of certify; whether ranks can share a GPU it always asks
SHOWN = "abort,kill,growth,notice,reshard,step time,checkpoint"


@dataclass(frozen=True)
class Stands:
    """Where a worker stands, as its beats say."""

    worker: WorkerId
    arrived: Any
    doing: str
    where: str


@dataclass(frozen=True)
class SayWhere(Action):
    """Where do you stand?"""


class FaultySession(RealFaultSession):
    def order(self, order: WorkerOrder) -> None:
        if not isinstance(order.action, SayWhere):
            super().order(order)
            return
        beat = self.poll(0, 0.0)
        self._put(Stands(self.me, beat.arrived, beat.doing, beat.where))  # type: ignore[arg-type]


def _open(lab: Lab, worker_pool: WorkerPool) -> Any:
    """Both train, with peer replicas."""
    from elastic.scenarios.one_process import program_file

    worker_pool.open(job_of("faults", program_file("paced"), MANY), lab.run_folder())
    plan = plan_of(1, Layout(dp_shard=2), worker_pool.workers, n_blocks=SHORT_BLOCKS, peer_every=2)
    worker_pool.enter(plan)
    worker_pool.stepped(plan, 6)
    return plan


def _sticky(tell: Tell, lab: Lab, worker_pool: WorkerPool) -> None:
    from elastic.certify.checks.fault_checks import _from_memory

    plan = _open(lab, worker_pool)
    lost, other = plan.ranks[1], plan.ranks[0]
    began = time.monotonic()
    worker_pool.order(lost, InjectFault("illegal"))
    found = lambda: [e for e in worker_pool.events(WorkerFailed) if e.worker == lost]  # noqa: E731
    worker_pool.until(lambda: bool(found()), "the error is reported", 30.0, broken=True)
    tell("sticky.reported_s", time.monotonic() - began)
    tell("sticky.kind_is_device", found()[0].kind == "device")
    tell("sticky.error", f"{found()[0].kind}: {found()[0].error}")
    asked = time.monotonic()
    worker_pool.abort(1, plan.ranks)
    left = worker_pool.left(plan, [other], 30.0, broken=True)
    tell("sticky.others_left_s", max(left.values()) - asked)
    worker_pool.until(
        lambda: any(e.worker == lost for e in worker_pool.events(Quiesced)),
        "the lost one has left",
        30.0,
        broken=True,
    )
    offered = [h for e in worker_pool.events(Quiesced) if e.worker == lost for h in e.holdings]
    tell("sticky.process_alive", not worker_pool.hosted.process(lost).ended)
    tell("sticky.lost_offers_live", any(h.kind == "live" for h in offered))
    after = plan_of(
        2,
        Layout(),
        (other,),
        n_blocks=SHORT_BLOCKS,
        resume=_from_memory(worker_pool, plan, (other,)),
        cause="loss",
    )
    asked = time.monotonic()
    worker_pool.enter(after)
    worker_pool.until(
        lambda: bool(worker_pool.events(StepDone, 2)), "a step of the other", 60.0, broken=True
    )
    tell("sticky.went_on", True)
    tell("sticky.went_on_s", time.monotonic() - asked)
    worker_pool.hosted.kill(lost)


def _endless(tell: Tell, name: str, lab: Lab, worker_pool: WorkerPool) -> None:
    """`name`: of the fault, and of its rows."""
    from elastic.certify.checks.fault_checks import _quiet
    from elastic.worker.hosting.absent_ranks import RankSite, absent_ranks

    plan = _open(lab, worker_pool)
    hangs, other = plan.ranks[1], plan.ranks[0]
    worker_pool.order(hangs, InjectFault(name))
    began = time.monotonic()
    _quiet(worker_pool, plan)
    seen: dict[WorkerId, Stands] = {}
    named: dict[WorkerId, str] = {}
    looks = 0
    while looks < 2 or (
        not named and time.monotonic() - began < NAMED_MOST_S
    ):  # what it is at is known from the second look on
        asked, looks = len(worker_pool.log), looks + 1
        for worker in plan.ranks:
            worker_pool.order(worker, SayWhere())
        worker_pool.until(
            lambda: len(_said(worker_pool, asked)) == 2,  # noqa: B023
            "where they stand",
            20.0,
            broken=True,
        )
        seen = _said(worker_pool, asked)
        named = absent_ranks(
            {worker: RankSite(s.arrived, s.doing, s.where) for worker, s in seen.items()},
            staged=False,
        )
    tell(f"{name}.named_s", time.monotonic() - began)
    tell(f"{name}.named_right", list(named) == [hangs])
    shown = {str(worker): why for worker, why in named.items()}
    tell(
        f"{name}.named",
        shown or {str(worker): (s.arrived, s.doing, s.where) for worker, s in seen.items()},
    )
    asked_s = time.monotonic()
    worker_pool.abort(1, [other])
    tell(
        f"{name}.others_left_s",
        max(worker_pool.left(plan, [other], 40.0, broken=True).values()) - asked_s,
    )
    worker_pool.hosted.kill(hangs)


def _said(worker_pool: WorkerPool, since: int) -> dict[WorkerId, Stands]:
    return {e.worker: e for _, _, e in worker_pool.log[since:] if isinstance(e, Stands)}


def faults(tell: Tell, cpu: bool, seconds: float) -> None:
    if cpu:
        session_processes.get_context = lambda _: FORK  # type: ignore[attr-defined,assignment]
    place = Place("cpu-gloo", 2) if cpu else replace(find(1, True), ranks=2)
    limit = Limit.after(seconds)

    def with_worker_group(work: Callable[[Lab, WorkerPool], None]) -> None:
        with lab.worker_pool(limit) as worker_pool:
            work(lab, worker_pool)

    with Lab(place, session=f"{FaultySession.__module__}:{FaultySession.__qualname__}") as lab:
        endless = [
            partial(with_worker_group, partial(_endless, tell, name)) for name in ("endless", BACK)
        ]
        guarded(tell, partial(with_worker_group, partial(_sticky, tell)), *endless)


# ------------------------------------------------------------------------------------------ certify


def certify(tell: Tell, cpu: bool, seconds: float) -> None:
    """Its checks for one GPU, each told as it is done."""
    import tempfile

    from elastic.certify.certify_command import carry_out

    def told(check: Any) -> None:
        tell(check.name, f"{check.verdict} {check.why}".strip())
        for key, value in check.figures.items():
            tell(f"{check.name}.{key}", value)

    place = find(0, True) if cpu else find(1, True)
    only = ("planner error",) if cpu else tuple(SHOWN.split(","))
    storage = tempfile.mkdtemp(prefix="one-shot-storage-")
    carry_out(place, storage, Tasks(told), budget_s=max(1.0, seconds - 5.0), only=only)
