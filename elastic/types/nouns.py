"""Pools, nodes, models, layouts, plans, copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from itertools import count, repeat
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from elastic.errors import SpecError, nearest

MarketType = Literal["spot", "on-demand", "reserved", "owned"]
NodeStatus = Literal["pending", "ready", "prepared", "draining", "quarantined", "lost"]
CopyKind = Literal["live", "peer", "durable"]
Source = Literal["fresh", "live", "peer", "durable"]
Cause = Literal[
    "start", "notice", "loss", "growth", "release", "rebalance", "infeasible", "rollback",
    "phase",
]  # fmt: skip
FailureKind = Literal[
    "collective",
    "process",
    "program",
    "out_of_memory",
    "infrastructure",
    "not_finite",
    "guard",
    "layout",
    "device",
    "mismatch",
    "storage",
    "refused",
    "unread",
]
Outcome = Literal["succeeded", "failed", "stopped"]

# labels by which nodes of a cluster are told apart: Ray's, and those of ours that name a pool
MARKET_LABEL, ACCELERATOR_LABEL = "ray.io/market-type", "ray.io/accelerator-type"
REGION_LABEL, ZONE_LABEL = "ray.io/availability-region", "ray.io/availability-zone"
POOL_LABEL = "elastic-pool"  # where Ray itself cannot name the pool
GROUP_LABEL = "ray.io/node-group"  # Ray's own: the node type of `ray up`, the group of KubeRay
# that name a pool, the first that is there counts
POOL_LABELS = (POOL_LABEL, "pool", GROUP_LABEL)

# ---------------------------------------------------------------------------------- pools and nodes


@dataclass(frozen=True)
class Pool:
    """Nodes of one kind that are bought in one way."""

    name: str
    accelerator_type: str = "CPU"
    gpus_per_node: int = 1
    market_type: MarketType = "owned"
    usd_per_node_h: float = 0.0
    min_nodes: int = 0
    max_nodes: int = 1
    notice_s: float = 120.0
    region: str = ""
    zone: str = ""
    ends_at_s: float | None = None
    memory_bytes_per_gpu: int = 0  # 0 = not known
    host_memory_bytes: int = 0  # of a node; 0 = not known
    instance_type: str = ""  # as the cloud names it; "" = not of a cloud, or not known
    cloud: str = ""  # aws, gcp, azure, kubernetes; "" = not known

    @property
    def usd_per_gpu_h(self) -> float:
        return self.usd_per_node_h / max(1, self.gpus_per_node)

    @property
    def paid(self) -> bool:
        """Do its nodes cost money? It has a price, or a cloud sells them at one that is not
        known."""
        return self.usd_per_node_h > 0 or (
            self.market_type != "owned" and bool(self.cloud or self.instance_type)
        )


@dataclass(frozen=True)
class Node:
    """One machine of a pool; `gpus` workers run on it (on CPU a worker is one process)."""

    node_id: str
    pool: str
    gpus: int = 1
    status: NodeStatus = "ready"
    deadline_s: float | None = None
    host_memory_bytes: int = 0  # as found on the node; 0 = not known, the pool's counts
    # of the one machine that it shares with all other nodes of the run, where its workers compute
    # on these; 0 = it has a machine of its own
    shared_cores: int = 0


class WorkerId(NamedTuple):
    """One GPU process: the `local_rank`-th worker of a node. A tuple, as thousands of them are
    hashed and compared at each change of plans."""

    node_id: str
    local_rank: int

    def __str__(self) -> str:
        return f"{self.node_id}/{self.local_rank}"


def worker_ids(nodes: Iterable[str], local_ranks: Iterable[int]) -> Iterator[WorkerId]:
    """Of many at once."""
    return map(partial(tuple.__new__, WorkerId), zip(nodes, local_ranks))


# ------------------------------------------------------------------------------------------- layout


AUTO = "auto"
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
NAMED_AXES = (*AXES, "ep")  # that a layout may say
# what a layout may say besides its axes, and what it may be; a job says the same for all of its
# layouts by keys of these names
SCHEDULES = ("1f1b", "gpipe", "interleaved1f1b")
LAYOUT_OPTIONS: dict[str, tuple[Any, ...]] = {
    "microbatch_size": (),  # any whole number
    "schedule": SCHEDULES,
    "virtual_stages": (),
    "zero_stage": (1, 2, 3),
    "activation_checkpointing": ("none", "selective", "full"),
    "offload": (False, True),
}


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged; axis names as torchtitan uses them. Rank order: pp outermost, tp
    innermost. ep has no ranks of its own: of the dp_shard x cp ranks that parameters are cut over,
    ep neighbors share out the experts."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatch_size: int = 0  # samples per microbatch; 0 = the planner's choice
    schedule: str = "1f1b"
    virtual_stages: int = 0  # pipeline stages of each rank under interleaved1f1b; 0 = 2
    zero_stage: int = 3
    activation_checkpointing: str = "none"
    offload: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks: each has its own samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def n_stages(self) -> int:
        """Pipeline stages; rank p of the pp axis has the stages p, p + pp, p + 2 pp ... of them."""
        return (
            self.pp * (self.virtual_stages or 2)
            if self.pp > 1 and self.schedule == "interleaved1f1b"
            else self.pp
        )

    def __str__(self) -> str:
        said = vars(self)
        parts = [f"{axis}={said[axis]}" for axis in NAMED_AXES if said[axis] > 1]
        parts = parts or ["dp_shard=1"]
        return ",".join((*parts, *_said_options(_OPTIONS_OF(self))))


_OPTIONS_OF = attrgetter(*LAYOUT_OPTIONS)
_PLAIN_OPTIONS = tuple((name, getattr(Layout, name)) for name in LAYOUT_OPTIONS)


@lru_cache(256)  # thousands of layouts say few different ones
def _said_options(values: tuple[Any, ...]) -> tuple[str, ...]:
    of = zip(_PLAIN_OPTIONS, values, strict=True)
    return tuple(f"{name}={_word(value)}" for (name, plain), value in of if value != plain)


def parse_layout(text: str, options: Mapping[str, Any] | None = None) -> Layout:
    """`'dp_shard=8,tp=4'` -> Layout, with these options where it leaves them out. Raises SpecError
    naming what is wrong."""
    return Layout(**({**options} | _named(text))) if options else _parsed(text)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Layout:
    """A job's own is asked for at each look at its nodes."""
    return Layout(**_named(text))


