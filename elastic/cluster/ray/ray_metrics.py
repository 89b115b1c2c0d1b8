"""The numbers of a run through Ray's own metrics: each node's agent exports what its processes
tell, as `ray_NAME`, where Ray's dashboard and whoever scrapes Ray finds it.

All are gauges, those that only grow too: an agent keeps the counters of a process that is gone, but
not its gauges, and each driver of a run has the totals of the whole run.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Gauge


class RayMetrics:
    """Of the process that is connected to Ray."""

    def __init__(self) -> None:
        self._made: dict[str, Gauge] = {}

    def tell(self, name: str, about: str, value: float, *, labels: Mapping[str, str]) -> None:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = Gauge(name, description=about, tag_keys=tuple(labels))
        made.set(value, tags=dict(labels))
