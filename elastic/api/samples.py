"""Whether each step of a run was trained on exactly the samples that the job's order gives it, by its journal alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from elastic.data.order import NO_STEP, chained, digest, digest_text, sample_ids
from elastic.data.streams import N_POSITIONS
from elastic.ledger.journal import Line
from elastic.observe.view import view_of
from elastic.spec import JobSpec
from elastic.types import DriverStarted, NodePrepared, PlanEntered, StepDone

MOST_COUNTED = 2_000_000  # samples whose order is checked at the end; of longer runs evenly spread steps


def exact(lines: Iterable[Line], spec: JobSpec) -> bool | None:
    """None = nobody knows. Steps that no line tells of are known where a checkpoint that the run went on from has their running
    digest."""
    told = [e.n_samples for line in lines for _, e in line.events if isinstance(e, NodePrepared) and e.n_samples]
    n_samples = told[-1] if told else None  # as the nodes have seen it: the data may not be here
    if n_samples == N_POSITIONS:
        return None
    known = {point.step: point.digest for point in view_of(lines).curve()}
    starts = [e for line in lines for _, e in line.events if isinstance(e, DriverStarted)]
    cut = any(start.cut for start in starts)
    begun = 0 if starts and starts[0].cut else begun_at(lines)
    steps = range(begun + 1, spec.steps + 1)
    missing = {step for step in steps if step not in known}
    if not cut and list(known) != [step for step in steps if step not in missing & unwritten_steps(lines)]:
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


def unwritten_steps(lines: Iterable[Line]) -> set[int]:
    """Steps that a driver was killed with before it wrote them down: their copy is there, and no line tells of them."""
    found: set[int] = set()
    epoch, newest, generation = next((line.epoch for line in lines), 0), begun_at(lines), 0
    for line in lines:
        for event in (event for _, event in line.events if isinstance(event, StepDone | PlanEntered)):
            if line.epoch > epoch:
                found |= set(range(newest + 1, event.step + 1))
            if isinstance(event, StepDone):
                found.discard(event.step)
            back = isinstance(event, PlanEntered) and event.generation > generation  # to a copy: steps after it do not count
            epoch, newest = line.epoch, event.step if back else max(newest, event.step)
            generation = max(generation, event.generation)
    return found


def begun_at(lines: Iterable[Line]) -> int:
    """The step that the run began at: of a state that was imported, else 0."""
    first = next((e for line in lines for _, e in line.events if isinstance(e, DriverStarted)), None)
    return max((copy.step for copy in first.durable), default=0) if first is not None else 0
