"""Whether each step of a run was trained on exactly the samples that the job's order gives it, by its journal alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from elastic.data.order import NO_STEP, chained, digest, digest_text, sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.ledger.journal import Line
from elastic.observe.view import View
from elastic.spec import JobSpec
from elastic.types import DriverStarted, NodePrepared, PlanEntered, StepDone

MOST_COUNTED = 2_000_000  # samples whose order is checked at the end; of longer runs evenly spread steps


def exact(lines: Iterable[Line], spec: JobSpec) -> bool | None:
    """None = nobody knows. Steps that no line tells of are known where a checkpoint that the run went on from has their running
    digest. The journal, which may be one of months, is gone through once."""
    view, unwritten, n_samples, starts = View(), Unwritten(), None, list[DriverStarted]()
    for line in lines:
        view.add(line)
        unwritten.add(line)
        for _, event in line.events:
            if isinstance(event, NodePrepared) and event.n_samples:
                n_samples = event.n_samples  # as the nodes have seen it: the data may not be here
            elif isinstance(event, DriverStarted):
                starts.append(event)
    if n_samples == N_POSITIONS:
        return None
    known = {point.step: point.digest for point in view.curve()}
    cut = any(start.cut for start in starts)
    begun = 0 if starts and starts[0].cut else unwritten.begun
    steps = range(begun + 1, spec.steps + 1)
    missing = {step for step in steps if step not in known}
    if not cut and list(known) != [step for step in steps if step not in missing & unwritten.steps]:
        return False
    if n_samples is None:
        return None if known or cut else True

    @cache
    def expected(step: int) -> str:
        return digest_text(digest(sample_ids(n_samples or 0, spec.global_batch, spec.seed, step - 1)))

    every = max(1, spec.steps * spec.global_batch // MOST_COUNTED)
    right = all(known[step] == expected(step) for step in list(known)[::every])
    if not missing or not right:
        return right
    stored = {copy.step: copy.samples for start in starts for copy in start.durable if copy.samples}
    running = stored.get(begun, "") if begun else NO_STEP
    if max(missing) > max(stored, default=0) or (begun and not running) or len(missing) * spec.global_batch > MOST_COUNTED:
        return None
    for step in range(begun + 1, max(stored) + 1):
        running = chained(running, step, known.get(step) or expected(step))
        if stored.get(step, running) != running:
            return False
    return True


class Unwritten:
    """Steps that a driver was killed with before it wrote them down: their copy is there, and no line tells of them. `begun`:
    the step that the run began at, of a state that was imported, else 0."""

    def __init__(self) -> None:
        self.steps, self.begun = set[int](), 0
        self._started, self._epoch, self._newest, self._generation = False, -1, 0, 0

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Unwritten:
        made = cls()
        for line in lines:
            made.add(line)
        return made

    def add(self, line: Line) -> None:
        if self._epoch < 0:
            self._epoch = line.epoch
        for _, event in line.events:
            if isinstance(event, DriverStarted) and not self._started:
                self._started = True
                self.begun = self._newest = max((copy.step for copy in event.durable), default=0)
            elif isinstance(event, StepDone | PlanEntered):
                self._stepped(event, line.epoch)

    def _stepped(self, event: StepDone | PlanEntered, epoch: int) -> None:
        if epoch > self._epoch:
            self.steps |= set(range(self._newest + 1, event.step + 1))
        if isinstance(event, StepDone):
            self.steps.discard(event.step)
        back = isinstance(event, PlanEntered) and event.generation > self._generation  # to a copy: steps after it do not count
        self._epoch, self._newest = epoch, event.step if back else max(self._newest, event.step)
        self._generation = max(self._generation, event.generation)
