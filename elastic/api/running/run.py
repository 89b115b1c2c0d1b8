"""run(): a job on a cluster, or on this machine. Picks the backend, starts the observers beside the
loop, writes the report."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from elastic.api.diagnose import communicated, diagnosed
from elastic.api.planning.plan_nodes import known_of, own_of
from elastic.api.running import sample_check
from elastic.api.running.layout_question import LayoutCheck, asked_of, check_open, checked
from elastic.api.running.local_pools import adapted
from elastic.api.running.observers import Observers, check_port
from elastic.api.running.options import Options, check_run_name, ray_address
from elastic.api.running.start_checks import (
    check_drill,
    check_program_not_done,
    check_storage,
    comes_again,
    keys_in,
    paid_until_s,
    reads_back,
)
from elastic.api.show_dashboard import DashboardBeside
from elastic.config.fingerprint import fingerprint
from elastic.config.job import JobSpec
from elastic.config.pool_checks import check_budget, check_fit, fed
from elastic.data.open_datasets import dataset_of
from elastic.data.streams import N_POSITIONS, SENTENCE
from elastic.driver import Backend, drive, interruptible, restored, seldom_collected, stopped_by
from elastic.errors import DriverCrashed, ElasticError, SpecError, unwritten
from elastic.ledger.journal import Line
from elastic.ledger.lease import Lease
from elastic.ledger.run_folder import JournalCut, RunFolder
from elastic.ledger.segments import StoredJournal
from elastic.observe import find_runs
from elastic.observe.logs import traceback_of
from elastic.observe.reporting import report
from elastic.observe.terminal import Terminal, start_line
from elastic.policy.state.fold import ENDED, State
from elastic.policy.stopping import stopped_by_a_person
from elastic.program import Program, load_program
from elastic.storage import Storage, open_storage
from elastic.text import printable, program_output
from elastic.types import COMPUTES_IN, DriverStarted, Outcome, Pool, StepDone, WorkerFailed
from elastic.types.gates import newest_gates
from elastic.version import source_folder
from elastic.worker.hosting.resume_checks import (
    FoundCopies,
    check_cp,
    check_layouts,
    check_loss,
    check_not_done,
    check_not_failed,
    check_not_stopped,
    check_quota,
    check_same,
    found_copies,
    taken,
    warn_of_clock,
    with_few,
    writable,
)

if TYPE_CHECKING:
    from elastic.cluster.local.local_cluster import LocalCluster

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """How a run ended. `summary` is the line that `elastic run --json` ends with."""

    run: str
    outcome: Outcome
    summary: dict[str, Any]
    folder: Path
    log: Path | None = None  # which has the whole traceback of the program's error
    signal: int = 0  # that this process was sent and that has stopped the run: SIGINT of Ctrl-C ...

    @property
    def reason(self) -> str:
        return str(self.summary["reason"])

    @property
    def step(self) -> int:
        return int(self.summary["steps"])

    @property
    def train_loss(self) -> float | None:
        return self.summary["final_loss"]  # type: ignore[no-any-return]

    @property
    def goodput(self) -> float:
        return float(self.summary["goodput"])

    @property
    def usd(self) -> float:
        return float(self.summary["usd"])


def run_job(
    spec: JobSpec, options: Options, program: Program | None = None, *, train_function: bytes = b""
) -> Result:
    """Run a checked job to its end; `program`: as it was loaded already; `train_function`: what
    workers call instead of the job's script. Raises SpecError."""
    return JobRun(spec, options, program, train_function=train_function).to_the_end()


def taken_over(
    place: RunFolder, options: Options
) -> tuple[list[Line], StoredJournal, JournalCut | None]:
    """What earlier drivers of a run have written, and what of that is cut off. Raises SpecError,
    JournalDamaged."""
    return place.without_damage() if options.from_checkpoint else (*place.take_over(), None)


@contextmanager
def resumable(name: str) -> Iterator[None]:
    """What nobody thought of ends this driver, and not the run. Raises DriverCrashed."""
    try:
        yield
    except (ElasticError, BrokenPipeError):  # whoever read what it prints has had enough
        raise
    except Exception as error:
        raise DriverCrashed(
            f"the driver of run '{name}' has crashed ({type(error).__name__}: {error}); run it "
            "again with this --run-name to resume"
        ) from error


