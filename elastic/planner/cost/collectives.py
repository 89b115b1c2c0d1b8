"""Seconds of collectives over links of two speeds: inside a node, and between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2

from elastic.planner.cost.kernels import Kernels
from elastic.types import HardwareProfile
from elastic.types.grid import ROW, control_tree

COMMIT_BYTES = 64  # of the all-reduce that every step ends with, in host memory over TCP
# A hop of it takes as many of NCCL's, for it goes through both hosts' kernels and a thread of gloo.
# Judged, not measured.
HOST_HOP_TIMES = 4.0


@dataclass(frozen=True)
class Links:
    """`inside`, `between`: bytes per second of one GPU, one direction, as collectives reach them;
    hops in seconds. `per_node`: GPUs that the faster links join."""

    inside: float
    between: float
    per_node: int
    inside_hop_s: float = 4e-6
    between_hop_s: float = 1.2e-5
    # of groups inside a node: HardwareProfile.collectives
    measured: tuple[tuple[str, int, float, float], ...] = ()

    @classmethod
    def of(cls, gpu: HardwareProfile, kernels: Kernels, per_node: int) -> Links:
        return cls(
            max(1.0, gpu.node_bytes_per_s * kernels.node), max(1.0,
            gpu.link_bytes_per_s * kernels.link), max(1, per_node), gpu.node_hop_s or 4e-6,
            gpu.link_hop_s or 1.2e-5, gpu.collectives,
        )  # fmt: skip

    def measured_s(self, name: str, n_bytes: float, group: RankGroup) -> float | None:
        """Seconds of it as measured, between two measured numbers of ranks interpolated; None = it
        was not, or the group leaves its node."""
        known = sorted(
            (n, alpha + beta * n_bytes) for op, n, alpha, beta in self.measured if op == name
        )
        if not known or group.in_node(self.per_node) < group.size:
            return None
        n = group.size
        for (few, one), (many, two) in pairwise(known):
            if few <= n <= many:
                return one + (two - one) * (n - few) / (many - few)
        return known[0][1] if n < known[0][0] else known[-1][1] * n / known[-1][0]


@dataclass(frozen=True)
class RankGroup:
    """`size` ranks, the neighbors of which are `stride` ranks apart."""

    size: int
    stride: int = 1

    def in_node(self, per_node: int) -> int:
        """How many of them are in one node."""
        return max(1, min(self.size, per_node // self.stride))

    def nodes(self, per_node: int) -> int:
        return ceil(self.size / self.in_node(per_node))


def gather_s(links: Links, n_bytes: float, group: RankGroup, *, name: str = "all_gather") -> float:
    """All-gather or reduce-scatter of `n_bytes` in all over a ring (Thakur et al. 2005, section
    4.1), inside each node and between the nodes at once: between, each node's share of the group
    sends on as many cards as it has GPUs in it; each step of the ring takes a hop."""
    if group.size <= 1 or not n_bytes:
        return 0.0
    if (known := links.measured_s(name, n_bytes, group)) is not None:
        return known
    inside, nodes = group.in_node(links.per_node), group.nodes(links.per_node)
    seconds = (
        n_bytes * (inside - 1) / inside / links.inside + (inside - 1) * links.inside_hop_s
        if inside > 1
        else 0.0
    )
    if nodes > 1:
        across = n_bytes * (nodes - 1) / nodes / (links.between * inside)
        seconds = max(seconds, across) + (nodes - 1) * links.between_hop_s
    return seconds


def reduce_s(links: Links, n_bytes: float, group: RankGroup) -> float:
    """All-reduce: the bytes of a reduce-scatter and an all-gather; between nodes with the latency
    of a tree (Sanders et al. 2009, as NCCL does it)."""
    if not n_bytes:
        return 0.0
    if group.size > 1 and (known := links.measured_s("all_reduce", n_bytes, group)) is not None:
        return known
    seconds, nodes = 2 * gather_s(links, n_bytes, group), group.nodes(links.per_node)
    return seconds - 2 * max(0.0, nodes - 1 - log2(nodes)) * links.between_hop_s


def exchange_s(links: Links, n_bytes: float, group: RankGroup) -> float:
    """All-to-all of `n_bytes` per rank: what is for other nodes leaves on the rank's own card."""
    if group.size <= 1:
        return 0.0
    inside = group.in_node(links.per_node)
    away = n_bytes * (group.size - inside) / group.size
    near = n_bytes * (inside - 1) / group.size
    hop_s = links.between_hop_s if away else links.inside_hop_s
    return max(away / links.between, near / links.inside) + hop_s * log2(group.size)


def send_s(links: Links, n_bytes: float, stride: int) -> float:
    """From one rank to the one `stride` further."""
    if (
        stride < links.per_node
        and (known := links.measured_s("send", n_bytes, RankGroup(2))) is not None
    ):
        return known
    if stride >= links.per_node:
        return n_bytes / links.between + links.between_hop_s
    return n_bytes / links.inside + links.inside_hop_s


@lru_cache(1024)
def commit_hops(n: int, per_node: int) -> tuple[int, int]:
    """Messages of a commit of n ranks that wait for each other, inside nodes and between them: a
    row of w ranks adds up in a ring, which sends the parts to its first rank (w), and takes the
    result by a tree (log2 w); in the highest row each rank's part goes around twice (2 (w - 1))."""
    hops, stride = [0, 0], 1
    for rows in control_tree(n):
        width = len(rows[0])
        needed = 2 * (width - 1) if len(rows) == 1 else width + ceil(log2(width))
        hops[width * stride > per_node] += needed
        stride *= ROW
    return hops[0], hops[1]


def commit_s(links: Links, n: int) -> float:
    """Seconds of the commit of n ranks, which no rank's next step begins before."""
    if n > 1 and (known := links.measured_s("all_reduce", COMMIT_BYTES, RankGroup(n))) is not None:
        return known
    inside, between = commit_hops(n, links.per_node)
    return HOST_HOP_TIMES * (inside * links.inside_hop_s + between * links.between_hop_s)


def under(busy_s: float, hidden_s: float, crowd: float) -> float:
    """Two things at once: the longer one, and a share of the shorter, by which each slows the
    other."""
    return max(busy_s, hidden_s) + crowd * min(busy_s, hidden_s)
