"""A worker gets ready for plans: node checks, program and data, rehearsals of coming layouts."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastic.config.fingerprint import fingerprint
from elastic.data.loader_processes import readers_of
from elastic.data.open_datasets import PhaseData, validation_of
from elastic.data.progress import heard_by
from elastic.data.streams import with_stream
from elastic.errors import NodeMemoryFull
from elastic.program import load_program
from elastic.storage import open_storage
from elastic.types import (
    Admission,
    Event,
    Job,
    NodePrepared,
    NodeRefused,
    Plan,
    Rehearsal,
    SampleProfile,
    WorkerFailed,
    WorkerId,
)
from elastic.types.admission import Entry
from elastic.worker.loop.script_host import Script, ScriptSource, TrainFunction
from elastic.worker.parallel.compiled import settle_compiler
from elastic.worker.parallel.float8 import check_float8
from elastic.worker.process.allocator import rounds_pinned
from elastic.worker.process.cuda_errors import device_lost, holds_lost, is_assert
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.gpu_health import DeviceNotes
from elastic.worker.profile.node_checks import Checks, NodeRejected, awaited
from elastic.worker.profile.node_load import LoadReports
from elastic.worker.profile.sample_profile import sample_profile
from elastic.worker.program.job_program import with_job
from elastic.worker.session.rehearsal import handed_on, keyed, rehearse, rehearse_plan
from elastic.worker.session.worker_errors import kind_of, print_error, text_of
from elastic.worker.session.workplace import Workplace
from elastic.worker.step.loss_scale import profile_of

log = logging.getLogger(__name__)


def default_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass
class Preparation:
    """Of one worker; what it opens once stays open. `job`: with the number of its samples from then
    on; `place`: None until then; `train_function`, `calls_file`: see Session."""

    me: WorkerId
    job: Job
    run_uri: str
    report: Callable[[Event], None]
    at_phase: Callable[[str, int], None]
    background: Callable[..., Future[Any]]
    place: Workplace | None = None
    train_function: TrainFunction | None = None
    calls_file: Path | None = None
    _admission: Admission | None = field(default=None, init=False)
    _notes: DeviceNotes | None = field(default=None, init=False)
    _load: LoadReports | None = field(default=None, init=False)
    _of_data: tuple[str, ...] = field(default=(), init=False)  # notes

    def run(
        self,
        rehearsals: tuple[Rehearsal, ...],
        entry: Entry | None,
        is_wanted: Callable[[], bool],
        *,
        device: torch.device,
        faults: DeviceFaults,
    ) -> None:
        """-> NodePrepared, NodeRefused or WorkerFailed. `entry`: what the node is looked at for;
        `is_wanted`: is there a plan to enter? That is better than any rehearsal."""
        self._progress()
        checks = None
        if entry is not None and self.place is None:
            checks = Checks(entry, device, self.me.local_rank == 0, self._progress)
        try:
            place = self.place = self.place or self._settled(checks, device, faults)
            for i, rehearsal in enumerate(rehearsals):
                if i == 1:
                    self.report(self._prepared())
                if not is_wanted():
                    self._progress()
                    self._rehearse(place, rehearsal)
        except NodeRejected as refused:
            self.report(self._refused(refused))
            return
        except NodeMemoryFull as full:
            awaited(1, lambda: int(is_wanted()), tick=self._progress)  # others may free theirs
            self.report(self._refused(NodeRejected(str(full), may_pass=True)))
            return
        except Exception as error:  # noqa: BLE001 - the worker's boundary: whatever the program raises becomes a message
            holds_lost(error)
            frames = print_error(error)
            refusal = checks.refusal() if checks is not None and self.place is None else None
            failed = WorkerFailed(
                self.me, 0, kind_of(error), text_of(error), do="retry" if is_assert(error) else "",
                frames=frames,
            )  # fmt: skip
            self.report(failed if refusal is None else self._refused(refusal))
            return
        if len(rehearsals) < 2:
            self.report(self._prepared())

    def _refused(self, why: NodeRejected) -> NodeRefused:
        return NodeRefused(
            self.me.node_id, str(why), may_pass=why.may_pass, neighbors=why.neighbors
        )

    def _settled(
        self, checks: Checks | None, device: torch.device, faults: DeviceFaults
    ) -> Workplace:
        """A workplace, opened while the node is looked at. Raises Refused, and what the program
        raises."""
        if checks is not None:
            checks.begin(self.background)
        with heard_by(self._progress):
            place = self._open(device, faults)
        if checks is not None and self.job.fingerprint:
            mine = fingerprint(
                self.job.program, self.job, place.profile, n_samples=self.job.n_samples
            )
            checks.program(self.job.fingerprint, mine)
        self._notes = self._notes or DeviceNotes(self.me, place.device, self.report)
        if self.me.local_rank == 0 and self._load is None:
            on_gpu = place.device.type == "cuda"
            self._load = LoadReports(self.me.node_id, self.report, on_gpu=on_gpu)
        rehearse(place)
        place.profile = handed_on(place)
        place.program = keyed(place)
        if self.me.local_rank == 0:
            first = place.sample_draws.item(place.dataset, 0)
            place.sample = sample_profile(place.program, self.job, first)
            place.phase_samples = self._samples(place)
        if checks is not None:
            self._admission = checks.end()
        gc.collect()
        gc.freeze()  # what stays for good need not be looked at again: see Workplace.keep
        return place

    def _samples(self, place: Workplace) -> tuple[SampleProfile | None, ...]:
        """What a sample asks of the model in each phase of the job."""
        found, job = list[SampleProfile | None](), self.job
        for number in range(len(job.phases)):
            of = job.in_phase(number)
            known = of.data_phase < number and not of.microbatch_tokens
            data = place.datasets[of.data_phase]
            if known:
                found.append(found[of.data_phase])
            else:
                found.append(sample_profile(place.program, of, place.sample_draws.item(data, 0)))
        return tuple(found)

    def _prepared(self) -> NodePrepared:
        sample = self.place.sample if self.place is not None else None
        phases = self.place.phase_samples if self.place is not None else ()
        rounded = self.place is not None and self.place.host_memory.pinned and rounds_pinned()
        return NodePrepared(
            self.me.node_id, (os.getpid(),), self.job.n_samples, sample, self._admission, rounded,
            phases, self.job.lengths, self._of_data,
        )  # fmt: skip

    def _rehearse(self, place: Workplace, rehearsal: Rehearsal) -> None:
        """Its numbers are garbage, so what the program says of them is no reason to stop: the first
        step will be slower."""
        try:
            rehearse_plan(place, rehearsal)
        except Exception as error:
            if device_lost(error):
                raise
            log.warning("rehearsal of %s was aborted: %s", rehearsal.layout, text_of(error))

    def _open(self, device: torch.device, faults: DeviceFaults) -> Workplace:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        if self.job.compile:
            settle_compiler(device)
        if self.job.float8:
            check_float8(device)
        source = ScriptSource.of(self.job, self.train_function)
        script = None
        if self.job.script:
            name = self.run_uri.rpartition("/")[2]
            script = Script(source, device, self.calls_file, run_name=name)
        program = load_program(self.job.program) if script is None else script.start()
        program = with_job(program, self.job)
        opened = PhaseData.of(program, self.job)
        self.job, dataset, self._of_data = opened.job, opened.datasets[0], opened.notes
        program = with_stream(program, dataset, self.job)
        profile = profile_of(program, self.job)
        validation = validation_of(program, self.job)
        return Workplace(
            self.me, program, profile, self.job, dataset, validation, open_storage(self.run_uri),
            device, self.report, self.at_phase, self.background, script=script,
            readers=readers_of(self.job, dataset), faults=faults, datasets=opened.datasets,
        )  # fmt: skip

    def planned(self, plan: Plan) -> None:
        """It is about to be entered."""
        if self._load is not None:
            self._load.n_nodes = len(plan.nodes)

    def close(self) -> None:
        for watch in (self._notes, self._load):
            if watch is not None:
                watch.close()
        if self.place is not None:
            self.place.saving.close()
            if self.place.readers is not None:
                self.place.readers.close()

    def _progress(self) -> None:
        self.at_phase("preparing", 0)
