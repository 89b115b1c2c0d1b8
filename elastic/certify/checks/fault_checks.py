"""Without Ray: a hung rank, a killed one, one that is announced to leave, and one that joins; on
plain worker processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from elastic.certify.harness.lab import Lab
from elastic.certify.harness.layouts_tried import N_BLOCKS, job_of, layouts, live, plan_of
from elastic.certify.harness.worker_pool import WorkerPool
from elastic.certify.tasks import Task
from elastic.policy.copies.recovery import covered
from elastic.scenarios.check import CONTENT, KEPT, LOSS, NONE_LOST, Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit
from elastic.scenarios.one_process import losses, program_file, worst_difference
from elastic.types import (
    CopyStored,
    DigestPart,
    Holding,
    Job,
    Layout,
    NodePrepared,
    Plan,
    Probed,
    Quiesce,
    Quiesced,
    Resume,
    StepDone,
    WorkerFailed,
    WorkerId,
    tolerance,
)

SHORT_BLOCKS = 4  # of programs/paced.py
MANY = 1_000_000  # steps: until it is stopped
QUIET_S = 1.0
PEER_EVERY = 4
TOLD_S = 2.0  # after which a driver knows anyway: a call to a dead Ray actor fails after about that
FREED = Bound(
    "freed_s",
    "shutting gloo's sockets frees a rank in 1 ms, and nothing may wait for the group's "
    "timeout of 60 s",
    most=2.0,
)
FUNCTION = Bound(
    "probe_difference",
    "the loss of one fixed sample, in the layout before and the one after, must agree within "
    "float32's tolerance (relative)",
    most=tolerance(Job()),
)


# -------------------------------------------------------------------------------- a hung collective


def abort_layouts(n: int) -> list[Layout]:
    """Sharded data parallelism over all ranks, and the layout that has most axes at once."""
    mixed = [one for one in layouts(n) if one.dp_replicate == 1]
    most = max(
        mixed,
        key=lambda one: ((one.pp > 1) + (one.tp > 1) + (one.dp_shard > 1), -abs(one.pp - one.tp)),
    )
    return list(dict.fromkeys([Layout(dp_shard=n), most]))


def abort_task(lab: Lab) -> Task:
    found = abort_layouts(lab.place.ranks)
    names = tuple(f"abort {layout}" for layout in found)
    return Task(names, partial(_abort, lab, found), least_s=10.0, weight=1.0, where=lab.place.where)


def _abort(lab: Lab, found: list[Layout], limit: Limit) -> Iterator[Check]:
    for layout in found:
        with lab.worker_pool(limit) as worker_pool:
            worker_pool.open(job_of("abort", program_file("small"), MANY), lab.run_folder())
            yield _hang(worker_pool, layout)


def _hang(worker_pool: WorkerPool, layout: Layout) -> Check:
    plan = plan_of(1, layout, worker_pool.workers, n_blocks=N_BLOCKS)
    worker_pool.enter(plan)
    worker_pool.stepped(plan, 3)
    hung, others = plan.ranks[-1], plan.ranks[:-1]
    worker_pool.hosted.stop(hung)
    _quiet(worker_pool, plan)
    asked = time.monotonic()
    worker_pool.abort(1, others)
    freed = worker_pool.left(plan, others, broken=True)
    worker_pool.hosted.kill(hung)
    after = plan_of(2, Layout(dp_shard=len(others)), others, n_blocks=N_BLOCKS)
    worker_pool.log.clear()
    worker_pool.enter(after)
    worker_pool.until(
        lambda: bool(worker_pool.events(StepDone, 2)),
        "a step of those that were freed",
        broken=True,
    )
    figures = {
        "freed_s": max(freed.values()) - asked, "ranks_freed": len(others),
        "stepping_again_s": worker_pool.when(StepDone, 2)[0] - asked,
    }  # fmt: skip
    leave(worker_pool, after)
    return judge(f"abort {layout}", figures, [FREED])


def _quiet(worker_pool: WorkerPool, plan: Plan) -> None:
    """Waits until all ranks hang in a collective: no step has come for a while."""

    def quiet() -> bool:
        return time.monotonic() - max(worker_pool.when(StepDone, plan.generation)) > QUIET_S

    worker_pool.until(quiet, "a hung collective", most_s=20.0)


def leave(worker_pool: WorkerPool, plan: Plan) -> None:
    for worker in plan.ranks:
        worker_pool.order(worker, Quiesce(plan.generation, save=False))
    worker_pool.left(plan, plan.ranks, broken=True)


# ----------------------------------------------------------------------------- kill, growth, notice


@dataclass
class Story:
    """What happened to one job: its plans, when each event came, and the losses of the steps that
    were kept."""

    worker_pool: WorkerPool
    cold_s: float  # from the start of the processes to the first step
    plans: list[Plan] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)

    def note(self) -> None:
        """A step that was done again counts as it was done last."""
        for event in sorted(self.worker_pool.events(StepDone), key=lambda e: e.generation):
            self.losses[event.step] = event.train_loss

    def last_step(self, generation: int) -> int:
        return max(e.step for e in self.worker_pool.events(StepDone, generation))


def story_task(lab: Lab) -> Task:
    return Task(
        ("kill", "growth", "notice"),
        partial(_story, lab),
        least_s=20.0,
        weight=1.5,
        where=lab.place.where,
    )


def _story(lab: Lab, limit: Limit) -> Iterator[Check]:
    job = job_of("story", program_file("paced"), MANY)
    run = lab.run_folder()
    lab.drop()  # so that a cold start is seen
    with lab.worker_pool(limit) as worker_pool:
        worker_pool.open(job, run)
        first = plan_of(
            1,
            Layout(dp_shard=worker_pool.n),
            worker_pool.workers,
            n_blocks=SHORT_BLOCKS,
            peer_every=PEER_EVERY,
        )
        worker_pool.enter(first)
        worker_pool.stepped(first, 1)
        story = Story(worker_pool, time.monotonic() - worker_pool.started_s, [first])
        figures = [_kill(story)]
        worker_pool.hosted.open(worker_pool.n - 1, job, run)
        worker_pool.until(
            lambda: len(worker_pool.events(NodePrepared)) > worker_pool.n,
            "the new worker prepared",
            broken=True,
        )
        figures += [_move(story, worker_pool.n), _move(story, worker_pool.n - 1)]
        leave(worker_pool, story.plans[-1])
        story.note()
        alone = losses("unpaced", job, max(story.losses), limit=limit)
    moved = [NONE_LOST, CONTENT, FUNCTION, LOSS, _faster()]
    bounds = ([KEPT, CONTENT, LOSS, _faster()], moved, moved)
    for i, name in enumerate(("kill", "growth", "notice")):
        since = int(figures[i].pop("from_step"))
        of_its_own = {step: loss for step, loss in story.losses.items() if step > since}
        figures[i] |= {
            "worst_loss_difference": worst_difference(of_its_own, alone),
            "cold_start_s": story.cold_s,
        }
        figures[i]["pause_vs_cold_start"] = figures[i]["pause_s"] / story.cold_s
        yield judge(name, figures[i], bounds[i])


def _faster() -> Bound:
    return Bound(
        "pause_vs_cold_start",
        "a change must take less than starting the same processes again, seen in the same run",
        most=1.0,
    )


def _kill(story: Story) -> dict[str, float]:
    """SIGKILL for the last rank; the others resume from memory."""
    worker_pool, old = story.worker_pool, story.plans[-1]
    worker_pool.until(lambda: bool(_acknowledged(worker_pool)), "a peer replica")
    worker_pool.stepped(old, PEER_EVERY + 2)
    lost, survivors = old.ranks[-1], old.ranks[:-1]
    killed = time.monotonic()
    worker_pool.hosted.kill(lost)
    told_s = killed + TOLD_S
    worker_pool.until(
        lambda: bool(worker_pool.events(WorkerFailed, 1)) or time.monotonic() > told_s,
        "the others notice",
        broken=True,
    )
    noticed_s = time.monotonic() - killed
    worker_pool.abort(1, survivors)
    worker_pool.left(old, survivors, broken=True)
    newest, copied = story.last_step(1), max(_acknowledged(worker_pool))
    resume = _from_memory(worker_pool, old, survivors)
    plan = plan_of(
        2,
        Layout(dp_shard=len(survivors)),
        survivors,
        n_blocks=SHORT_BLOCKS,
        resume=resume,
        peer_every=PEER_EVERY,
        cause="loss",
    )
    story.plans.append(plan)
    worker_pool.enter(plan)
    worker_pool.until(
        lambda: bool(worker_pool.events(StepDone, 2)), "a step after the kill", broken=True
    )
    pause_s = worker_pool.when(StepDone, 2)[0] - killed
    return {
        "pause_s": pause_s, "noticed_s": noticed_s, "steps_lost": max(0, newest - resume.step),
        "steps_before_acknowledged_copy": max(0, copied - resume.step),
        "content_equal": _content(worker_pool, plan, len(survivors)),
        "from_step": resume.step,
    }  # fmt: skip


def _acknowledged(worker_pool: WorkerPool) -> list[int]:
    return [e.copy.step for e in worker_pool.events(CopyStored) if e.copy.kind == "peer"]


def _from_memory(worker_pool: WorkerPool, old: Plan, survivors: tuple[WorkerId, ...]) -> Resume:
    """The newest step whose every box one of the survivors holds."""
    newest = {e.worker: e for e in worker_pool.events(Quiesced) if e.worker in survivors}
    held: list[Holding] = [
        h for q in newest.values() for h in q.holdings if h.generation == old.generation
    ]
    whole = [
        step for step in {h.step for h in held} if covered(old, [h for h in held if h.step == step])
    ]
    if not whole:
        raise Failed(
            "the survivors hold no whole copy of the state; they hold "
            f"{[(h.kind, h.rank, h.step) for h in held]}"
        )
    step = max(whole)
    return Resume(
        "peer",
        step,
        old.generation,
        old.layout,
        old.layers,
        tuple(h for h in held if h.step == step),
    )


def _move(story: Story, n: int) -> dict[str, float]:
    """To `n` ranks, live: those that leave only send. From the last step before to the first one
    after."""
    worker_pool, old = story.worker_pool, story.plans[-1]
    worker_pool.until(
        lambda: len(worker_pool.events(StepDone, old.generation)) >= 3,
        "steps before the move",
        broken=True,
    )
    cause = "growth" if n > len(old.ranks) else "notice"
    plan = plan_of(
        old.generation + 1,
        Layout(dp_shard=n),
        worker_pool.workers,
        n_blocks=SHORT_BLOCKS,
        resume=live(old),
        peer_every=PEER_EVERY,
        cause=cause,
    )
    story.plans.append(plan)
    worker_pool.enter(plan)
    worker_pool.until(
        lambda: len(worker_pool.events(StepDone, plan.generation)) >= 2,
        f"steps after the {cause}",
        broken=True,
    )
    before, after = (
        worker_pool.when(StepDone, old.generation),
        worker_pool.when(StepDone, plan.generation),
    )
    first = worker_pool.events(StepDone, plan.generation)[0].step
    pause_s = after[0] - before[-1] - (after[1] - after[0])
    return {
        "pause_s": max(0.0, pause_s),
        "steps_lost": abs(first - 1 - story.last_step(old.generation)),
        "content_equal": _content(worker_pool, plan, max(n, len(old.ranks))),
        "from_step": first - 1, "probe_difference": _probe_difference(worker_pool, plan),
    }  # fmt: skip


def _probe_difference(worker_pool: WorkerPool, plan: Plan) -> float:
    """Relative, of the probe sample's loss; no number where it was not compared."""
    found = [
        abs(e.loss - e.expected) / abs(e.expected)
        for e in worker_pool.events(Probed, plan.generation)
        if e.expected
    ]
    return max(found, default=math.nan)


def _content(worker_pool: WorkerPool, plan: Plan, n: int) -> int:
    """1 = the digests of all tensors before and after the move agree. Waits for them."""
    number = plan.generation
    worker_pool.until(
        lambda: len(worker_pool.events(DigestPart, number)) >= n,
        f"digests of generation {number}",
        broken=True,
    )
    return int(digests_agree(worker_pool.events(DigestPart, number)))


def digests_agree(parts: list[DigestPart]) -> bool:
    before = sum(p.before for p in parts if p.before is not None) % 2**64
    after = sum(p.after for p in parts if p.after is not None) % 2**64
    return before == after and any(p.after is not None for p in parts)
