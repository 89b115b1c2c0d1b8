"""The data of each phase of a job, opened before the first one begins: what is wrong with that of a
later phase is said at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastic.data.open_datasets import dataset_of
from elastic.data.streams import Stream
from elastic.errors import SpecError
from elastic.program import Program
from elastic.types import Job


@dataclass(frozen=True)
class PhaseData:
    """`job`: with the lengths of the datasets; `datasets`: by the phase that begins with them."""

    job: Job
    datasets: Mapping[int, Any]

    @classmethod
    def of(cls, program: Program, job: Job) -> PhaseData:
        """Raises SpecError that names the phase where its data cannot be opened."""
        first = dataset_of(program, job)
        job, found = replace(job, n_samples=len(first)), {0: first}
        for number in range(1, len(job.phases)):
            of_phase = job.in_phase(number)
            same_batch = of_phase.global_batch == job.global_batch
            if isinstance(first, Stream) and not (same_batch and of_phase.data_phase == 0):
                raise SpecError(
                    f"phases, entry {number}: Program.dataset is a stream, which is read from the "
                    "front in batches of one size; leave global_batch and data out of it"
                )
            if of_phase.data_phase == number:
                try:
                    found[number] = dataset_of(program, of_phase)
                except SpecError as error:
                    raise SpecError(f"phases, entry {number}: {error}") from error
        if not job.phases:
            return cls(job, found)
        each = (job.in_phase(number).data_phase for number in range(len(job.phases)))
        return cls(replace(job, lengths=tuple(len(found[begun]) for begun in each)), found)
