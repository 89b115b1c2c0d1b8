"""Which samples of a step each data-parallel rank trains on, in which micro-batches: the same answer on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from elastic.data.budget import Cut, Microbatch, TokenBudget, pad_share
from elastic.data.order import sample_ids, share
from elastic.types import Plan

STEPS_KEPT = 32  # cuts of steps that are read ahead


class Shares:
    """By the plan's numbers of samples, or, with a budget, by tokens in the proportion of those numbers."""

    def __init__(self, job: Mapping[str, Any], plan: Plan, budget: TokenBudget | None = None) -> None:
        self.job, self.plan, self.budget = job, plan, budget
        self._cut = lru_cache(STEPS_KEPT)(lambda step: self.cut_of(self.ids(step)))

    def ids(self, step: int) -> list[int]:
        """Of all ranks; `step` counts from 0."""
        job = self.job
        return sample_ids(int(job["n_samples"]), int(job["global_batch"]), int(job["seed"]), step)

    def cut(self, step: int) -> Cut:
        return self._cut(step)

    def cut_of(self, ids: Sequence[int], budget: TokenBudget | None = None) -> Cut:
        """Of any ids, with the budget of another set. Raises ProgramError for a sample that is longer than the budget."""
        samples, budget = self.plan.samples, budget or self.budget
        if budget is not None:
            return budget.cut(ids, samples)
        return tuple((Microbatch(ids[share(samples, dp)]),) for dp in range(len(samples)))

    def ids_of(self, step: int, dp: int) -> list[int]:
        return [sample for part in self.cut(step)[dp] for sample in part.ids]

    def sizes(self, step: int) -> list[int]:
        """Samples of each micro-batch of all ranks that is computed in one go."""
        if self.budget is not None:
            return [len(part.ids) for rank in self.cut(step) for part in rank]
        n = self.plan.n_microbatches
        return [size // n + (i < size % n) for size in self.plan.samples for i in range(n)]

    def pad_share(self, step: int) -> float:
        """Of the places of the step, those that hold no token; 0 without a budget, where nobody knows."""
        if self.budget is None:
            return 0.0
        return pad_share(self.cut(step), sum(map(self.budget.length, self.ids(step))))
