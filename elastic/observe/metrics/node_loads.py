"""How busy the nodes of a run are: what each has told last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.types import DriverStarted, Event, NodeLoadSeen, NodeLost


@dataclass
class NodeLoads:
    """`newest`: by node that is there, when it told its load last, and what. `at_s`: when any
    did."""

    newest: dict[str, tuple[float, NodeLoadSeen]] = field(default_factory=dict)
    at_s: float = 0.0

    def take(self, event: Event | None, at_s: float) -> None:
        match event:
            case NodeLoadSeen(node_id):
                self.newest[node_id], self.at_s = (at_s, event), at_s
            case NodeLost(node_id):
                self.newest.pop(node_id, None)
            case DriverStarted(attached=False):
                self.newest.clear()
            case _:
                pass

    def of(self, nodes: Iterable[str]) -> list[NodeLoadSeen]:
        """As far as they have told."""
        return [self.newest[name][1] for name in nodes if name in self.newest]


def over_nodes(loads: Sequence[NodeLoadSeen]) -> dict[str, float]:
    """In a handful of numbers, however many nodes there are: means of what is used, the most that
    is taken of any node's memory, the hottest GPU, the power of all."""
    found: dict[str, list[float]] = {}
    for load in loads:
        taken = 1 - load.memory_free_bytes / load.memory_size_bytes
        gpu_taken = None
        if load.gpu_memory_bytes is not None and load.gpu_memory_size_bytes:
            gpu_taken = load.gpu_memory_bytes / load.gpu_memory_size_bytes
        for name, value in (
            ("cpu_share", load.cpu_share),
            ("memory_share_most", taken),
            ("worker_bytes_most", float(load.worker_bytes)),
            ("gpu_share", load.gpu_share),
            ("gpu_memory_share_most", gpu_taken),
            ("gpu_power_w_sum", load.gpu_power_w),
            ("gpu_celsius_most", load.gpu_celsius),
        ):
            if value is not None:
                found.setdefault(name, []).append(value)
    return {name: _one(name, values) for name, values in found.items()}


def _one(name: str, values: Sequence[float]) -> float:
    if name.endswith("_most"):
        return max(values)
    return sum(values) if name.endswith("_sum") else sum(values) / len(values)
