"""Every layout that a job leaves open: shapes (pp, cp, tp, and data-parallel ranks for the rest),
then their kinds (replicas, ZeRO stage, schedule), then how much is kept and computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter, ne
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner.hetero import unequal_shares
from elastic.types import Job, Layout, ModelProfile
from elastic.types.replacing import replace

MOST_VIRTUAL = 4  # pipeline stages per rank


def cut(layout: Layout) -> int:
    """Into how many parts the model and its sequences are cut."""
    return layout.tp * layout.pp * layout.cp


_SAID = attrgetter(*(f.name for f in fields(Layout) if f.name != "virtual_stages"))
_PLAIN = _SAID(Layout())


def n_options(layout: Layout) -> int:
    """How much a layout says: axes and options that are not the plain ones."""
    return sum(map(ne, _SAID(layout), _PLAIN))


@dataclass(frozen=True)
class Space:
    """What may be chosen. `pins`: what the job says itself. `roomy`: memory per worker is known, so
    that options which cost memory may be taken; `tight`: it is, or something did not fit, so that
    there is reason to save it."""

    model: ModelProfile
    pins: Mapping[str, Any]
    global_batch: int
    node_sizes: tuple[int, ...]
    no_tp: bool = False
    no_cp: bool = False
    whole_share: bool = False  # the share of a step is computed at once (scripts)
    roomy: bool = False
    tight: bool = False
    _sizes: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: ModelProfile, job: Job, sizes: tuple[int, ...], *, roomy: bool, tight: bool
    ) -> Space:
        """On nodes of these sizes."""
        unequal = bool(job.microbatch_tokens)  # samples of unequal length
        no_cp = bool(job.compile or job.script or unequal)
        no_tp = bool(job.float8 or (job.compile and unequal))
        script, known = bool(job.script) or unequal, model.sample is not None
        return cls(
            model, job.pins, job.global_batch, sizes, no_tp, no_cp, script, roomy and known,
            tight and known,
        )  # fmt: skip

    def shapes(self, world: int) -> Iterator[Layout]:
        """Layouts of that many ranks, those that cut least first; replicas only where they are
        pinned. Left out, but for the plain one, are those with fewer samples than data-parallel
        ranks, or than fill a pipeline."""
        found, replicas = [], int(self.pins.get("dp_replicate", 1))
        enough, most_dp = self.n_units, 1 if self.model.no_dp else world
        only = int(self.pins.get("dp_shard", 0))
        for tp, cp in ((t, c) for t in self.tps() for c in self.cps(t)):
            ranks, odd = divmod(world, tp * cp * replicas)
            for pp in self.pps(world // (tp * cp)) if ranks and not odd else ():
                if ranks % pp:
                    continue
                dp_shard = ranks // pp
                fed = ranks * replicas <= enough or tp * pp * cp == 1
                if fed and dp_shard * replicas <= most_dp and only in (0, dp_shard):
                    found.append((tp * pp * cp, tp, pp, cp, dp_shard))
        pinned = Layout(**self.pins)
        for _, tp, pp, cp, dp_shard in sorted(found):
            yield replace(pinned, tp=tp, pp=pp, cp=cp, dp_shard=dp_shard)

    def kinds(self, shape: Layout) -> Iterator[Layout]:
        """The shape as it is, then with replicas of one or more nodes, with other ZeRO stages,
        interleaved."""
        yield shape
        for layout in (shape, *self._replicated(shape)):
            if layout != shape:
                yield layout
            if (
                self.roomy
                and shape.pp == 1
                and shape.dp_shard * shape.cp > 1
                and "zero_stage" not in self.pins
            ):
                yield from (replace(layout, zero_stage=stage) for stage in (2, 1))
        if shape.pp > 1 and "schedule" not in self.pins:
            yield from self._interleaved(shape)
        elif shape.n_stages > shape.pp and "virtual_stages" not in self.pins:
            yield from self._interleaved(shape, first=3)

    def leanest(self, layout: Layout) -> Layout:
        """With what saves most memory: the fewest kept values, the smallest microbatch."""
        mode, size = self.modes(layout)[-1], self.sizes(layout)[-1]
        if layout.activation_checkpointing == mode and layout.microbatch_size == size:
            return layout
        return replace(layout, activation_checkpointing=mode, microbatch_size=size)

    def modes(self, layout: Layout) -> tuple[str, ...]:
        """Of activation checkpointing, those that save least first."""
        if "activation_checkpointing" in self.pins:
            return (self.pins["activation_checkpointing"],)
        some = self.tight and self.model.recomputes(layout.pp)
        return ("none", "selective", "full") if some else ("none",)

    def sizes(self, layout: Layout) -> tuple[int, ...]:
        """Of microbatches, the largest first; 0 = as it comes."""
        if "microbatch_size" in self.pins:
            return (self.pins["microbatch_size"],)
        if not self.tight or self.whole_share or layout.dp > self.n_units:
            return (0,)
        key = layout.dp, layout.pp, layout.n_stages
        if key not in self._sizes:
            self._sizes[key] = self._halved(layout)
        return self._sizes[key]

    @cached_property
    def one_size(self) -> bool:
        """Has each layout the microbatch size that the job says, and ranks that differ by their
        axes alone?"""
        return "microbatch_size" in self.pins and not {"schedule", "ep"} & set(self.pins)

    @property
    def _unit(self) -> int:
        """Samples that are never cut."""
        return max(1, self.model.together)

    @property
    def n_units(self) -> int:
        return self.global_batch // self._unit

    def _halved(self, layout: Layout) -> tuple[int, ...]:
        try:
            n = unequal_shares.microbatches(self.global_batch, layout, self.model.together)
        except InfeasiblePlan:
            return (0,)
        units, found = -(-(self.n_units // n) // layout.dp), [0]
        while units > 1 and self.model.together:
            units = -(-units // 2)
            found.append(units * self._unit)
        return tuple(
            size
            for size in found
            if not size or self._divides(replace(layout, microbatch_size=size))
        )

    def _divides(self, layout: Layout) -> bool:
        try:
            n = unequal_shares.microbatches(self.global_batch, layout, self.model.together)
            return n >= layout.pp
        except InfeasiblePlan:
            return False

    def tps(self) -> Iterator[int]:
        limit = 1 if self.no_tp or self.model.no_tp else self.model.tp_limit
        most = min(limit, max(self.node_sizes, default=0))
        yield from (tp for tp in range(1, most + 1) if limit % tp == 0 and self._open("tp", tp))

    def pps(self, world: int) -> Iterator[int]:
        stages = self.model.pipeline and not self.model.no_pp
        most = max(1, min(self.model.n_blocks, world)) if stages else 1
        pinned = int(self.pins.get("pp", 0))
        yield from range(pinned or 1, min(pinned or most, most) + 1)

    def cps(self, tp: int) -> Iterator[int]:
        sample, most = self.model.sample, max(self.node_sizes, default=0) // tp
        if "cp" in self.pins:
            yield self.pins["cp"]
        elif sample is None or sample.no_cp or self.no_cp or self.model.no_cp:
            yield 1
        else:
            yield from (
                cp for cp in range(1, most + 1) if cp == 1 or sample.sequence % (2 * cp) == 0
            )

    def _open(self, axis: str, size: int) -> bool:
        return int(self.pins.get(axis, size)) == size

    def _replicated(self, shape: Layout) -> Iterator[Layout]:
        """HSDP: each replica fills one node, two, four ... (they talk least across nodes); pipeline
        stages have none."""
        if (
            not self.roomy
            or shape.pp > 1
            or len(self.node_sizes) != 1
            or {"dp_replicate", "dp_shard"} & set(self.pins)
        ):
            return
        ranks, odd = divmod(self.node_sizes[0], shape.tp * shape.cp)
        while ranks > 1 and not odd and ranks < shape.dp_shard:
            if shape.dp_shard % ranks == 0:
                yield replace(shape, dp_replicate=shape.dp_shard // ranks, dp_shard=ranks)
            ranks *= 2

    def _interleaved(self, shape: Layout, first: int = 2) -> Iterator[Layout]:
        for v in range(
            int(self.pins.get("virtual_stages", first)),
            int(self.pins.get("virtual_stages", MOST_VIRTUAL)) + 1,
        ):
            if self.model.n_blocks % (shape.pp * v) == 0:
                named = v if v > 2 or "virtual_stages" in self.pins else 0
                yield replace(shape, schedule="interleaved1f1b", virtual_stages=named)
