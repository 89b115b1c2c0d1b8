"""Advice from the gradient noise scale: how large a batch is worth its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NEWEST = 100  # measured steps that are looked at: the scale grows while the loss falls
BLOCKS = 10
LEAST = 10  # measured steps without which nothing is said
TWO_SIGMA = 2.0


@dataclass(frozen=True)
class NoiseScale:
    """The simple noise scale in samples, with two standard errors either way (jackknife over blocks
    of steps, of its logarithm). None where the gradient cannot be told from noise."""

    samples: float | None
    low: float | None
    high: float | None
    n_steps: int


def estimate(measured: Mapping[int, tuple[float, float]]) -> NoiseScale | None:
    """`measured`: step -> (trace of the covariance, square norm of the gradient), each unbiased;
    only the ratio of their means is one of the scale (McCandlish et al. 2018, appendix A.1). None =
    too few steps."""
    rows = [measured[step] for step in sorted(measured)[-NEWEST:]]
    rows = [row for row in rows if all(map(math.isfinite, row))]
    if len(rows) < LEAST:
        return None
    whole = _log_ratio(rows)
    blocks = [rows[i::BLOCKS] for i in range(BLOCKS)]
    left_out = [
        _log_ratio([row for j, block in enumerate(blocks) if j != i for row in block])
        for i in range(BLOCKS)
    ]
    known = [value for value in left_out if value is not None]
    if whole is None or len(known) < BLOCKS:
        return NoiseScale(None, None, None, len(rows))
    mean = sum(known) / BLOCKS
    error = math.sqrt((BLOCKS - 1) / BLOCKS * sum((value - mean) ** 2 for value in known))
    return NoiseScale(
        math.exp(whole),
        math.exp(whole - TWO_SIGMA * error),
        math.exp(whole + TWO_SIGMA * error),
        len(rows),
    )


def _log_ratio(rows: Sequence[tuple[float, float]]) -> float | None:
    trace, square = sum(row[0] for row in rows), sum(row[1] for row in rows)
    return math.log(trace / square) if trace > 0 and square > 0 else None


def advice(found: NoiseScale, global_batch: int) -> str:
    """In one line."""
    if found.samples is None or found.low is None or found.high is None:
        return (
            f"the gradient cannot be told from noise in {found.n_steps} steps: the batch of "
            f"{global_batch} is far below it"
        )
    text = (
        f"about {found.samples:.3g} samples ({found.low:.3g} to {found.high:.3g}, from "
        f"{found.n_steps} steps): "
    )
    if found.low > global_batch:
        return (
            text
            + f"a batch larger than {global_batch} would need fewer steps, almost in proportion"
        )
    if found.high < global_batch:
        return text + f"a batch of {global_batch} spends more samples than it saves steps"
    return text + f"the batch of {global_batch} is about right"
