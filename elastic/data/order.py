"""Sample ids of a step as a function of (seed, step): nothing is kept, whatever the number of
samples.

The run reads one stream of positions 0, 1, 2, ...: step s takes `global_batch` of them. Position p
is the (p mod n)-th sample of epoch p // n in the order of that epoch, a keyed permutation of
0..n-1: an alternating Feistel network over a x b >= n with cycle walking (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 5). Since a x b < n + a + b, one walk
is nearly always enough.

A phase of the job (`phases`) that reads other data begins a stream of its own, in an order that its
number keys too; one that reads the same data reads on where the one before it was. So the samples
of a step follow from the job and the step in every phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from math import isqrt

from elastic.errors import SpecError
from elastic.types import Job

ROUNDS = 8
NO_STEP = ""  # the running digest before the first step
HASH_BITS = 26  # 2**27 such hashes add up exactly in a float64
_MASK = (1 << 64) - 1
_LOW = (1 << HASH_BITS) - 1


def sample_ids(n_samples: int, global_batch: int, seed: int, *, step: int) -> list[int]:
    """Ids of the samples of optimizer step `step` (from 0). Each sample of an epoch comes up
    exactly once."""
    if n_samples < 1 or global_batch < 1 or step < 0:
        raise SpecError(
            f"step {step} of {global_batch} samples from a dataset of {n_samples}: all must be "
            "positive"
        )
    return _from(step * global_batch, n_samples, global_batch, seed=seed)


def ids_of(job: Job, step: int) -> list[int]:
    """The same, of a step in the phase that `job` is in."""
    if not job.phases:
        return sample_ids(job.n_samples, job.global_batch, job.seed, step=step)
    seed = seed_of(job.seed, job.data_phase)
    return _from(job.position_at(step), job.n_samples, job.global_batch, seed=seed)


def seed_of(seed: int, phase: int) -> int:
    """Of the order of the samples that a phase begins with; that of the first is the job's."""
    if not phase:
        return seed
    return int.from_bytes(sha256(f"elastic phase {seed} {phase}".encode()).digest()[:6], "little")


def _from(first: int, n_samples: int, global_batch: int, *, seed: int) -> list[int]:
    return [
        permuted(n_samples, seed, *divmod(position, n_samples))
        for position in range(first, first + global_batch)
    ]


def share(samples: tuple[int, ...], dp: int) -> slice:
    """The part of a step's ids that data-parallel rank `dp` reads, when rank d reads `samples[d]`
    of them."""
    start = sum(samples[:dp])
    return slice(start, start + samples[dp])


def digest(ids: Iterable[int]) -> tuple[int, int]:
    """Two sums of 26-bit hashes, one per id: they add over shares and are exact in float64 up to
    2**27 ids."""
    one = two = 0
    for sample in ids:
        hashed = _mix(sample * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03)
        one += hashed & _LOW
        two += hashed >> (64 - HASH_BITS)
    return one, two


def digest_text(pair: Sequence[int | float]) -> str:
    """A digest (or the sum of several, also as floats) as a fixed-width text."""
    one, two = (int(value) for value in pair)
    return f"{one:014x}{two:014x}"


def chained(before: str, step: int, text: str) -> str:
    """The running digest of the sample ids of all steps up to this one. `before`: of those before
    it, NO_STEP at step 1; `text`: the digest of its own."""
    return sha256(f"{before}:{step}:{text}".encode()).hexdigest()[:16]


def permuted(n: int, seed: int, epoch: int, index: int) -> int:
    """The id at place `index` of the order of `epoch`: a permutation of 0 .. n-1 for each (seed,
    epoch)."""
    high = isqrt(n - 1) + 1  # ceil of the root
    low = -(-n // high)
    keys = _keys(seed, epoch)
    while True:
        index = _permute(index, high, low, keys=keys)
        if index < n:
            return index


def _permute(index: int, high: int, low: int, *, keys: tuple[int, ...]) -> int:
    """A permutation of 0 .. high*low-1."""
    left, right = divmod(index, low)
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right ^ keys[i])) % high
        right = (right + _mix(left ^ keys[i + 1])) % low
    return left * low + right


@lru_cache(maxsize=8)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(sha256(f"elastic order {seed} {epoch} {i}".encode()).digest()[:8], "little")
        for i in range(ROUNDS)
    )


def _mix(value: int) -> int:
    """Steele, Lea, Flood: SplitMix64's finalizer, a bijection of 64-bit numbers."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
