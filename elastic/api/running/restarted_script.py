"""A script that does not enter `elastic.loop`: started over at each change of capacity."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.api.running.run import (
    Options,
    Result,
    adapted,
    check_run_name,
    default_storage,
    ray_address,
    taken_over,
    written_report,
)
from elastic.api.running.start_checks import (
    check_drill,
    check_not_failed,
    failed_by_itself,
    paid_until_s,
    taken,
    warn_of_clock,
)
from elastic.api.running.watched_journal import WatchedJournal
from elastic.config.job import JobSpec, job_of
from elastic.config.key_names import place_of
from elastic.config.pool_checks import check_budget, check_fit
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.metrics.metrics_files import MetricsFiles
from elastic.observe.run_view import View, view_of
from elastic.observe.terminal import plain_note
from elastic.storage import open_storage
from elastic.types import DriverStarted, ModelProfile, Pool

if TYPE_CHECKING:
    from elastic.cluster.ray_train.script_job import ScriptJob

KEYS = (
    "name", "pools", "min_workers", "max_workers", "max_nodes", "budget_usd", "head_usd_per_h",
    "deadline_h", "storage", "drill", "max_silence_s",
)  # fmt: skip
FILLED = {"steps": 1, "global_batch": 1_000_000}  # what a job must have, and nobody reads here
RAY_TRAIN = re.compile(r"\bray\.train\b|from\s+ray\s+import\s+.*\btrain\b")
RESTARTED = (
    "{file} does not enter elastic.loop: this is RESTART, not live. Ray Train starts it on the "
    "nodes that are there, and starts it anew at each change of capacity; what it resumes from is "
    "its own checkpoint, as under torchrun"
)


def run_restarting(
    file: Path, args: Sequence[str], data: Mapping[str, Any], *, where: str, options: Options
) -> Result:
    """`data`: keys of a job.yaml and of --set, unchecked; `where` is what an error about them
    begins with. Raises SpecError."""
    for key in data:
        if key not in KEYS and key in JobSpec.__pydantic_fields__:
            raise SpecError(
                f"{place_of(where, [key])}: key '{key}' has no meaning for {file.name}, which does "
                f"not enter elastic.loop; keys are {', '.join(KEYS)}"
            )
    return _ScriptRun(
        file, tuple(args), job_of(dict(data) | FILLED, file, where), options=options
    ).to_the_end()


class _ScriptRun:
    """One `elastic run --script`."""

    def __init__(
        self, file: Path, args: tuple[str, ...], spec: JobSpec, *, options: Options
    ) -> None:
        self.file, self.args, self.options = file, args, options
        self.address = ray_address(options)
        self.spec = spec = adapted(spec, options, self.address)
        self.pools: tuple[Pool, ...] = tuple(pool.pool() for pool in spec.pools)
        check_fit(spec, self.pools)
        check_budget(spec, self.pools, options.no_budget)
        check_drill(spec.drill, self.pools, embedded=self.address is None)
        self.name = options.run_name or f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        check_run_name(self.name)
        self.place = RunFolder.of(
            open_storage(f"{find_runs.storage_uri(spec.storage or default_storage())}/{self.name}")
        )

    def to_the_end(self) -> Result:
        from elastic.cluster.local.local_cluster import LocalCluster
        from elastic.cluster.ray_train.script_bill import bill_of
        from elastic.cluster.ray_train.script_run import ScriptRun

        with ExitStack() as stack:
            lease = taken(self.place.storage, self.name)
            stack.callback(lease.release)
            before, stored, cut = taken_over(self.place, self.options)
            seen = view_of(before)
            self._check_same(before, seen)
            self._say(f"run {self.name}: {RESTARTED.format(file=self.file.name)}")
            cluster = None
            if self.address is None:
                cluster = LocalCluster((str(self.file.parent),), environments=True)
                stack.callback(cluster.close)
            where = (
                "a Ray cluster on this machine"
                if self.address is None
                else f"the Ray cluster at {self.address}"
            )
            self._say(f"run {self.name}: uses {where}; its journal is {self.place.journal}")
            metrics = MetricsFiles(self.place, self.options.on_step)
            metrics.start(before)
            stack.callback(metrics.close)
            journal = WatchedJournal(
                self.place.open_journal(lease.epoch, stored, cut),
                (lambda line: self._show(seen, line), metrics.hear),
                one_file=True,
            )
            warn_of_clock(before, time.time())
            run = ScriptRun(
                self._job(), cluster, lease, journal, self._say, bill_of(before) if before else None
            )
            script = run.to_the_end(
                self._start(lease.epoch, before, cut.said if cut is not None else "")
            )
        if script.bad_input:
            raise SpecError(f"{self.file}: {script.reason}")
        if script.outcome == "failed":
            self._say("\n".join(["", *script.first_error().splitlines()[-15:]]))
        data, shown = written_report(self.place, {})
        self._say("\n".join(["", *shown]))
        assert script.outcome is not None
        return Result(self.name, script.outcome, data, self.place.folder)

    def _show(self, view: View, line: Line) -> None:
        """Its notes, with the script's own output between them."""
        for note in view.add(line):
            self._say(plain_note(view, note))

    def _check_same(self, before: Sequence[Line], view: View) -> None:
        """The run continues with the script that it had. Raises SpecError; ProgramError where it
        has failed, unseen."""
        if not before:
            return
        if not view.job.restarted:
            raise SpecError(
                f"run '{self.name}' is one that is changed live, not a script's; give another "
                "--run-name"
            )
        was = view.job.script
        if view.phase == "succeeded":
            raise SpecError(
                f"run '{self.name}' is done; give another --run-name, or none, to start over"
            )
        if was != str(self.file) and not self.options.allow_changed:
            raise SpecError(
                f"run '{self.name}' was started with {was}; give another --run-name, or "
                "--allow-changed"
            )
        if self.options.supervised and not self.options.allow_changed:
            check_not_failed(self.name, failed_by_itself(before))

    def _job(self) -> ScriptJob:
        from elastic.cluster.ray_train.script_job import ScriptJob
        from elastic.cluster.ray_train.script_state import START_S, Needs

        spec = self.spec
        most = spec.max_workers or sum(pool.max_nodes * pool.gpus_per_node for pool in self.pools)
        needs = Needs(
            self.pools, spec.min_workers, max(most, spec.min_workers), spec.max_silence_s or START_S
        )
        return ScriptJob(
            name=self.name, file=str(self.file), args=self.args, cwd=str(Path.cwd()),
            asks_ray=bool(RAY_TRAIN.search(self.file.read_text(errors="replace"))), needs=needs,
            uri=self.place.uri, logs=str(self.place.logs),
            ray_storage=f"{self.place.uri}/ray_train", address=self.address or "",
            drill=tuple(entry.plain() for entry in spec.drill), max_nodes=spec.max_nodes,
        )  # fmt: skip

    def _start(self, epoch: int, before: Sequence[Line], cut: str) -> DriverStarted:
        from elastic.cluster.ray_train.script_bill import ORPHAN_LEASE_S

        kept = {key: value for key, value in self.spec.plain().items() if key in KEYS}
        job = kept | {"script": str(self.file), "args": list(self.args), "restarted": True}
        until_s = paid_until_s(before, ORPHAN_LEASE_S, embedded=self.address is None)
        return DriverStarted(
            self.name, epoch, job, self.pools, ModelProfile(0, 0, ()), cut=cut, paid_until_s=until_s
        )

    def _say(self, text: str) -> None:
        if self.options.show:
            print(text, file=self.options.stream or sys.stdout, flush=True)