class JobRun:
    """One `run()`: what is known about it before the driver starts."""

    session = ""  # import path of what its workers run; "" = the training session

    def __init__(
        self,
        spec: JobSpec,
        options: Options,
        program: Program | None = None,
        *,
        train_function: bytes = b"",
    ) -> None:
        self.options, self.train_function = options, train_function
        self.launched_at_s = time.time()
        self.address = ray_address(options)
        # nodes as the embedded cluster makes them: of CPUs
        self.default_pools = options.cluster is None and "pools" not in spec.model_fields_set
        self.spec = spec = adapted(spec, options, self.address)
        self.pools: tuple[Pool, ...] = tuple(pool.pool() for pool in spec.pools)
        for phase in spec.each_phase():
            check_fit(phase, self.pools)
        check_budget(spec, self.pools, options.no_budget)
        check_drill(spec.drill, self.pools, embedded=self.address is None)
        name = options.run_name or f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        check_run_name(name)
        self.name = name
        check_port(options.metrics_port, {"metrics_port": spec.metrics_port})
        check_storage(spec.storage, name)
        self.place = RunFolder.of(open_storage(f"{find_runs.storage_uri(spec.storage)}/{name}"))
        with self._phase("the program was read", "the program is read"):
            self._load(program)
        self.storage: Storage = self.place.storage
        self.terminal = Terminal(options.stream, self.place.lines) if options.show else None
        self._cut: JournalCut | None = None
        self._found = FoundCopies((), {}, ())

    def _load(self, program: Program | None) -> None:
        if program is None and self.options.run_name and not self.options.from_checkpoint:
            check_program_not_done(self.place, self.spec.steps)
        self.program = program or load_program(self.spec.program)

    def _out(self) -> TextIO:
        return self.options.stream or sys.stdout

    def _phase(self, what: str, doing: str = "") -> AbstractContextManager[None]:
        """`doing`: as in start_line."""
        return start_line(what, self._out() if self.options.show else None, doing=doing)

    @property
    def journal_path(self) -> Path:
        return self.place.journal

    def to_the_end(self) -> Result:
        # a page ends last, so that it shows how the run has ended
        with interruptible(), ExitStack() as pages, ExitStack() as stack:
            observers = self._observers(stack)
            layouts = self._layouts(stack)
            lease = taken(self.storage, self.name)
            stack.callback(lease.release)
            with self._phase("the journal of earlier drivers was read"):
                with writable(str(self.place.folder)):
                    before, stored, state = self._before()
            cluster = self._cluster(stack)  # its head starts beside what follows
            doing = "the model is traced, its layouts are checked"
            with self._phase("the model was traced, its layouts were checked", doing):
                start = self._start(lease.epoch, before, state, layouts=layouts)
            reached = self._phase("Ray was reached", "Ray is started, or reached")
            with reached, resumable(self.name):
                backend = self._backend(start, state, cluster, lease=lease)
            stack.callback(backend.close)
            with writable(str(self.place.folder)):
                find_runs.remember(self.place, self.options.words)
                journal = self.place.open_journal(lease.epoch, stored, self._cut)
                self._keep_files()
            journal.hear = [observers.hear, *([self.terminal.hear] if self.terminal else [])]
            stack.callback(journal.close)
            observers.start(before, lease.epoch)
            stack.callback(observers.close)  # before what they look at
            self._watch(stack, pages)
            stack.enter_context(seldom_collected())
            with resumable(self.name):
                last = drive(backend, journal, start, state=state, found=self._found.damaged)
        return self._result(last)

    def _keep_files(self) -> None:
        """What stands beside the weights of an export: who exports needs no program for it."""
        if self.spec.script is None or self.program.files is None:
            return  # of a Program an export with --job writes other weights (adapters, a student)
        try:
            files = self.program.files()
        except Exception as error:  # noqa: BLE001 - a boundary: the user's program may raise anything
            if self.options.show:
                said = error if isinstance(error, SpecError) else repr(error)
                what = "its checkpoints will be exported without config.json and the like"
                print(f"note: {what}: {said}", file=self._out())
            return
        self.place.keep_files(files)

    def _observers(self, stack: ExitStack) -> Observers:
        def say(line: str) -> None:
            if self.options.show:
                print(f"run {self.name}: {line}", file=self._out(), flush=True)

        options = self.options
        made = Observers(self.place, self.spec, options.on_step, port=options.metrics_port, say=say)
        stack.callback(made.close)
        return made

    def _layouts(self, stack: ExitStack) -> LayoutCheck | None:
        """It is answered beside what follows."""
        layouts = LayoutCheck(
            asked_of(self.spec, self.pools, self.program),
            self._out() if self.options.show else None,
            train_function=self.train_function,
        )
        stack.callback(layouts.close)
        return layouts

    def _before(self) -> tuple[list[Line], StoredJournal, State | None]:
        """The journal of earlier drivers of this run, and the state that it ends with (folding one
        of weeks takes minutes). Raises SpecError when the run is done and no more steps are
        requested."""
        lines, stored, self._cut = taken_over(self.place, self.options)
        state = restored(lines, self.terminal.earlier if self.terminal is not None else None)
        self._check_not_done(state)
        return lines, stored, state

    def _check_not_done(self, state: State | None) -> None:
        if state is not None:
            done = state.phase == "succeeded"
            check_not_done(
                self.name, self.spec.steps, state.saved_step, succeeded=done,
                script=self.spec.script is not None,
            )  # fmt: skip

    def _start(
        self,
        epoch: int,
        before: list[Line],
        state: State | None = None,
        *,
        layouts: LayoutCheck | None = None,
    ) -> DriverStarted:
        from elastic.worker.step.loss_scale import profile_of

        # an unreadable corpus is found here, once
        n_samples = self._n_samples() if self.address is None else None
        if n_samples == N_POSITIONS and self.options.show:
            print(SENTENCE, file=self._out())
        job = self.spec.job()
        model = profile_of(self.program, job)
        attached = self._attaches(state)
        known = state.committed if state is not None else ()
        check_quota(self.spec, model, stored=bool(known) and not attached)
        if n_samples is not None:
            notes = check_loss(job, self.program)
            model = with_few(model, self.spec, n_samples)
            model = replace(model, notes=(*model.notes, *notes))
        if few := fed(job, sum(pool.max_nodes * pool.gpus_per_node for pool in self.pools)):
            model = replace(model, notes=(*model.notes, few))
        if read := reads_back(self.spec, self.storage, model):
            model = replace(model, notes=(*model.notes, read))
        self._found = found = found_copies(self.storage, known, attached=attached)
        start = DriverStarted(
            self.name,
            epoch,
            replace(
                job,
                fingerprint=fingerprint(self.spec.program, job, model, n_samples=n_samples),
                keys_in=keys_in(self.spec),
            ).plain(),
            self.pools,
            model,
            attached=attached,
            durable=found.copies,
            hardware=known_of(self.pools),
            pool_hardware=own_of(self.pools),
            cut=self._cut.said if self._cut is not None else "",
            supervised=self.options.started_again,
            **newest_gates(),
        )
        warn_of_clock(before, self.launched_at_s)
        if start.attached and state is not None:
            start = replace(
                start, paid_until_s=paid_until_s(before, state.job.orphan_lease_s, False)
            )
        self._check_again(before, start, state, found=found)
        self._say_resumed(start, state)
        if layouts is not None:
            check_layouts(self.spec, start.model)  # what is known of it without the comparison
            model = checked(model, layouts.result(), self.program)
            start = replace(start, model=model, job={**start.job, COMPUTES_IN: model.computes_in})
        check_layouts(self.spec, start.model)
        check_open(self.spec, start.model)
        if n_samples is not None:
            check_cp(self.spec, self.program)
        return start

    def _attaches(self, state: State | None) -> bool:
        """Workers of an earlier driver may still be there."""
        there = self.address is not None and state is not None and state.phase not in ENDED
        return there and self._cut is None

    def _check_again(
        self, before: list[Line], start: DriverStarted, state: State | None, *, found: FoundCopies
    ) -> None:
        """May a run of this name go on with this job? Raises SpecError or ProgramError."""
        failed = state is not None and state.phase == "failed"
        check_same(before, start, found.meta, allow_changed=self._may_change(state))
        if self.options.supervised and not self.options.allow_changed:
            check_not_failed(self.name, state.fatal if failed and state is not None else "")
        if self.options.started_again:
            check_not_stopped(self.name, stopped_by_a_person(state))

    def _say_resumed(self, start: DriverStarted, state: State | None) -> None:
        from elastic.cluster.backend.drills import carried_out

        if state is None or start.attached or not self.options.show:
            return
        saved = max((copy.step for copy in start.durable), default=0)
        drilled = carried_out(start.job["drill"], self.storage)
        if said := comes_again(self.name, state.step, saved, carried_out=drilled):
            print(said, file=self._out(), flush=True)

    def _may_change(self, state: State | None) -> bool:
        """May program and data be others than before?"""
        failed = state is not None and state.phase == "failed" and not self.options.supervised
        # a person mends a program that ended its run before a step was done under the same name
        unused = failed and state is not None and not (state.step or self._found.copies)
        return self.options.allow_changed or unused

    def _cluster(self, stack: ExitStack) -> LocalCluster | None:
        """The embedded cluster; None where there is a Ray address."""
        if self.address is not None:
            return None
        from elastic.cluster.local.local_cluster import LocalCluster

        cluster = LocalCluster((self.spec.folder,))
        stack.callback(cluster.close)
        return cluster

    def _backend(
        self,
        start: DriverStarted,
        before: State | None,
        cluster: LocalCluster | None,
        *,
        lease: Lease,
    ) -> Backend:
        from elastic.cluster.backend.ray_backend import RayBackend
        from elastic.cluster.backend.ray_run import RayRun
        from elastic.cluster.workers.worker_actor import SESSION

        plans = (
            tuple(before.plans[number] for number in sorted(before.plans))
            if before and start.attached
            else ()
        )
        stored = {copy.step: copy.samples for copy in start.durable if copy.samples}
        run = RayRun(
            self.name,
            self.storage.uri,
            start.job,
            self.pools,
            start.epoch,
            self.address or "",
            attach=start.attached,
            plans=plans,
            step=before.step if before and start.attached else 0,
            python_path=(self.spec.folder, source_folder()),
            logs=str(self.place.logs_of_workers(self.address is None)),
            spared=self.options.spared,
            digests={**stored, **(before.digests if before else {})},
            known=self._found.known,
            train_function=self.train_function,
            session=self.session or SESSION,
            default_pools=self.default_pools,
            lengths=before.lengths if before else (),
            may_change=self._may_change(before),
            begun_at_s=None if self.options.started_again else self.launched_at_s,
        )
        return RayBackend(run, cluster, lease, show=self._shown())

    def _shown(self) -> Callable[[str], None] | None:
        """What takes the lines that rank 0 prints."""
        return self.terminal.say if self.terminal is not None else None

    def _watch(self, stack: ExitStack, pages: ExitStack) -> None:
        if self.terminal is not None:
            where = (
                "a Ray cluster on this machine"
                if self.address is None
                else f"the Ray cluster at {self.address}"
            )
            said = f"run {self.name}: uses {where}; its journal is {self.journal_path}"
            print(said, file=self._out())
            self.terminal.start()
            stack.callback(self.terminal.stop)
        if self.options.dashboard:
            page = DashboardBeside(self.place, self._shown() or log.warning)
            pages.callback(page.close)

    def _result(self, state: State) -> Result:
        """Writes the report and prints it. Raises StorageFailed or LostContact."""
        lines = self.place.lines()
        log = self._traceback(lines) if state.phase == "failed" else None
        try:
            data, shown = report.write(
                self.place,
                self._extras(state, lines),
                partial(diagnosed, storage=self.place.storage),
                communication=partial(communicated, storage=self.place.storage),
            )
        except OSError as error:  # the run itself has ended
            text = (
                f"run '{self.name}' has ended, its report could not be written (elastic report "
                f"{self.name} writes it)"
            )
            raise unwritten(error, text) from error
        if self.options.show:
            print(printable("\n".join(["", *shown])), file=self._out())
        return Result(
            self.name, _outcome(state), data, self.place.folder, log, signal=stopped_by(state)
        )

    def _extras(self, state: State, lines: Iterable[Line]) -> dict[str, Any]:
        """What the report says besides what the journal does."""
        extras: dict[str, Any] = {"launch_to_first_step_s": self._first_step_s(lines)}
        if state.phase == "succeeded":
            extras |= {
                "samples_exact": sample_check.exact(lines, self.spec),
                "sample": self._sample(state),
            }
        return extras

    def _traceback(self, journal: Iterable[Line]) -> Path | None:
        """Shows that of the program's error, unless rank 0 has told it; the log that has all of it,
        where that is here."""
        failed = [
            e
            for line in journal
            for _, e in line.events
            if isinstance(e, WorkerFailed) and e.kind == "program"
        ]
        if not failed:
            return None
        first = max(failed, key=lambda e: e.generation > 0)  # of new nodes: see spares_the_rest
        worker, frames = first.worker, tuple(first.frames.splitlines())
        found = traceback_of(self.place, str(worker))
        lines = found.lines if found is not None else frames
        if self.terminal is not None and lines:
            told = [] if self.terminal.has_said(lines[-1]) else ["", *lines]
            where = found.file if found is not None else f"in the logs of node {worker.node_id}"
            text = "\n".join([*told, f"whole traceback: {where}"])
            print(program_output(text, colored=False), file=self._out())
        return found.file if found is not None else None

    def _first_step_s(self, lines: Iterable[Line]) -> float | None:
        """Seconds from the launch of this driver to the end of its first step."""
        times = (
            at_s
            for line in lines
            for at_s, e in line.events
            if isinstance(e, StepDone) and at_s >= self.launched_at_s
        )
        first = next(times, None)
        return None if first is None else round(first - self.launched_at_s, 3)

    def _n_samples(self) -> int:
        try:
            return len(dataset_of(self.program, self.spec.job()))
        except OSError as error:
            raise SpecError(f"{self.spec.program}: its dataset cannot be read: {error}") from error

    def _sample(self, state: State) -> str | None:
        """What the program shows of the finished model."""
        from elastic.worker.checkpoint.finished_model import sample_text
        from elastic.worker.program.job_program import with_frozen

        if not state.durable:
            return None
        return sample_text(with_frozen(self.program, self.spec.job()), state.durable[0].uri)


def _outcome(state: State) -> Outcome:
    match state.phase:
        case "succeeded" | "stopped":
            return state.phase
        case _:
            return "failed"
