"""Whether each step of a run was trained on exactly the samples that the job's order gives it, by
its journal alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from elastic.config.job import JobSpec
from elastic.data.order import NO_STEP, chained, digest, digest_text, ids_of
from elastic.data.streams import N_POSITIONS
from elastic.ledger.journal import Line
from elastic.observe.run_view import View
from elastic.types import DriverStarted, NodePrepared, Plan, PlanEntered, PlansFound, StepDone

# samples whose order is checked at the end; of longer runs evenly spread steps
MOST_COUNTED = 2_000_000


def exact(lines: Iterable[Line], spec: JobSpec) -> bool | None:
    """None = nobody knows. Steps that no line tells of are known where a checkpoint that the run
    continued from has their running digest. The journal, which may be one of months, is gone
    through once."""
    view, unwritten, n_samples, starts = View(), Unwritten(), None, list[DriverStarted]()
    job = spec.job()
    for line in lines:
        view.add(line)
        unwritten.add(line)
        for _, event in line.events:
            if isinstance(event, NodePrepared) and event.n_samples:
                n_samples = event.n_samples  # as the nodes have seen it: the data may not be here
                job = replace(job, n_samples=n_samples, lengths=event.phase_lengths)
            elif isinstance(event, DriverStarted):
                starts.append(event)
    if n_samples == N_POSITIONS:
        return None
    known = {point.step: point.digest for point in view.curve()}
    cut = any(start.cut for start in starts)
    begun = 0 if starts and starts[0].cut else unwritten.begun
    steps = range(begun + 1, spec.steps + 1)
    missing = {step for step in steps if step not in known}
    untold = missing & unwritten.steps
    if not cut and list(known) != [step for step in steps if step not in untold]:
        return False
    if n_samples is None:
        return None if known or cut else True

    @cache
    def expected(step: int) -> str:
        return digest_text(digest(ids_of(job.in_phase(job.phase_at(step - 1)), step - 1)))

    every = max(1, spec.steps * spec.global_batch // MOST_COUNTED)
    right = all(known[step] == expected(step) for step in list(known)[::every])
    if not missing or not right:
        return right
    stored = {copy.step: copy.samples for start in starts for copy in start.durable if copy.samples}
    running = stored.get(begun, "") if begun else NO_STEP
    if (
        max(missing) > max(stored, default=0)
        or (begun and not running)
        or len(missing) * spec.global_batch > MOST_COUNTED
    ):
        return None
    for step in range(begun + 1, max(stored) + 1):
        running = chained(running, step, known.get(step) or expected(step))
        if stored.get(step, running) != running:
            return False
    return True


class Unwritten:
    """Steps that a driver was killed with before it wrote them down, or before storage took its
    lines: their copy is there, and no line tells of them. `begun`: the step that the run began at,
    of a state that was imported, else 0."""

    def __init__(self) -> None:
        self.begun = 0
        self._started = False
        self._stored = 0  # the newest copy that the last driver found, if it has trained nothing
        self._epoch: int | None = None  # of the first line
        self._seen: list[tuple[int, StepDone | PlanEntered]] = []  # with the epoch of its line
        self._found: list[Plan] = []  # that no line told of when they were entered

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Unwritten:
        made = cls()
        for line in lines:
            made.add(line)
        return made

    def add(self, line: Line) -> None:
        self._epoch = line.epoch if self._epoch is None else self._epoch
        for _, event in line.events:
            if isinstance(event, DriverStarted):
                self._stored = max((copy.step for copy in event.durable), default=0)
                self.begun = self.begun if self._started else self._stored
                self._started = True
            elif isinstance(event, StepDone | PlanEntered):
                self._seen.append((line.epoch, event))
                self._stored = 0
            elif isinstance(event, PlansFound):
                self._found += event.plans

    @property
    def steps(self) -> set[int]:
        found: set[int] = set()
        newest, generation = self.begun, 0
        for epoch, event in self._seen:
            if isinstance(event, StepDone) and self._was_redone(event):
                found.add(event.step)
                continue
            if epoch > (self._epoch or 0):
                found |= set(range(newest + 1, event.step + 1))
            if isinstance(event, StepDone):
                found.discard(event.step)
            # to a copy: steps after it do not count
            back = isinstance(event, PlanEntered) and event.generation > generation
            newest = event.step if back else max(newest, event.step)
            generation = max(generation, event.generation)
        return found | set(range(newest + 1, self._stored + 1))

    def _was_redone(self, event: StepDone) -> bool:
        """By a later generation of which nobody may have told so."""
        later = (
            plan
            for plan in self._found
            if event.generation < plan.generation and plan.resume.source != "live"
        )
        return any(event.step > plan.resume.step for plan in later)
