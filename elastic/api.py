"""run(): a job on a cluster, or on this machine. Picks the backend, starts the observers beside the loop, writes the report."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from elastic.data.order import digest, digest_text, sample_ids
from elastic.driver import Backend, drive, restored
from elastic.errors import SpecError
from elastic.ledger.journal import Journal, Line, read
from elastic.observe import report, runs
from elastic.observe.terminal import Terminal
from elastic.observe.view import view_of
from elastic.policy.state import ENDED, State
from elastic.program import Program, load_program
from elastic.spec import JobSpec, check_fit, drill_entry, embedded_pools, job_of, load_drill, load_job
from elastic.storage import Storage, open_storage
from elastic.types import Copy, DriverStarted, Layout, ModelProfile, Outcome, Pool, StepDone, parse_layout

if TYPE_CHECKING:
    from elastic.cluster.lease import Lease
    from elastic.cluster.local import LocalCluster
    from elastic.worker.durable import Found

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KEEP = ("global_batch", "seed")  # of a run that goes on: changing them would change its mathematics
MOST_COUNTED = 2_000_000  # samples whose order is checked at the end; of longer runs evenly spread steps


@dataclass(frozen=True)
class Options:
    """How to run. None of it changes what is computed."""

    run_name: str | None = None  # of a run that is there: resume it
    local: bool = False  # the embedded cluster, also where a Ray address is known
    overrides: tuple[str, ...] = ()  # key=value over job.yaml
    drill: str | Path | None = None  # a drill file instead of the job's own drill
    show: bool = True  # progress while it runs
    stream: TextIO | None = None  # where progress and report go; default: standard output


@dataclass(frozen=True)
class Result:
    """How a run ended. `summary` is the line that `elastic run --json` ends with."""

    run: str
    outcome: Outcome
    summary: dict[str, Any]
    folder: Path

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


def run(
    program: str | Path | Program, job: str | Path | Mapping[str, Any] | None = None, options: Options | None = None
) -> Result:
    """Run a job to its end.

    `program`: a job folder; or a Program that stands in a file as `program` (workers import that file), with `job` as a
    mapping of the keys of job.yaml or as a job folder. Raises SpecError where the input is wrong.
    """
    options = options or Options()
    spec = _job(program, job, options)
    return _Run(spec, options).to_the_end()


def ray_address(options: Options) -> str | None:
    """The Ray cluster to use: $RAY_ADDRESS (`ray job submit` sets it); None = the embedded default."""
    if options.local:
        return None
    return os.environ.get("RAY_ADDRESS") or ("auto" if os.environ.get(SUBMITTED) else None)


def default_storage() -> str | None:
    """Under `ray job submit` the working directory is a copy that Ray removes: runs go to the home folder instead."""
    return "~/elastic_runs" if os.environ.get(SUBMITTED) and not os.environ.get("ELASTIC_STORAGE") else None


def _job(program: str | Path | Program, job: str | Path | Mapping[str, Any] | None, options: Options) -> JobSpec:
    if not isinstance(program, Program):
        if job is not None:
            raise SpecError(f"run('{program}', job=...): a job folder has its own job.yaml; give job only with a Program")
        return load_job(program, options.overrides)
    file = _file_of(program)
    if isinstance(job, Mapping):
        return job_of(job, file)
    if job is None:
        raise SpecError("run(program): give job={'steps': ..., 'global_batch': ...} or the folder of a job.yaml")
    return load_job(job, options.overrides).model_copy(update={"program": str(file), "folder": str(file.parent)})


def _file_of(program: Program) -> Path:
    """The file in which a Program stands. Workers import it, so it must be importable by path."""
    file = Path(program.model.__code__.co_filename) if hasattr(program.model, "__code__") else None
    if file is None or not file.is_file():
        raise SpecError("run(program): Program.model must be a function or lambda in a file, so that workers can import it")
    return file.resolve()


class _Run:
    """One `run()`: what is known about it before the driver starts."""

    def __init__(self, spec: JobSpec, options: Options) -> None:
        self.options = options
        self.launched_at_s = time.time()
        self.address = ray_address(options)
        self.spec = spec = self._adapted(spec)
        self.pools: tuple[Pool, ...] = tuple(pool.pool() for pool in spec.pools)
        check_fit(spec, self.pools)
        self.program = load_program(spec.program)
        name = options.run_name or f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if not RUN_NAME.fullmatch(name):
            raise SpecError(f"run name '{name}': letters, digits, '.', '_' and '-' only")
        self.name = name
        self.storage: Storage = open_storage(f"{runs.storage_uri(spec.storage or default_storage())}/{name}")

    def _adapted(self, spec: JobSpec) -> JobSpec:
        """The job's own drill is for nodes that are there to be killed: on a cluster only `--drill` asks for one."""
        drill = load_drill(self.options.drill) if self.options.drill is not None else spec.drill
        if self.address is not None and self.options.drill is None:
            drill = []
        pools = spec.pools
        if self.address is None and "pools" not in spec.model_fields_set:
            from elastic.cluster.local import visible_gpus

            pools = embedded_pools(len(visible_gpus()))
        return spec.model_copy(update={"drill": drill, "pools": pools})

    @property
    def journal_path(self) -> Path:
        return self.storage.root / runs.JOURNAL

    def to_the_end(self) -> Result:
        from elastic.cluster.lease import Lease

        with ExitStack() as stack:
            lease = Lease(self.storage, self.name)
            stack.callback(lease.release)
            before = self._before()
            cluster = self._cluster(stack)  # its head starts beside what follows
            start = self._start(lease.epoch, before)
            backend = self._backend(start, restored(before), cluster, lease)
            stack.callback(backend.close)
            self._watch(stack)
            state = drive(backend, Journal(self.journal_path, lease.epoch), start, restored(before))
        return self._result(state)

    def _before(self) -> list[Line]:
        """The journal of earlier drivers of this run. Raises SpecError when the run is done."""
        lines = read(self.journal_path) if self.journal_path.is_file() else []
        state = restored(lines)
        if state is not None and state.phase == "succeeded":
            raise SpecError(f"run '{self.name}' is done ({state.step} steps); give another --run-name, or none, to start anew")
        return lines

    def _start(self, epoch: int, before: list[Line]) -> DriverStarted:
        from elastic.worker import durable
        from elastic.worker.model_profile import trace

        state = restored(before)
        if self.address is None:
            self._n_samples()  # an unreadable corpus is found here, not in six workers
        start = DriverStarted(
            self.name,
            epoch,
            self.spec.plain(),
            self.pools,
            trace(self.program),
            attached=self.address is not None and state is not None and state.phase not in ENDED,
            durable=tuple(_copy(found) for found in durable.find(self.storage)),
        )
        _check_same(before, start)
        _check_layouts(self.spec, start.model)
        return start

    def _cluster(self, stack: ExitStack) -> LocalCluster | None:
        """The embedded cluster; None where there is a Ray address."""
        if self.address is not None:
            return None
        from elastic.cluster.local import LocalCluster

        cluster = LocalCluster((self.spec.folder,))
        stack.callback(cluster.close)
        return cluster

    def _backend(self, start: DriverStarted, before: State | None, cluster: LocalCluster | None, lease: Lease) -> Backend:
        from elastic.cluster.backend import RayBackend, RayRun

        plans = tuple(before.plans[number] for number in sorted(before.plans)) if before and start.attached else ()
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
            python_path=(self.spec.folder, str(Path(__file__).resolve().parents[1])),
        )
        return RayBackend(run, cluster, lease)

    def _watch(self, stack: ExitStack) -> None:
        if self.options.show:
            where = "a Ray cluster on this machine" if self.address is None else f"the Ray cluster at {self.address}"
            said = f"run {self.name}: uses {where}; its journal is {self.journal_path}"
            print(said, file=self.options.stream or sys.stdout)
            terminal = Terminal(self.journal_path, self.options.stream)
            terminal.start()
            stack.callback(terminal.stop)

    def _result(self, state: State) -> Result:
        """Writes the report and prints it."""
        lines = read(self.journal_path)
        extras: dict[str, Any] = {"launch_to_first_step_s": self._first_step_s(lines)}
        if state.phase == "succeeded":
            extras |= {"samples_exact": self._samples_exact(lines), "sample": self._sample(state)}
        data, shown = report.write(self.storage, extras)
        if self.options.show:
            print("\n".join(["", *shown]), file=self.options.stream or sys.stdout)
        return Result(self.name, _outcome(state), data, self.storage.root)

    def _first_step_s(self, lines: list[Line]) -> float | None:
        """Seconds from the launch of this driver to the end of its first step."""
        times = (at_s for line in lines for at_s, e in line.events if isinstance(e, StepDone) and at_s >= self.launched_at_s)
        first = next(times, None)
        return None if first is None else round(first - self.launched_at_s, 3)

    def _samples_exact(self, lines: list[Line]) -> bool | None:
        """Whether each counted step was trained on exactly the samples that the job's order gives it."""
        n_samples = self._n_samples()
        curve = view_of(lines).curve()
        if [point.step for point in curve] != list(range(1, self.spec.steps + 1)):
            return False
        every = max(1, self.spec.steps * self.spec.global_batch // MOST_COUNTED)
        return all(
            point.digest == digest_text(digest(sample_ids(n_samples, self.spec.global_batch, self.spec.seed, point.step - 1)))
            for point in curve[::every]
        )

    def _n_samples(self) -> int:
        try:
            return len(self.program.dataset())
        except OSError as error:
            raise SpecError(f"{self.spec.program}: its dataset cannot be read: {error}") from error

    def _sample(self, state: State) -> str | None:
        """What the program shows of the finished model."""
        from elastic.worker.finished import sample_text

        return sample_text(self.program, state.durable[0].uri) if state.durable else None


def _copy(found: Found) -> Copy:
    """A checkpoint as the policy knows it; how it is cut matters to nobody who reads it."""
    return Copy(
        found.step, "durable", found.generation, Layout(dp_shard=found.world_size), uri=found.uri, n_bytes=found.n_bytes
    )


def _check_layouts(spec: JobSpec, model: ModelProfile) -> None:
    """Raises SpecError for a layout that the model cannot be cut into, whatever the nodes."""
    for layout in map(parse_layout, spec.layouts()):
        if model.tp_limit % layout.tp:
            more = "give Program.tp the modules to cut" if model.tp_limit == 1 else "take a tp that divides it"
            raise SpecError(f"layout '{layout}': tp={layout.tp}, but tp must divide {model.tp_limit} for this model; {more}")
        if layout.pp > max(1, model.n_blocks):
            raise SpecError(f"layout '{layout}': pp={layout.pp}, but Program.blocks matches only {model.n_blocks} modules")


def _check_same(before: list[Line], start: DriverStarted) -> None:
    """A run goes on with the model, batch and seed that it began with. Raises SpecError that names what differs."""
    first = next((e for line in before for _, e in line.events if isinstance(e, DriverStarted)), None)
    if first is None:
        return
    for key in KEEP:
        if first.job.get(key) != start.job.get(key):
            raise SpecError(
                f"run '{start.run}' was started with {key}={first.job.get(key)}, the job says {start.job.get(key)}; "
                "change it back, or start another run with --run-name"
            )
    _check_same_model(start.run, first.model, start.model)


def _check_same_model(run: str, old: ModelProfile, new: ModelProfile) -> None:
    was, now = ({spec.fqn: spec.shape for spec in model.specs} for model in (old, new))
    for fqn in {**was, **now}:
        if was.get(fqn) != now.get(fqn):
            raise SpecError(
                f"run '{run}' was started with another model: {fqn} was {_shape(was.get(fqn))}, it is {_shape(now.get(fqn))}; "
                "start another run with --run-name"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))


