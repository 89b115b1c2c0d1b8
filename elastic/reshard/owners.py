"""Which rank of a group steps which whole tensor.

Balanced: the busiest rank has at most what "largest first, each to the rank with the least" gives
it, or the mean and one tensor. Stable: a tensor asks a few ranks in an order that hardly changes
with their number (jump consistent hash, Lamping and Veach 2014), and goes to the first that has
room; so most tensors keep their owner where some are added or a rank comes or goes at the end.
Integers only: equal input gives equal output on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from heapq import heapreplace

TRIES = 8
# what a byte of values, gradients and state counts beside a FLOP: GPUs make 10 (float32) to 160
# (tensor cores) FLOPs in the time that they move one
FLOP_PER_BYTE = 32


def shared_out(costs: Mapping[str, int], n: int) -> dict[str, int]:
    """Name of each tensor -> its owner, 0 to n - 1."""
    order = sorted(costs, key=lambda name: (-costs[name], name))
    most = _most(order, costs, n)
    load = [0] * n
    least = [(0, rank) for rank in range(n)]  # loads as they were when they were looked at
    found = {}
    for name in order:
        asked = (jump(_key(name, k), n) for k in range(TRIES))
        rank = next((rank for rank in asked if load[rank] + costs[name] <= most), None)
        if rank is None:
            while (now := load[least[0][1]]) > least[0][0]:
                heapreplace(least, (now, least[0][1]))
            rank = least[0][1]
        load[rank] += costs[name]
        found[name] = rank
    return found


def _most(order: list[str], costs: Mapping[str, int], n: int) -> int:
    """Of the busiest, where each goes to the one with the least."""
    least = [(0, rank) for rank in range(n)]
    for name in order:
        heapreplace(least, (least[0][0] + costs[name], least[0][1]))
    return max(load for load, _ in least)


def jump(key: int, n: int) -> int:
    """A number below n, which of n and n + 1 is the same but for one key of n + 1."""
    found, following = -1, 0
    while following < n:
        found = following
        key = (key * 2862933555777941757 + 1) & ((1 << 64) - 1)
        following = (found + 1) * (1 << 31) // ((key >> 33) + 1)
    return found


def _key(name: str, k: int) -> int:
    return int.from_bytes(blake2b(f"{k} {name}".encode(), digest_size=8).digest(), "little")
