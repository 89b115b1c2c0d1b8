"""The numbers of a run through Ray's own metrics: each node's agent exports what its processes
tell, as `ray_NAME`, where Ray's dashboard and whoever scrapes Ray finds it."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge


class RayMetrics:
    """Of the process that is connected to Ray."""

    def __init__(self) -> None:
        self._made: dict[str, Counter | Gauge] = {}
        self._told: dict[tuple[str, tuple[str, ...]], float] = {}

    def tell(
        self, name: str, about: str, value: float, *, labels: Mapping[str, str], grows: bool
    ) -> None:
        """`grows`: it never falls, and what it has grown by since it was told last is added."""
        made = self._made.get(name)
        if made is None:
            kind = Counter if grows else Gauge
            made = self._made[name] = kind(name, description=about, tag_keys=tuple(labels))
        if isinstance(made, Gauge):
            made.set(value, tags=dict(labels))
            return
        key = name, tuple(labels.values())
        more = value - self._told.get(key, 0.0)
        if more > 0:
            made.inc(more, tags=dict(labels))
            self._told[key] = value
