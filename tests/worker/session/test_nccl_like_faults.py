"""Each kind of fault within each phase of a generation, on a process group that behaves like
NCCL's: those that are left have left soon, resume from what they hold, and reach the losses of a
run that nothing has happened to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until
from support.worker.chain import check, job_of, pass_through
from support.worker.nccl_like_pool import NcclLikePool
from support.worker.peer_recovery import begin
from support.worker.phase_faults import Kind, Phase, PhaseFault
from support.worker.plans import from_copies, live, plan
from support.worker.recovery import digests_agree, loss_curve_agrees, newest_whole
from support.worker.worker_pool import TIMEOUT_S

from elastic.types import (
    Abort,
    CopyStored,
    Layout,
    Plan,
    Quiesced,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import InjectFault

pytestmark = pytest.mark.e2e
# from the fault, and the order to leave right behind it: 0.1 s on a machine at rest; half of the
# groups' own timeout
QUIESCED_S = TIMEOUT_S / 2
LATE_S = 0.003
STEPS = 14
AFTER = {4: Layout(dp_shard=4), 3: Layout(dp_shard=3), 2: Layout(tp=2)}  # by how many are left


@pytest.fixture(scope="module")
def nccl_pool() -> Iterator[NcclLikePool]:
    pool = NcclLikePool(4)
    yield pool
    pool.close()


@pytest.fixture
def pool(nccl_pool: NcclLikePool) -> Iterator[NcclLikePool]:
    """Every process new: the one before may be armed."""
    yield nccl_pool
    for process in nccl_pool.processes:
        process.kill()
        process.join()
    nccl_pool.revive()


@dataclass(frozen=True)
class Case:
    """`transition`: what leads to the generation in which it happens; "" = its first. `late`:
    operations on the device begin LATE_S after they are called."""

    kind: Kind
    phase: Phase
    transition: str = ""
    before: Layout = Layout(dp_shard=4)
    to: Layout = Layout(dp_shard=3)
    after: int = 1
    late: bool = False

    def __str__(self) -> str:
        where = f"{self.transition} to {self.to}" if self.transition else str(self.before)
        return f"{self.kind} in {self.phase} {self.after}, {where}" + (
            ", late" if self.late else ""
        )


KINDS: tuple[Kind, ...] = ("kill", "stop", "stuck", "abort")
CUTS = (Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2))
MOVES = {
    "notice": (CUTS[0], Layout(tp=2)), "growth": (Layout(dp_shard=3), Layout(pp=2, dp_shard=2)),
    "loss": (CUTS[0], Layout(pp=3)),
}  # fmt: skip
PLACES: tuple[tuple[Phase, int], ...] = (
    ("meet", 0), ("meet", 2), ("move", 0), ("move", 1), ("probe", 1)
)  # fmt: skip
CASES = [
    *(
        Case(kind, "step", before=cut, after=at, late=late)
        for kind in KINDS
        for cut, at, late in zip(CUTS, (2, 5, 7), (True, False, True), strict=True)
    ),
    *(Case(kind, "commit", before=cut, after=0) for kind in KINDS for cut in CUTS),
    *(Case(kind, "copy", before=cut, after=0) for kind in KINDS for cut in CUTS),
    *(  # each kind meets each place, and both meet each transition
        Case(kind, phase, which, *MOVES[which], after=at, late=at > 0)
        for i, kind in enumerate(KINDS)
        for j, (phase, at) in enumerate(PLACES)
        for which in (list(MOVES)[(i + j) % 3],)
    ),
]
# stays in each transition; another worker keeps its copy than that of the one that was lost before
VICTIM = 2
SMALL = [  # each kind, phase and transition
    Case("kill", "step", after=5, late=True), Case("stuck", "commit", before=CUTS[2], after=0),
    Case("abort", "copy", after=0), Case("stop", "move", "notice", *MOVES["notice"]), Case("kill",
    "meet", "growth", *MOVES["growth"], after=2), Case("kill", "move", "loss", *MOVES["loss"],
    late=True), Case("abort", "probe", "growth", *MOVES["growth"]),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_nothing_is_lost(
    pool: NcclLikePool, tmp_path: Path, case: Case, record_property: Callable[..., None]
) -> None:
    record_property("quiesced_s", happens(pool, tmp_path, case))


@pytest.mark.whole
@pytest.mark.parametrize("case", [case for case in CASES if case not in SMALL], ids=str)
def test_nothing_is_lost_in_any(
    pool: NcclLikePool, tmp_path: Path, case: Case, record_property: Callable[..., None]
) -> None:
    record_property("quiesced_s", happens(pool, tmp_path, case))


def happens(pool: NcclLikePool, run: Path, case: Case) -> float:
    """Seconds from the fault until the last of the others had left."""
    job, path = job_of("tiny.py", steps=STEPS), run / "fault"
    first = begin(pool, job, run, case.before)
    workers = pool.workers
    for worker in workers:
        pool.call(worker, "late", LATE_S if case.late else 0.0)
    number = 2 if case.transition else 1
    fault = PhaseFault(case.kind, case.phase, number, str(path), case.after, from_step=4)
    victim = workers[
        VICTIM
        if case.transition == "growth"
        else VICTIM + 1
        if case.transition == "notice"
        else VICTIM
    ]
    pool.call(victim, "arm_phase", fault)
    there = enter(pool, case, first, workers) if case.transition else list(first.ranks)
    until(lambda: pool.drain() or path.exists(), lambda: f"the fault; {pool.log[-12:]}")
    if case.kind == "kill":
        pool.wait(lambda: victim in pool.gone(), "the death")
    others = [worker for worker in there if worker != victim]
    pids = [pool.pids[workers.index(worker)] for worker in others]
    staying = there if case.kind == "abort" else others
    left_s = leave(pool, staying, number) - float(path.read_text())
    if case.kind in ("stop", "stuck"):  # the driver ends who does not answer
        pool.kill(victim)
    goes_on(pool, job, first, staying)
    assert [pool.pids[workers.index(worker)] for worker in others] == pids
    assert all(pool.processes[workers.index(worker)].is_alive() for worker in others)
    assert {e.kind for e in pool.events(WorkerFailed)} <= {"collective"}
    assert left_s < QUIESCED_S
    return round(left_s, 3)


def enter(pool: NcclLikePool, case: Case, first: Plan, workers: list[WorkerId]) -> list[WorkerId]:
    """The second generation, in which the fault will happen; returns who takes part."""
    if case.transition == "loss":
        pool.kill(workers[0])
        there = workers[1:]
        leave(pool, there, 1)
        pool.enter(plan(2, case.to, there, 12, resume=resume_of(pool, first, there), peer_every=2))
        return there
    staying = workers if case.transition == "growth" else workers[4 - case.to.world_size :]
    pool.enter(plan(2, case.to, staying, 12, resume=live(first), peer_every=2))
    return list(workers)


def leave(pool: NcclLikePool, who: list[WorkerId], number: int) -> float:
    """The driver's order; returns when the last of them had left."""
    for worker in who:
        pool.order(worker, Abort(number))
    pool.stores[number] = None
    pool.wait(lambda: {e.worker for e in pool.events(Quiesced, number)} >= set(who), "failure")
    first: dict[WorkerId, float] = {}
    for at_s, _, event in pool.log:
        if isinstance(event, Quiesced) and event.generation == number and event.worker in who:
            first.setdefault(event.worker, at_s)
    return max(first.values())


