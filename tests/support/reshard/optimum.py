"""The least that the busiest sender must send, however parts were divided: a lower bound for any
choice of senders."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations


def least_busiest(jobs: Mapping[frozenset[int], int]) -> float:
    """`jobs`: possible senders -> bytes that only these can send. The optimum of the divisible
    problem: by max-flow/min-cut it is the largest of bytes(jobs within S) / |S| over all sets S of
    senders; unions of the jobs' own sets are enough."""
    sets = list(jobs)
    best = 0.0
    candidates = {frozenset(s) for s in sets}
    for n in (2, 3):
        candidates |= (
            {frozenset().union(*some) for some in combinations(sets, n)}
            if len(sets) <= 40
            else set()
        )
    candidates.add(frozenset().union(*sets) if sets else frozenset())
    for senders in candidates:
        if senders:
            best = max(
                best, sum(size for able, size in jobs.items() if able <= senders) / len(senders)
            )
    return best
