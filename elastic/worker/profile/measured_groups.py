"""Collectives between processes of one machine: seconds for each size, and the line through
them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from elastic.worker.profile.timings import LEAST, MOST, fitted

SIZES = (1 << 12, 1 << 17, 1 << 20, 1 << 23)  # bytes of the whole tensor
GPU_SIZES = (1 << 12, 1 << 20, 1 << 25, 1 << 28)
SMALL_BYTES, OFTEN = 1 << 17, 8  # up to so many bytes, a repetition is several calls

# torch 2.13 has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Call = Callable[[], object]


class Among:
    """The first n ranks, for as long as they are measured; every rank of the world calls all of
    it."""

    def __init__(
        self, sizes: tuple[int, ...], device: torch.device, settle: Callable[[], None]
    ) -> None:
        self.device, self.settle = device, settle
        self.groups = {n: dist.new_group(list(range(n))) for n in sizes if n > 1}
        self.rank = dist.get_rank()

    def together(self) -> None:
        """Waits, on the CPU, until every rank is here."""
        self.settle()
        word = torch.zeros(1)
        dist.all_reduce(word)

    def said(self, value: float) -> float:
        """What rank 0 says."""
        word = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(word, 0)
        return float(word[0])

    def mean(self, value: float, n: int) -> float:
        """Over the first n ranks; the others' numbers do not count."""
        word = torch.tensor([value if self.rank < n else 0.0], dtype=torch.float64)
        dist.all_reduce(word)
        return float(word[0]) / n

    def collectives(self, for_s: float) -> list[dict[str, Any]]:
        """For each operation and number of ranks: `seconds` by size, `alpha_s` and
        `beta_s_per_byte`."""
        sizes = GPU_SIZES if self.device.type == "cuda" else SIZES
        calls = {
            (op, n, n_bytes): self._call(op, n, n_bytes)
            for n in self.groups
            for op in ("all_gather", "reduce_scatter", "all_reduce", "send")
            if op != "send" or n == 2
            for n_bytes in sizes
        }
        took: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
        began = time.perf_counter()
        for repetition in range(MOST + 1):  # the first one does not count
            if not self.said(repetition <= LEAST or time.perf_counter() - began < for_s):
                break
            for key, call in calls.items():
                took_s = self._timed(key[1], OFTEN if key[2] <= SMALL_BYTES else 1, call)
                took[key] += [took_s] if repetition else []
        return [_row(op, n, took) for op, n in dict.fromkeys((op, n) for op, n, _ in took)]

    def _timed(self, n: int, often: int, call: Call) -> float:
        self.together()
        if self.rank >= n:
            return 0.0
        began = time.perf_counter()
        for _ in range(often):
            call()
        self.settle()
        return (time.perf_counter() - began) / often

    def _call(self, op: str, n: int, n_bytes: int) -> Call:
        group, many = self.groups[n], n_bytes // 4 // n * n
        if self.rank >= n:
            return lambda: None
        whole = torch.zeros(many, device=self.device)
        part = torch.zeros(many // n, device=self.device)
        match op:
            case "all_gather":
                return lambda: _all_gather(whole, part, group=group)
            case "reduce_scatter":
                return lambda: _reduce_scatter(part, whole, group=group)
            case "all_reduce":
                return lambda: dist.all_reduce(whole, group=group)
            case _:
                return lambda: self._to_and_fro(whole, group)

    def _to_and_fro(self, whole: torch.Tensor, group: Any) -> None:
        """There and back, as between pipeline stages: two sends."""
        other = 1 - self.rank
        if self.rank:
            dist.recv(whole, other, group=group)
            dist.send(whole, other, group=group)
        else:
            dist.send(whole, other, group=group)
            dist.recv(whole, other, group=group)


def _row(op: str, n: int, took: dict[tuple[str, int, int], list[float]]) -> dict[str, Any]:
    ways = 2 if op == "send" else 1
    seconds = {
        size: median(values) / ways
        for (o, m, size), values in took.items()
        if (o, m) == (op, n) and any(values)
    }
    alpha, beta = fitted(list(seconds.items())) if seconds else (0.0, 0.0)
    shown = {str(size): value for size, value in seconds.items()}
    line = {"alpha_s": alpha, "beta_s_per_byte": beta}
    return {"op": op, "ranks": n, **line, "seconds_by_bytes": shown}