def resume_of(pool: NcclLikePool, first: Plan, there: list[WorkerId]) -> Any:
    newest = {e.worker: e for e in pool.events(Quiesced) if e.worker in there}
    step, holdings = newest_whole(first, list(newest.values()))
    return from_copies(first, step, holdings)


def goes_on(pool: NcclLikePool, job: dict[str, Any], first: Plan, there: list[WorkerId]) -> None:
    """From what they hold of the first generation, to the last step."""
    number = max(pool.stores) + 1
    resume = resume_of(pool, first, there)
    copied = [
        e.copy.step
        for e in pool.events(CopyStored)
        if e.copy.kind == "peer" and e.copy.generation == 1
    ]
    assert resume.step >= max(copied), "what was acknowledged is there"
    new = plan(number, AFTER[len(there)], there, 12, resume=resume, peer_every=2)
    pool.enter(new)
    pool.quiesced(number, len(new.ranks))
    assert digests_agree(pool, number)
    loss_curve_agrees(pool, job, resumed=resume.step)
    assert max(e.step for e in pool.events(StepDone)) == job["steps"]


@pytest.mark.whole
def test_a_chain_of_layouts_on_a_device_that_is_late(pool: NcclLikePool, tmp_path: Path) -> None:
    """Operations begin after they have returned: what they read and write must stay until they are
    waited for."""
    layouts = [
        Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2), Layout(cp=2,
        dp_shard=2), Layout(dp_shard=3)
    ]  # fmt: skip
    job = job_of("tiny.py", steps=2 * len(layouts) + 2)
    pool.open(job, tmp_path)
    for worker in pool.workers:
        pool.call(worker, "late", LATE_S)
    check(job, tmp_path, pass_through(pool, job, tmp_path, layouts, 2), 1e-4)
    assert not pool.events(WorkerFailed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["optimizer", "forward", "backward", "host_copy"])
def test_a_lost_device_serves_what_it_keeps_for_others(
    pool: NcclLikePool, tmp_path: Path, place: str
) -> None:
    """No communicator is set up with it, and what it sends does not pass a device."""
    job = job_of("tiny.py", steps=STEPS)
    first = begin(pool, job, tmp_path, Layout(dp_shard=4))
    workers, victim = pool.workers, pool.workers[1]
    pool.order(victim, InjectFault("device_error", place=place))
    pool.wait(
        lambda: any(e.kind == "device" for e in pool.events(WorkerFailed)),
        "the report of the device",
    )
    gone = first.ranks[next(rank for rank, keepers in enumerate(first.copies_to) if 1 in keepers)]
    pool.kill(gone)
    there = [worker for worker in workers if worker != gone]
    leave(pool, there, 1)
    resume = resume_of(pool, first, there)
    assert {h.worker for h in resume.holdings if h.rank == first.ranks.index(gone)} == {victim}
    others = [worker for worker in there if worker != victim]
    pool.enter(plan(2, AFTER[2], others, 12, resume=resume, peer_every=2))
    pool.quiesced(2, 2)
    assert digests_agree(pool, 2)
    loss_curve_agrees(pool, job, resumed=resume.step)
    (left,) = {e.holdings for e in pool.events(Quiesced, 2) if e.worker == victim}
    assert left == () and pool.processes[1].is_alive()
