"""Which rank went bad, once a guard has tripped: every rank puts its own numbers of the step beside
those of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import ProgramError
from elastic.types import Plan, WorkerId
from elastic.types.grid import coordinates
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.guards import Trip

NAMED_SAMPLES_MOST = 16
UNNAMED = "which rank it was is not known, the generation aborted before the ranks had compared"
# of a rank: its loss sum, the tokens of that, the square norm of its part of the gradient
Row = Sequence[float]


@dataclass(frozen=True)
class FaultyRank:
    """`rank` -1: no single rank; `what` says what is wrong there. `samples`: of that rank, or of
    all; None = those of a stream have no ids."""

    rank: int
    worker: WorkerId | None
    what: str
    samples: tuple[int, ...] | None

    def sentence(self, trip: Trip) -> str:
        """One line: what tripped, where, with which samples, and what follows from roll-backs
        before."""
        named = "stream: no ids" if self.samples is None else _named(self.samples)
        text = f"{trip.reason}: {self.what}; {'its' if self.rank >= 0 else 'the'} samples: {named}"
        return f"{text}; {trip.more}" if trip.more else text


def _named(samples: Sequence[int]) -> str:
    n_more = len(samples) - NAMED_SAMPLES_MOST
    return ", ".join(map(str, samples[:NAMED_SAMPLES_MOST])) + (
        f" and {n_more} more" if n_more > 0 else ""
    )


class Tripped(ProgramError):
    """The step was not applied; the run goes back or ends. Every rank raises the same."""

    def __init__(self, trip: Trip, faulty_rank: FaultyRank) -> None:
        super().__init__(faulty_rank.sentence(trip))
        self.trip, self.faulty_rank = trip, faulty_rank

    def __reduce__(self) -> tuple[Any, ...]:
        return Tripped, (self.trip, self.faulty_rank)


def find_faulty_rank(
    trip: Trip, mine: Row, ids: Sequence[Sequence[int]] | None, *, plan: Plan, groups: Groups
) -> FaultyRank:
    """The same on every rank: all of them have seen this commit, so all of them take part here.
    `ids`: samples of the step, of each data-parallel rank; None = a stream's."""
    table = groups.commit.gather(torch.tensor(mine, dtype=torch.float64))
    rank, what = _worst(trip.guard, table.tolist(), plan)
    worker = plan.ranks[rank] if rank >= 0 else None
    if ids is None:
        return FaultyRank(rank, worker, what, None)
    here = [ids[coordinates(plan.layout, rank).dp(plan.layout)]] if rank >= 0 else ids
    return FaultyRank(rank, worker, what, tuple(sample for share in here for sample in share))


def _worst(guard: str, table: list[list[float]], plan: Plan) -> tuple[int, str]:
    if guard == "not_finite":
        return _not_finite(table, plan)
    if guard == "loss_spike":
        means = [row[0] / row[1] if row[1] else -math.inf for row in table]
        rank = max(range(len(means)), key=means.__getitem__)
        largest = f"has the largest train_loss ({means[rank]:.6g})"
        return rank, f"rank {rank} on {plan.ranks[rank]} {largest}"
    return -1, "the gradient is the sum over all ranks"


def _not_finite(table: list[list[float]], plan: Plan) -> tuple[int, str]:
    """A rank whose loss is no number comes first: the gradients of the others went bad by it."""
    for column, word in ((0, "loss"), (2, "gradient")):
        ranks = [rank for rank, row in enumerate(table) if not math.isfinite(row[column])]
        if ranks:
            others = f" (and {len(ranks) - 1} other ranks)" if len(ranks) > 1 else ""
            first, worker = ranks[0], plan.ranks[ranks[0]]
            return first, f"the {word} of rank {first} on {worker}{others} is not finite"
    return -1, "the sum over the ranks is not finite, though each rank's part is"
