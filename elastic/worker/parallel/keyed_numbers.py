"""Random numbers that follow from keys: one row of a tensor for each key, whatever other rows stand
beside it.

Short rows are computed all at once by a hash of (key, place in the row); long ones come from
torch's generator, seeded with the key. Which of the two it is depends on the row's own length only,
so that a row is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from elastic.worker.process.readback import sent

MASK = (1 << 64) - 1
# Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: SplitMix64
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# elements of a row. Above, a generator for each row takes no longer than the dozen element-wise
# operations of the hash
HASHED_MOST = 256
BITS = 24  # of a number that is hashed: what float32 holds exactly


def mixed(*parts: int) -> int:
    """A number of 63 bits that follows from all parts and their order."""
    value = 0
    for part in parts:
        value = (value + part + STEP) & MASK
        value = (value ^ (value >> 30)) * FIRST & MASK
        value = (value ^ (value >> 27)) * SECOND & MASK
        value ^= value >> 31
    return value >> 1


@lru_cache(maxsize=4096)
def of_text(text: str) -> int:
    """The same of a text."""
    return mixed(*text.encode())


@dataclass(frozen=True)
class Distribution:
    """What is drawn: torch's method that fills a tensor with it, and its arguments."""

    method: str
    arguments: tuple[Any, ...] = ()

    def fill(self, rows: Tensor, keys: Sequence[int]) -> None:
        """Fills [keys, n], each row by its key."""
        if not rows.numel():
            return
        if rows.shape[1] <= HASHED_MOST and self._hashed(rows, keys):
            return
        generator = _generator(rows.device)
        for row, key in zip(rows.unbind(0), keys, strict=True):
            generator.manual_seed(key)
            getattr(row, self.method)(*self.arguments, generator=generator)

    def _hashed(self, rows: Tensor, keys: Sequence[int]) -> bool:
        """False: of this distribution there is no hash."""
        if self.method == "bernoulli_":
            rows.copy_(uniform(keys, rows.shape[1], rows.device) < self.arguments[0])
        elif self.method == "uniform_" and rows.dtype in (torch.float32, torch.float64):
            low, high = self.arguments or (0.0, 1.0)
            rows.copy_(uniform(keys, rows.shape[1], rows.device)).mul_(high - low).add_(low)
        else:
            return False
        return True


def uniform(keys: Sequence[int], n: int, device: torch.device) -> Tensor:
    """float32 [keys, n] in [0, 1)."""
    x = torch.arange(1, n + 1, device=device).mul_(signed(STEP))
    x = mixed_in_place(x + sent(torch.tensor(keys, dtype=torch.int64), device)[:, None])
    return _shifted(x, 64 - BITS).float().mul_(2.0**-BITS)


def mixed_in_place(x: Tensor) -> Tensor:
    """What SplitMix64 makes of each state, int64."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x.bitwise_xor_(_shifted(x, shift)).mul_(signed(factor))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, n: int) -> Tensor:
    """To the right as if it had no sign, which torch does not know."""
    return x.bitwise_right_shift(n).bitwise_and_((1 << (64 - n)) - 1)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@lru_cache(maxsize=8)
def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)
