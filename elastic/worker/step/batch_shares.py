"""Which samples of a step each data-parallel rank trains on, in which micro-batches: the same
answer on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from elastic.data.budget import Cut, Microbatch, TokenBudget, pad_share
from elastic.data.order import digest, ids_of, share
from elastic.types import Job, Plan
from elastic.types.grid import each_microbatches
from elastic.worker.step.gradient_noise import parts_of

STEPS_KEPT = 32  # that are read ahead


class StepSamples(NamedTuple):
    """Of all ranks. The thread that reads the step ahead computes it: of many samples that takes
    long, and between commit and update the device waits."""

    ids: list[int]
    digest: tuple[int, int]
    cut: Cut


class BatchShares:
    """By the plan's numbers of samples, or others that the ranks have agreed on since; with a
    budget, by tokens in the proportion of those numbers. Steps count from 0."""

    def __init__(
        self, job: Job, plan: Plan, budget: TokenBudget | None = None, *, together: int = 1
    ) -> None:
        """`together`: see ModelProfile."""
        self.job, self.plan, self.budget, self.together = job, plan, budget, together
        # first step -> numbers of samples
        self._since: list[tuple[int, tuple[int, ...]]] = [(0, plan.samples)]
        self._samples_of = lru_cache(STEPS_KEPT)(self._computed)

    def set(self, from_step: int, samples: tuple[int, ...]) -> None:
        """Other numbers from that step on. Nobody may have asked for the cut of that step yet."""
        self._since = [*self._since[-STEPS_KEPT:], (from_step, samples)]

    def samples(self, step: int) -> tuple[int, ...]:
        """Of each data-parallel rank."""
        return next(samples for since, samples in reversed(self._since) if since <= step)

    @property
    def newest(self) -> tuple[int, ...]:
        """Agreed on last."""
        return self._since[-1][1]

    def ids(self, step: int) -> list[int]:
        """Of all ranks."""
        return self._samples_of(step).ids

    def digest(self, step: int) -> tuple[int, int]:
        return self._samples_of(step).digest

    def cut(self, step: int) -> Cut:
        return self._samples_of(step).cut

    def _computed(self, step: int) -> StepSamples:
        ids = ids_of(self.job, step)
        return StepSamples(ids, digest(ids), self.cut_of(ids, step))

    def cut_of(self, ids: Sequence[int], step: int, budget: TokenBudget | None = None) -> Cut:
        """Of any ids, by the numbers of that step, with the budget of another set. Raises
        ProgramError for a sample that is longer than the budget."""
        samples, budget = self.samples(step), budget or self.budget
        if budget is not None:
            return budget.cut(ids, samples)
        return tuple((Microbatch(ids[share(samples, dp)]),) for dp in range(len(samples)))

    def ids_of(self, step: int, dp: int) -> list[int]:
        return [sample for part in self.cut(step)[dp] for sample in part.ids]

    def sizes(self, step: int) -> list[int]:
        """Samples of each micro-batch of all ranks that is computed in one go."""
        if self.budget is not None:
            return [len(part.ids) for rank in self.cut(step) for part in rank]
        return parts_of(self.samples(step), self.microbatches(step), self.together)

    def microbatches(self, step: int) -> tuple[int, ...]:
        """How many each data-parallel rank has, where the plan's numbers cut its batch."""
        n, together = self.plan.n_microbatches, self.together
        return each_microbatches(self.plan.layout, self.samples(step), n, together=together)

    def work(self, step: int, dp: int) -> float:
        """Of a rank, in samples; with a budget, in places of its micro-batches as multiples of the
        mean sample."""
        if self.budget is None:
            return float(self.samples(step)[dp])
        ids = self.ids(step)
        mean = sum(self.budget.filled(self.budget.length(i)) for i in ids) / max(1, len(ids))
        return sum(part.n_places for part in self.cut(step)[dp]) / mean

    def pad_share(self, step: int) -> float:
        """Of the places of the step, those that hold no token; 0 without a budget, where nobody
        knows."""
        if self.budget is None:
            return 0.0
        return pad_share(self.cut(step), sum(map(self.budget.length, self.ids(step))))
