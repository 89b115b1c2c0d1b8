"""A job at a fixed layout without a driver: ranks that torchrun, or another trainer, has started.

Each rank runs one Session for one generation. Rank 0 holds the run's lease, decides where the run
begins, commits the checkpoints once every rank has said that its part is stored, and removes old
ones. There are no peer replicas: a loss ends all ranks, and whoever started them starts them anew
from the newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from elastic.config.fingerprint import KEY, batch_changed, differences, fingerprint
from elastic.config.job import JobSpec
from elastic.data.batches import few_samples
from elastic.data.budget import budget_of
from elastic.errors import ElasticError, LostContact, SpecError
from elastic.ledger.lease import Lease
from elastic.ledger.run_folder import DEFAULT_STORAGE
from elastic.storage import Storage, open_storage
from elastic.types import (
    CopyDamaged,
    CopyFailed,
    EnterPlan,
    Evaluated,
    Event,
    GuardTripped,
    Job,
    Layout,
    ModelProfile,
    NodePrepared,
    Outcome,
    Plan,
    PlanEntered,
    Prepare,
    Quiesce,
    Quiesced,
    Resume,
    ShardStored,
    StepDone,
    StoreCopy,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.equivalence.small_batch import batch_of
from elastic.worker.equivalence.static_plan import layout_of, plan_of
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.session.session import Session
from elastic.worker.session.workplace import Workplace
from elastic.worker.standalone.meeting import Meeting, Started, meet
from elastic.worker.standalone.static_checkpoints import CommittedCheckpoint, StaticCheckpoints

TICK_S = 0.1
TIMEOUT_S = 300.0  # of the meeting and of the groups: the last resort
TOLD = StepDone | Evaluated | CopyFailed | PlanEntered | GuardTripped | WrongNumbers
SETTLE_MOST_S = 600.0  # from the last step until its checkpoint is committed
AUTO_EVERY_S = 600.0  # between checkpoints where the job says "auto"
GOODBYE_S = 10.0


@dataclass(frozen=True)
class StandaloneOptions:
    """How to run; none of it changes what is computed. `on_copy`: called on every rank, in the same
    order, for each committed copy. `hear`: rank 0 is told events and sentences."""

    layout: str | None = None
    # default: the job's name, so that ranks that are started over continue
    run_name: str | None = None
    storage: str | None = None
    allow_changed: bool = False
    hear: Callable[[Event | str], None] = lambda event: None
    on_copy: Callable[[CommittedCheckpoint], None] | None = None


@dataclass
class StandaloneResult:
    """How it ended; the numbers are known to rank 0."""

    run: str
    outcome: Outcome
    reason: str
    step: int = 0
    layout: str = ""
    world_size: int = 1
    resumed_at: int = 0
    final_loss: float | None = None
    tokens: int = 0
    wall_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""

    def summary(self) -> dict[str, Any]:
        rate = self.tokens / self.wall_s if self.wall_s else 0.0
        plain = {
            **asdict(self),
            "steps": self.step,
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(rate, 1),
        }
        return {key: value for key, value in plain.items() if key != "step"}


@dataclass(frozen=True)
class StartDecision:
    """What rank 0 has decided before the first step."""

    generation: int
    epoch: int
    step: int = 0
    uri: str = ""
    error: str = ""

    @property
    def resume(self) -> Resume:
        return Resume("durable", self.step, uri=self.uri) if self.uri else Resume()


class StartRefused(SpecError):
    """Rank 0 says why, once; the others only leave with the same exit code."""


class StandaloneRun:
    """One rank of a job at a fixed layout. Raises SpecError where the input is wrong; `stop` may
    come from any thread."""

    def __init__(
        self, spec: JobSpec, wishes: StandaloneOptions, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.spec, self.wishes = spec, wishes
        self.me = Started.of(environment)
        self.layout: Layout = layout_of(spec, self.me.world_size, wishes.layout)
        self.name = wishes.run_name or spec.name
        root = (
            wishes.storage or spec.storage or environment.get("ELASTIC_STORAGE") or DEFAULT_STORAGE
        )
        self.storage: Storage = open_storage(f"{open_storage(root).uri}/{self.name}")
        self.ended = StandaloneResult(
            self.name, "failed", "", layout=str(self.layout), world_size=self.me.world_size
        )
        self._stop_reason = ""
        self._ack = 0
        self._losses: dict[int, float] = {}
        self._left: Quiesced | None = None
        self._failure: WorkerFailed | None = None
        self._damaged = ""
        self._entered = False
        self._lease: Lease | None = None  # of rank 0, once all ranks have met
        self._asked_copy_s = time.monotonic()

    def stop(self, reason: str) -> None:
        """Save at the next step boundary and leave."""
        self._stop_reason = self._stop_reason or reason

    @property
    def leads(self) -> bool:
        return self.me.rank == 0

    def to_the_end(self) -> StandaloneResult:
        began = time.monotonic()
        job = self.spec.plain() | {"drill": [], "layout": str(self.layout)}
        self.session = session = Session(self._worker(), job, self.storage.uri)
        session.device = self._device()
        meeting: Meeting | None = None
        try:
            session.order(WorkerOrder(Prepare(self._worker().node_id)))
            while session.place is None and self._failure is None:
                self._hear(None)
            if self._failure is not None:
                return self._result(began)
            meeting = meet(self.me, TIMEOUT_S)
            self._train(meeting, session.job)
            return self._result(began)
        finally:
            session.close(GOODBYE_S)  # the process groups are another trainer's again
            if self._lease is not None:
                self._lease.release()
            if meeting is not None:
                meeting.give_back()

    def _worker(self) -> WorkerId:
        return WorkerId(f"rank-{self.me.rank}", 0)

    def _device(self) -> torch.device | None:
        """The GPU of this process among those that it sees. Raises SpecError when there are too
        few."""
        if not torch.cuda.is_available():
            return None
        n = torch.cuda.device_count()
        index = self.me.local_rank if n > 1 else 0
        if index >= n:
            raise SpecError(
                f"LOCAL_RANK={index}, but this process sees {n} GPUs; start one rank for each GPU"
            )
        return torch.device("cuda", index)

    # -------------------------------------------------------------------------------------- the run

    def _train(self, meeting: Meeting, job: Job) -> None:
        """Generations, until one has begun to step: a checkpoint that turns out damaged is passed
        over."""
        assert self.session.place is not None
        profile = self._checked(self.session.place)
        mark = fingerprint(self.spec.program, job, profile, n_samples=job.n_samples)
        if self.leads and (few := few_samples(job.n_samples, self.spec.global_batch)):
            self.wishes.hear(few)
        passed: list[str] = []
        while True:
            begin = self._begin(meeting, mark, passed)
            plan = plan_of(
                self.spec, profile, self.layout, generation=begin.generation, resume=begin.resume
            )
            meta = {"run": self.name, KEY: mark}
            copies = StaticCheckpoints(
                self.storage, meeting, plan, begin.epoch, meta, self.spec, self._metrics
            )
            self.ended.resumed_at = begin.step
            self._generation(meeting, plan, copies)
            if self._entered or not begin.uri:
                break
            why = self._damage(meeting, plan)
            if not why:
                break
            passed.append(begin.uri)
            if self.leads:
                self.wishes.hear(f"{why}; the copy before it is taken")
            self._failure = self._left = None
        self._leave(meeting, copies)

    def _checked(self, place: Workplace) -> ModelProfile:
        """With what the program's structure says against layouts. (Their values are compared by
        `elastic certify JOB`.) Raises SpecError where it refuses this one."""
        if place.script is not None:
            return place.profile
        one = batch_of(place.dataset, budget_of(place.job, place.dataset, 4), 1)
        profile = structure_of(place.program, place.profile, one).close(place.profile)
        if why := profile.refusal(self.layout):
            text = f"{self.spec.name}: layout '{self.layout}': {why}"
            raise SpecError(text) if self.leads else StartRefused(text)
        return profile

    def _begin(self, meeting: Meeting, mark: Mapping[str, Any], passed: list[str]) -> StartDecision:
        def decide() -> str:
            try:
                return json.dumps(asdict(self._found(mark, passed)))
            except (ElasticError, OSError) as error:
                return json.dumps(asdict(StartDecision(0, 0, error=" ".join(str(error).split()))))

        key = f"begin/{len(passed)}"
        begin = StartDecision(**json.loads(meeting.decided(key, decide)))
        if begin.error:
            meeting.all_have_read(key)
            raise SpecError(begin.error) if self.leads else StartRefused(begin.error)
        if self.leads:
            where = (
                f"resumes from step {begin.step} ({begin.uri})" if begin.uri else "begins at step 0"
            )
            self.wishes.hear(
                f"run {self.name}: {self.layout} on {self.me.world_size} ranks, {where}; copies "
                f"in {self.storage.uri}"
            )
        return begin

    def _found(self, mark: Mapping[str, Any], passed: list[str]) -> StartDecision:
        """The newest checkpoint that has not been passed over. Raises SpecError when the run is
        done, is another run, or is driven by somebody else."""
        self._taken()
        problems: list[str] = []
        found = checkpoint_index.find(self.storage, problems)
        for problem in problems:
            self.wishes.hear(problem)
        generation = max((item.generation for item in found), default=0) + 1 + self.me.attempt
        epoch = max([self._taken(), *(item.epoch for item in found)])
        checkpoint_index.clean(self.storage, epoch)  # what an interrupted save has left
        left = [item for item in found if item.uri not in passed]
        if not left and (found or problems):
            raise SpecError(
                f"{self.storage.uri}: no checkpoint there is whole; mend one, or give another "
                "--run-name"
            )
        for item in left:
            wrong = checkpoint_index.verify(item.uri, deep=False)
            if wrong:
                self.wishes.hear(f"{wrong[0]}; the copy before it is taken")
                continue
            if item.step >= self.spec.steps:
                raise SpecError(
                    f"run '{self.name}' is done ({item.step} steps); give another --run-name, or "
                    "more steps"
                )
            was = item.meta.get(KEY) or {}
            batch = batch_changed(self.name, was, mark)
            if batch:
                raise SpecError(batch)
            changed = differences(was, mark)
            if changed and not self.wishes.allow_changed:
                raise SpecError(
                    f"run '{self.name}' was started with other values: {changed}; change them "
                    "back, give another --run-name, or continue with --allow-changed"
                )
            return StartDecision(generation + len(passed), epoch, item.step, item.uri)
        if left:
            raise SpecError(
                f"{self.storage.uri}: no checkpoint there is whole; mend one, or give another "
                "--run-name"
            )
        return StartDecision(generation, epoch)

    def _taken(self) -> int:
        """Epoch of this run's lease, which rank 0 holds from here on. Raises SpecError while
        another process has it."""
        if self._lease is None:
            self._lease = Lease(self.storage, self.name, patient=True)
        return self._lease.epoch

    def _hold(self) -> None:
        if self._lease is not None and self._lease.lost:
            raise LostContact(
                f"run '{self.name}': its lease (epoch {self._lease.epoch}) was taken over by "
                "another process"
            )

    def _generation(self, meeting: Meeting, plan: Plan, copies: StaticCheckpoints) -> None:
        self._asked_copy_s = time.monotonic()
        self.session.order(
            WorkerOrder(EnterPlan(plan), Rendezvous(plan.ranks, meeting.address, TIMEOUT_S))
        )
        deadline: float | None = None
        while True:
            self._hear(copies)
            copies.look(self.wishes.on_copy)
            if self._stop_reason:
                self.session.order(WorkerOrder(Quiesce(plan.generation)))
            elif (
                self.leads
                and self.spec.durable_every == "auto"
                and not copies.pending
                and time.monotonic() - self._asked_copy_s > AUTO_EVERY_S
            ):
                self._asked_copy_s = time.monotonic()
                self.session.order(WorkerOrder(StoreCopy(plan.generation)))
            if self._left is not None:
                deadline = deadline or time.monotonic() + SETTLE_MOST_S
                last = self._left.step
                if self._failure is not None or copies.settled(last) or time.monotonic() > deadline:
                    return

    def _hear(self, copies: StaticCheckpoints | None) -> None:
        self._hold()
        beat = self.session.poll(self._ack, TICK_S)
        for number, event in beat.messages:
            self._ack = number
            self._heard(event, copies)

    def _heard(self, event: Event, copies: StaticCheckpoints | None) -> None:
        match event:
            case StepDone():
                self._losses[event.step] = event.train_loss
                self.ended.tokens += event.tokens
            case Evaluated():
                self.ended.metrics.update(event.metrics)
            case PlanEntered():
                self._entered = True
            case WorkerFailed():
                self._failure = self._failure or event
            case CopyDamaged():
                self._damaged = event.reason
            case Quiesced():
                self._left = event
                self._entered = self._entered or event.step > 0
            case ShardStored() | CopyFailed() if copies is not None:
                copies.heard(event)
            case NodePrepared():
                return
        if self.leads and isinstance(event, TOLD):
            self.wishes.hear(event)

    def _metrics(self, step: int) -> dict[str, Any] | None:
        return (
            {"train_loss": self._losses[step], **self.ended.metrics}
            if step in self._losses
            else None
        )

    # -------------------------------------------------------------------------------------- the end

    def _damage(self, meeting: Meeting, plan: Plan) -> str:
        """Whether some rank could not read the checkpoint: its reason, told to all."""
        key = f"damaged/{plan.generation}"
        meeting.say(key, self._damaged)
        deadline = time.monotonic() + GOODBYE_S
        while (words := meeting.all_said(key)) is None:
            if time.monotonic() > deadline:
                return ""
            time.sleep(TICK_S)
        return next(filter(None, words.values()), "")

    def _leave(self, meeting: Meeting, copies: StaticCheckpoints) -> None:
        """Nobody goes before rank 0 has committed the last copy, and rank 0, which hosts the store,
        goes last."""
        if self._failure is not None:
            return
        self._hold()
        copies.finish(self.wishes.on_copy, SETTLE_MOST_S)
        meeting.say("gone", "")
        deadline = time.monotonic() + GOODBYE_S
        while self.leads and meeting.all_said("gone") is None and time.monotonic() < deadline:
            time.sleep(TICK_S / 10)
        self.ended.checkpoint = copies.newest.uri if copies.newest is not None else ""
        if copies.error:
            self._failure = WorkerFailed(self._worker(), 0, "infrastructure", copies.error)

    def _result(self, began: float) -> StandaloneResult:
        ended = self.ended
        ended.wall_s = time.monotonic() - began
        ended.step = self._left.step if self._left is not None else 0
        ended.final_loss = self._losses.get(ended.step)
        if self._failure is not None:
            ended.outcome, ended.reason = "failed", self._failure.error
            ended.step = max(self._losses, default=0)
        elif ended.step >= self.spec.steps:
            ended.outcome, ended.reason = "succeeded", f"all {self.spec.steps} steps are done"
        else:
            ended.outcome, ended.reason = (
                "stopped",
                f"{self._stop_reason or 'another rank was told to stop'}; saved at step "
                f"{ended.step}",
            )
        return ended

    @property
    def peer_is_gone(self) -> bool:
        """The failure is only what others have left behind: they have said why."""
        return self._failure is not None and self._failure.kind == "collective"