def _outcome(state: State) -> Outcome:
    match state.phase:
        case "succeeded" | "stopped":
            return state.phase
        case _:
            return "failed"


# ------------------------------------------------------------------------------------------------ runs that are there


def holder(run: Storage) -> str:
    """Who drives the run now, as `process 12 on host`; '' = nobody."""
    from elastic.cluster.lease import newest
    from elastic.cluster.processes import Place, started

    sign = newest(run)
    if sign is None or sign.released:
        return ""
    here = sign.boot == Place.here().boot
    alive = started(sign.pid) == sign.started if here else time.time() - sign.at_s <= sign.ttl_s
    return f"process {sign.pid} on {sign.host}" if alive else ""


def stop(run: Storage, reason: str) -> None:
    """Ask a live run to save its state and stop. Raises SpecError when nobody drives it."""
    _order(run, {"stop": reason})


def drill(run: Storage, words: Sequence[str]) -> dict[str, Any]:
    """Let something happen to a live run: words such as 'kill=any'. Returns the entry. Raises SpecError."""
    data: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign:
            raise SpecError(f"drill: '{word}' must be key=value, as in kill=any")
        nodes = key in ("notice", "kill", "hang")
        data[key] = (value.split(",") if "," in value else value) if nodes else yaml.safe_load(value)
    entry = drill_entry(data).plain()
    _order(run, {"drill": entry})
    return entry


def _order(run: Storage, data: dict[str, Any]) -> None:
    if not holder(run):
        raise SpecError(f"run '{run.root.name}' is not running ({runs.view(run).phase} at step {runs.view(run).step})")
    runs.order(run, data)


def checkpoints(run: Storage) -> tuple[list[dict[str, Any]], list[str]]:
    """Committed checkpoints, newest first, and what is wrong with markers that are not whole."""
    from elastic.worker.durable import find

    problems: list[str] = []
    found = find(run, problems)
    names = ("step", "generation", "world_size", "n_bytes", "uri")
    return [{name: getattr(item, name) for name in names} for item in found], problems


def verify(run: Storage) -> list[dict[str, Any]]:
    """Reads every byte of every checkpoint: its step, URI and what is wrong with it."""
    from elastic.worker import durable

    found, problems = checkpoints(run)
    checked = [{"step": c["step"], "uri": c["uri"], "problems": durable.verify(c["uri"])} for c in found]
    return checked + [{"step": None, "uri": run.uri, "problems": [problem]} for problem in problems]
