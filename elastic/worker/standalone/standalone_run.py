"""A job at a fixed layout on ranks that torchrun, or another trainer, has started.

Each rank runs a Session. Rank 0 also holds the run's lease and drives the run: the same loop and
the same policy as on a cluster, over the sessions of all ranks. A loss ends all ranks, and whoever
started them starts them anew from the newest checkpoint.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from elastic.config.fingerprint import fingerprint
from elastic.config.job import JobSpec
from elastic.data.batches import few_samples
from elastic.data.budget import budget_of
from elastic.driver import drive, restored
from elastic.errors import ElasticError, SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import DEFAULT_STORAGE, RunFolder
from elastic.policy.state.fold import State
from elastic.policy.stopping import stopped_by_a_person
from elastic.storage import Storage, open_storage
from elastic.text import n_of
from elastic.types import (
    CopyDamaged,
    CopyFailed,
    CopyStored,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    GuardTripped,
    Layout,
    ModelProfile,
    NodeReady,
    Outcome,
    PlanEntered,
    Pool,
    Prepare,
    StepDone,
    StopAsked,
    WorkerFailed,
    WrongNumbers,
)
from elastic.types.gates import newest_gates
from elastic.types.orders import WorkerOrder
from elastic.worker.equivalence.small_batch import batch_of
from elastic.worker.equivalence.structure import structure_of
from elastic.worker.hosting.resume_checks import (
    FoundCopies,
    check_layouts,
    check_not_done,
    check_not_stopped,
    check_quota,
    check_same,
    found_copies,
    taken,
    warn_of_clock,
    with_few,
)
from elastic.worker.hosting.served_session import Said, forward, put_into
from elastic.worker.hosting.session_processes import SessionProcess, SessionProcesses
from elastic.worker.profile.measure import accelerator_here
from elastic.worker.session.session import Session
from elastic.worker.session.workplace import Workplace
from elastic.worker.standalone.layout_started import layout_of
from elastic.worker.standalone.meeting import POOL, Meeting, Started, gpu_here, meet
from elastic.worker.standalone.process_backend import (
    LinkedRank,
    OwnSession,
    ProcessBackend,
    RankLost,
)
from elastic.worker.standalone.rank_link import (
    CommittedCheckpoint,
    EndOfRun,
    SignOfLife,
    StandaloneResult,
)
from elastic.worker.standalone.told_beside import ToldBeside, is_asked

TICK_S = 0.1
MEET_MOST_S = 300.0
GOODBYE_S = 10.0
ALIVE_EVERY_S = 10.0  # rank 0 has no orders for hours while all train
TOLD = StepDone | Evaluated | CopyFailed | PlanEntered | GuardTripped | WrongNumbers
BY_HAND = "by hand, with a new torchrun or job"  # no restart counted by its launcher
OTHERS = "another rank was told to stop"
GATES = newest_gates(
    forms_ahead=False,  # no rank makes groups ahead here
    # without one of them the others cannot train: it is no help to know whose fault it is
    leaves_out=False, spares_the_rest=False,
)  # fmt: skip


@dataclass(frozen=True)
class StandaloneOptions:
    """How to run; none of it changes what is computed. `on_copy`: called on every rank, in the same
    order, for each committed copy. `hear`: gets events and sentences of rank 0."""

    layout: str | None = None
    # default: the job's name, so that ranks that are started over continue
    run_name: str | None = None
    storage: str | None = None
    allow_changed: bool = False
    from_checkpoint: bool = False  # of a run whose journal is damaged: set that aside
    hear: Callable[[Event | str], None] = lambda event: None
    on_copy: Callable[[CommittedCheckpoint], None] | None = None


# how often the launcher has started these ranks before, by itself
STARTED_AGAIN = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class StartRefused(SpecError):
    """Rank 0 says why, once; the others only leave with the same exit code."""


@dataclass
class HeardByRank0:
    """What rank 0 has heard of the run. `copies`: committed, and not told of yet."""

    losses: dict[int, float] = field(default_factory=dict)
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    resumed_at: int | None = None
    newest: str = ""
    copies: list[CopyStored] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        match event:
            case StepDone():
                self.losses[event.step] = event.train_loss
                self.tokens += event.tokens
            case Evaluated():
                self.metrics.update(event.metrics)
            case PlanEntered() if self.resumed_at is None:
                self.resumed_at = event.step
            case CopyStored() if event.copy.kind == "durable":
                self.copies.append(event)
                self.newest = event.copy.uri

    def committed(self) -> list[CommittedCheckpoint]:
        """Those whose step was heard of, each once."""
        found: list[CommittedCheckpoint] = []
        while self.copies and (copy := self.copies[0].copy).step in self.losses:
            metrics = {"train_loss": self.losses[copy.step], **self.metrics, "step": copy.step}
            found.append(CommittedCheckpoint(copy.step, copy.uri, metrics))
            del self.copies[0]
        return found


class StandaloneRun:
    """One rank of a job at a fixed layout. Raises SpecError where the input is wrong; `stop` may
    come from any thread."""

    def __init__(
        self, spec: JobSpec, wishes: StandaloneOptions, environment: Mapping[str, str] = os.environ
    ) -> None:
        self.wishes = wishes
        self.me = Started.of(environment)
        try:
            self.layout: Layout = layout_of(spec, self.me.world_size, wishes.layout)
        except SpecError as error:  # the same on every rank
            raise error if self.leads else StartRefused(str(error)) from error
        self.spec = spec.at(self.layout)
        self.name = wishes.run_name or spec.name
        root = (
            wishes.storage or spec.storage or environment.get("ELASTIC_STORAGE") or DEFAULT_STORAGE
        )
        self.folder = RunFolder.of(open_storage(f"{open_storage(root).uri}/{self.name}"))
        self.storage: Storage = self.folder.storage
        self.seen = HeardByRank0()
        again = any(environment.get(name, "0") != "0" for name in STARTED_AGAIN)
        self.begun_at_s = None if again else time.time()  # see Inbox
        self._began_s = time.monotonic()
        self._stop_reason = ""
        self._ask: Callable[[str], None] | None = None  # passes a wish to stop on
        self._failure: WorkerFailed | None = None  # of this rank, or what ends all
        self._told: ToldBeside | None = None  # of rank 0, where the job asks for it

    def stop(self, reason: str) -> None:
        """Save at the next step boundary and leave."""
        if not self._stop_reason:
            self._stop_reason = reason
            if self._ask is not None:
                self._ask(reason)

    @property
    def leads(self) -> bool:
        return self.me.rank == 0

    @property
    def peer_is_gone(self) -> bool:
        """The failure is only what others have left behind: they have said why."""
        if self._failure is not None:
            return self._failure.kind == "collective"
        return not self.leads

    def to_the_end(self) -> StandaloneResult:
        self._began_s = time.monotonic()
        device = self._device()
        gpu = gpu_here(device, os.environ)
        if self.leads and is_asked(self.spec):
            self._told = ToldBeside(self.storage.uri, self.spec, self._say)
        try:
            return self._met(device, gpu)
        finally:
            if self._told is not None:
                self._told.close()  # the other ranks need not wait for that

    def _say(self, text: str) -> None:
        self.wishes.hear(f"run {self.name}: {text}")

    def _met(self, device: torch.device | None, gpu: str) -> StandaloneResult:
        meeting = meet(self.me, MEET_MOST_S, gpu)
        session = Session(meeting.worker, self.spec.plain(), self.storage.uri)
        session.device = device
        session.order(WorkerOrder(Prepare(meeting.worker.node_id)))
        try:
            if self.leads:
                return self._led(meeting, session)
            return self._followed(meeting, session)
        finally:
            session.close(GOODBYE_S)  # the process groups are another trainer's again
            for link in meeting.links:
                link.close()
            meeting.give_back()

    def _device(self) -> torch.device | None:
        """The GPU of this process among those that it sees. Raises SpecError when there are too
        few."""
        if not torch.cuda.is_available():
            return None
        n = torch.cuda.device_count()
        index = self.me.local_rank if n > 1 else 0
        if index >= n:
            raise SpecError(
                f"LOCAL_RANK={index}, but this process sees {n_of(n, 'GPU')}; "
                "start one rank for each GPU"
            )
        return torch.device("cuda", index)

    def _passes_on(self, ask: Callable[[str], None]) -> None:
        """From now on a wish to stop goes there, also one that came before."""
        self._ask = ask
        if self._stop_reason:
            ask(self._stop_reason)

    # ---------------------------------------------------------------------------------- other ranks

    def _followed(self, meeting: Meeting, session: Session) -> StandaloneResult:
        """Carries out what rank 0 orders, until that says how the run has ended."""
        (link,) = meeting.links
        put = put_into(link)

        def noted(message: Said) -> None:
            for _, event in message.what.messages:
                self._note(event)
            put(message)

        threading.Thread(target=forward, args=(session, noted), name="beats", daemon=True).start()

        def ask(reason: str) -> None:
            with suppress(OSError):  # rank 0 is gone: there is nothing to stop
                put(Said(0, StopAsked(f"{reason} (rank {self.me.rank})")))

        self._passes_on(ask)
        while True:
            try:
                if not link.poll(self.spec.orphan_lease_s):
                    return self._without_rank_0(meeting, silent=True)
                word = link.recv().what
            except (EOFError, OSError):
                return self._without_rank_0(meeting)
            if isinstance(word, WorkerOrder):
                session.order(word)
            elif isinstance(word, CommittedCheckpoint) and self.wishes.on_copy is not None:
                self.wishes.on_copy(word)
            elif isinstance(word, EndOfRun):
                if word.result is None:
                    refused = StartRefused(word.error)
                    refused.exit_code = word.exit_code
                    raise refused
                if word.result.outcome == "failed" and self._failure is not None:
                    return replace(word.result, reason=self._failure.error)  # as this rank says it
                return word.result

    def _note(self, event: Event) -> None:
        if isinstance(event, WorkerFailed):
            self._failure = event  # one before it was recovered from

    def _without_rank_0(self, meeting: Meeting, silent: bool = False) -> StandaloneResult:
        """`silent`: its connection stands. Nobody else says so then, and that a collective has
        waited in vain comes of it."""
        gone = WorkerFailed(meeting.worker, 0, "collective", "rank 0 is gone")
        if silent:
            why = (
                f"rank 0 has given no sign of life for {self.spec.orphan_lease_s:.0f} s "
                "(orphan_lease_s): its process is stopped, or its host hangs; ranks that are "
                "started anew continue from the newest checkpoint"
            )
            gone = WorkerFailed(meeting.worker, 0, "process", why)
        if self._failure is None or (silent and self._failure.kind == "collective"):
            self._failure = gone
        return StandaloneResult(
            self.name, "failed", self._failure.error, 0, str(self.layout), self.me.world_size
        )

    # --------------------------------------------------------------------------------------- rank 0

    def _led(self, meeting: Meeting, session: Session) -> StandaloneResult:
        own = OwnSession(session)
        ranks: list[SessionProcess] = [own, *(LinkedRank(link) for link in meeting.links)]
        hosted = SessionProcesses(
            len(ranks), ranks.__getitem__, self.me.host, list(meeting.workers), ranks
        )
        others, ended = ranks[1:], threading.Event()
        threading.Thread(target=_live, args=(others, ended), name="alive", daemon=True).start()
        try:
            result = self._driven(meeting, hosted, own)
        except BaseException as error:
            code = error.exit_code if isinstance(error, ElasticError) else 1
            _goodbye(hosted, EndOfRun(None, " ".join(str(error).split()), code))
            raise
        finally:
            ended.set()
        _goodbye(hosted, EndOfRun(result))
        own.pipe.close()
        return result

    def _driven(
        self, meeting: Meeting, hosted: SessionProcesses, own: OwnSession
    ) -> StandaloneResult:
        meeting.check_gpus()
        place = self._prepared(own)
        if place is None:
            assert self._failure is not None
            return self._result(None, "failed", self._failure.error)
        n_samples = own.session.job.n_samples
        model = with_few(self._checked(place), self.spec, n_samples)
        if few := few_samples(n_samples, self.spec.global_batch):
            self.wishes.hear(few)
        if self._told is not None:
            self._told.check()
        with ExitStack() as stack:
            lease = taken(self.storage, self.name, patient=True)
            stack.callback(lease.release)
            folder, cut = self.folder, None
            if self.wishes.from_checkpoint:
                lines, stored, cut = folder.without_damage()
            else:
                lines, stored = folder.take_over()
            state = restored(lines)
            found = found_copies(self.storage, state.committed if state is not None else ())
            job = self.spec.job()
            mark = fingerprint(self.spec.program, job, model, n_samples=n_samples)
            most = max(node.gpus for node in meeting.nodes)
            pool = Pool(POOL, accelerator_here(), most, "owned", max_nodes=len(meeting.nodes))
            start = DriverStarted(
                self.name, lease.epoch, replace(job, fingerprint=mark).plain(), (pool,), model,
                durable=found.copies, cut=cut.said if cut is not None else "",
                supervised=self.begun_at_s is None, **GATES,
            )  # fmt: skip
            self._may_go_on(start, lines, state, found=found)
            known = {copy.step: copy.samples for copy in found.copies if copy.samples}
            known |= state.digests if state is not None else {}
            backend = ProcessBackend(
                hosted, meeting.nodes, self.storage, lease, start,
                partial(self._hear, hosted=hosted), self._ordered, known,
                found.known, self.begun_at_s,
            )  # fmt: skip
            stack.callback(backend.close)
            self._passes_on(backend.ask_stop)
            journal = folder.open_journal(lease.epoch, stored, cut)
            journal.hear = () if self._told is None else (self._told.hear,)
            stack.callback(journal.close)
            if self._told is not None:
                self._told.start(lines, lease.epoch)
            there = [*found.damaged, *(NodeReady(node) for node in meeting.nodes)]
            try:
                last = drive(backend, journal, start, state=state, found=there)
            except RankLost as error:
                self._failure = WorkerFailed(meeting.worker, 0, "collective", str(error))
                return self._result(None, "failed", str(error))
            return self._of(last)

    def _may_go_on(
        self, start: DriverStarted, lines: list[Line], state: State | None, *, found: FoundCopies
    ) -> None:
        """Raises SpecError where a run of this name is done, was stopped, or is another one."""
        saved = max((copy.step for copy in found.copies), default=0)
        done = state is None or state.phase == "succeeded"
        check_not_done(self.name, self.spec.steps, saved, succeeded=done)
        if start.supervised:
            check_not_stopped(self.name, stopped_by_a_person(state), BY_HAND)
        check_layouts(self.spec, start.model)
        check_quota(self.spec, start.model, stored=bool(found.copies))
        warn_of_clock(lines, time.time())
        check_same(lines, start, found.meta, allow_changed=self.wishes.allow_changed)
        for damaged in found.damaged:
            self.wishes.hear(damaged.reason)

    def _prepared(self, own: OwnSession) -> Workplace | None:
        """This rank's place, once the program is open; None = that has failed. What it has said so
        far the driver need not hear: it asks again."""
        while own.session.place is None and self._failure is None:
            if own.pipe.poll(TICK_S):
                for _, event in own.pipe.recv().what.messages:
                    self._note(event)
        return own.session.place

    def _checked(self, place: Workplace) -> ModelProfile:
        """With what the program's structure says against layouts. (Their values are compared by
        `elastic certify JOB`.) Raises SpecError where it refuses this one."""
        if place.script is not None:
            return place.profile
        one = batch_of(place.dataset, budget_of(place.job, place.dataset, 4), 1)
        profile = structure_of(place.program, place.profile, one).close(place.profile)
        if why := profile.refusal(self.layout):
            raise SpecError(f"{self.spec.name}: layout '{self.layout}': {why}")
        for note in profile.notes:
            self.wishes.hear(f"note: {note}")
        return profile

    def _ordered(self, action: EnterPlan) -> None:
        if self.seen.resumed_at is not None:
            return
        resume = action.plan.resume
        where = f"resumes from step {resume.step} ({resume.uri})"
        where = where if resume.uri else "begins at step 0"
        self.wishes.hear(
            f"run {self.name}: {action.plan.layout} on {n_of(self.me.world_size, 'rank')}, "
            f"{where}; copies in {self.storage.uri}"
        )

    def _hear(self, event: Event, hosted: SessionProcesses) -> None:
        self.seen.hear(event)
        if isinstance(event, CopyDamaged):
            self.wishes.hear(f"{event.reason}; the copy before it is taken")
        if isinstance(event, TOLD):
            self.wishes.hear(event)
        for copy in self.seen.committed():
            for worker in hosted.workers[1:]:
                hosted.order(worker, copy)
            if self.wishes.on_copy is not None:
                self.wishes.on_copy(copy)

    def _of(self, last: State) -> StandaloneResult:
        """How the run has ended."""
        if last.phase == "succeeded":
            return self._result(last, "succeeded", f"all {self.spec.steps} steps are done")
        if last.phase == "failed":
            return self._result(last, "failed", last.outcome_reason)
        reason = last.outcome_reason
        if last.stop is not None and not last.stop.limit:
            reason = f"{self._stop_reason or OTHERS}; saved at step {last.saved_step}"
        return self._result(last, "stopped", reason)

    def _result(self, last: State | None, outcome: Outcome, reason: str) -> StandaloneResult:
        seen = self.seen
        step = last.step if last is not None else max(seen.losses, default=0)
        return StandaloneResult(
            self.name, outcome, reason, step, str(self.layout), self.me.world_size,
            seen.resumed_at or 0, seen.losses.get(step), seen.tokens,
            time.monotonic() - self._began_s, seen.metrics, seen.newest,
        )  # fmt: skip


def _live(others: Sequence[SessionProcess], ended: threading.Event) -> None:
    while not ended.wait(ALIVE_EVERY_S):
        for rank in others:
            with suppress(OSError):  # who is gone is lost anyway
                rank.send(SignOfLife())


def _goodbye(hosted: SessionProcesses, word: EndOfRun) -> None:
    """Nobody hangs up before the others have read how it ended: what is on its way to who has hung
    up is lost."""
    others = [worker for worker in hosted.workers[1:] if hosted.order(worker, word)]
    until_s = time.monotonic() + GOODBYE_S
    while {*hosted.living()} & {*others} and time.monotonic() < until_s:
        hosted.collect(TICK_S)