def is_auto(wanted: Any) -> bool:
    """Is a job's `layout` left to the planner, wholly (`auto`) or but for what it names
    (`auto,tp=2`)?"""
    return not isinstance(wanted, Mapping) and str(wanted or AUTO).partition(",")[0].strip() == AUTO


def named_after_auto(wanted: Any) -> dict[str, Any]:
    """Axes and options that a job's `layout` names after `auto`. Raises SpecError as
    `parse_layout`."""
    text = str(wanted).partition(",")[2].strip() if is_auto(wanted) else ""
    return _named(text) if text else {}


def _named(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if name not in (*NAMED_AXES, *LAYOUT_OPTIONS):
            raise SpecError(
                f"layout '{text}': '{name}' is not an axis{nearest(name, NAMED_AXES, 'axes')}"
            )
        if choices := LAYOUT_OPTIONS.get(name):
            words = {_word(choice): choice for choice in choices}
            if value not in words:
                raise SpecError(
                    f"layout '{text}': {name} must be {' or '.join(words)}, not '{value}'"
                )
            values[name] = words[value]
            continue
        if not value.isdigit() or (int(value) < 1):
            raise SpecError(
                f"layout '{text}': {name} must be a whole number of at least 1, not '{value}'"
            )
        values[name] = int(value)
    return values


def _word(value: Any) -> str:
    return str(value).lower()


class Holding(NamedTuple):
    """`worker` holds the boxes of rank `rank` of generation `generation` as they were after `step`
    optimizer steps."""

    worker: WorkerId
    generation: int
    rank: int
    step: int
    kind: Literal["live", "peer"]


def holdings(
    workers: Iterable[WorkerId], generation: int, ranks: Iterable[int], *, step: int, kind: str
) -> Iterator[Holding]:
    """Of many workers, each with its rank."""
    rows = zip(workers, repeat(generation), ranks, repeat(step), repeat(kind))
    return map(partial(tuple.__new__, Holding), rows)


@dataclass(frozen=True)
class Resume:
    """Where a new generation takes its state from.

    fresh: initialize. live: from the running generation, at the boundary where it stops (`step` and
    `holdings` are then not known beforehand: `holdings` names every rank of the old generation with
    step -1). peer: from `holdings`, all of `step`. durable: from `uri`. `generation`, `layout`,
    `layers` say how the source is cut (live and peer).
    """

    source: Source = "fresh"
    step: int = 0
    generation: int = 0
    layout: Layout | None = None
    layers: tuple[int, ...] = ()
    holdings: tuple[Holding, ...] = ()
    uri: str = ""


@dataclass(frozen=True)
class Move:
    """What taking over the state costs, stated before it starts.

    via: `device` = the old tensors stay where they are until everyone has its new ones; `host` =
    they are copied to host memory first. `links`: (sender's node, receiver's node, bytes), those
    inside a node included. `peak_bytes`: per GPU, beyond what the model needs anyway (promise 5).
    `own_bytes` are copied in place.
    """

    via: Literal["device", "host"] = "device"
    n_bytes: int = 0
    own_bytes: int = 0
    links: tuple[tuple[str, str, int], ...] = ()
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """One generation: who runs what. `ranks[i]` is the worker of rank i; `samples[d]` the samples
    per step of dp rank d.

    `copies_to[i]`: the ranks that keep a peer replica of rank i's boxes in host memory; () = nobody
    does (replicas or checkpoints must do, or there are no peer replicas at all). With `peer_every`
    > 0 every rank keeps its own boxes too.
    """

    generation: int
    layout: Layout
    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    n_microbatches: int = 1
    resume: Resume = field(default_factory=Resume)
    cause: Cause = "start"
    peer_every: int = 0  # optimizer steps between peer replicas, 0 = none
    copies_to: tuple[tuple[int, ...], ...] = ()
    # host buffers per kept copy; 1 = while a copy is in flight the one before it is gone already
    copy_buffers: int = 2
    # a rank sends its peer replicas at most this fast under the steps, 0 = no limit
    copy_bytes_per_s: float = 0.0
    move: Move | None = None  # None = not predicted
    durable_every: int = 0  # optimizer steps between checkpoints, 0 = only at the end
    predicted_step_time_s: float = 0.0  # measurements taken into account; 0 = nothing is known
    # by the cost model alone, before any measurement; 0 = the hardware is not known
    model_step_s: float = 0.0
    memory_bytes: int = 0
    usd_per_h: float = 0.0
    # guards and steps that the run was rolled back for
    rolled_back: tuple[tuple[str, int], ...] = ()
    # axes and layouts that the run has closed for itself, and why
    unusable: tuple[tuple[str, str], ...] = ()
    # loss of the probe sample at resume.step (see Probed), where the driver knows it
    probe: float | None = None
    phase: int = 0  # of the job: it ends by itself behind the last step of that one

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what follows from them is made anew where it is needed, and goes to no
        worker."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def workers_per_node(self) -> Mapping[str, int]:
        """Node -> how many of the ranks are on it, in rank order."""
        return dict(Counter(worker.node_id for worker in self.ranks))

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Node ids in rank order, each once."""
        return tuple(self.workers_per_node)

    @cached_property
    def workers(self) -> frozenset[WorkerId]:
        return frozenset(self.ranks)

    @cached_property
    def senders(self) -> frozenset[WorkerId]:
        """Workers that hold a part of its first state and are none of its ranks."""
        return frozenset(map(attrgetter("worker"), self.resume.holdings)) - self.workers

    @cached_property
    def live(self) -> tuple[Holding, ...]:
        """What each rank holds of the boundary where it stops, whichever that is going to be (see
        Resume)."""
        return tuple(holdings(self.ranks, self.generation, count(), step=-1, kind="live"))

    @cached_property
    def nodes_taking_part(self) -> frozenset[str]:
        """Those of its ranks and of its senders."""
        return frozenset((*self.nodes, *(worker.node_id for worker in self.senders)))

    @property
    def meeting(self) -> tuple[object, ...]:
        """What its process groups are made for: groups of one plan serve another whose meeting is
        the same."""
        return (
            self.generation,
            self.layout,
            self.ranks,
            frozenset(holding.worker for holding in self.resume.holdings),
        )


@dataclass(frozen=True)
class Rehearsal:
    """A plan that may come, as one node sees it. `ranks[k]`: the rank of its k-th worker, -1 =
    none; `n_samples`: those of the largest share."""

    layout: Layout
    layers: tuple[int, ...]
    n_microbatches: int
    n_samples: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rank's part of a logical tensor: `sizes[d]` elements from `offsets[d]` on along each
    dimension d."""

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        return prod(self.sizes)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BYTES[self.dtype]

    @classmethod
    def whole(cls, fqn: str, shape: tuple[int, ...], dtype: str) -> Box:
        """All of a logical tensor."""
        return cls(fqn, (0,) * len(shape), shape, dtype)

    def in_rows(self, most_bytes: int) -> Iterator[Box]:
        """Cut along dimension 0 into boxes of at most so many bytes (one row at least); nothing
        where it is empty."""
        if not self.sizes:
            yield self
        elif self.n_elements:
            step = max(1, most_bytes * self.sizes[0] // self.n_bytes)
            for at in range(0, self.sizes[0], step):
                offsets = (self.offsets[0] + at, *self.offsets[1:])
                sizes = (min(step, self.sizes[0] - at), *self.sizes[1:])
                yield Box(self.fqn, offsets, sizes, self.dtype)


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """A part of a logical tensor that goes from one place to another (own memory when both are the
    same).

    `source` and `destination` are participant indices of the transition: 0..n-1 the ranks of the
    new plan, then the workers that only send. `holding` is the source generation's rank whose boxes
    are read there.
    """

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    source: int
    destination: int
    holding: int = 0

    @property
    def n_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.sizes)


@dataclass(frozen=True)
class Copy:
    """A whole copy of the training state after `step` optimizer steps. `samples`: the running
    digest of the sample ids of these steps, as its marker has it; '' = it does not say."""

    step: int
    kind: CopyKind
    generation: int
    layout: Layout
    layers: tuple[int, ...] = ()
    uri: str = ""
    n_bytes: int = 0
    samples: str = ""
