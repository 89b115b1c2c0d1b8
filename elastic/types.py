"""The nouns: frozen dataclasses, standard library only.

Facts are Events (past tense), orders are Actions; both are plain data that the journal writes and reads back.
Units stand in the names: `_s` seconds, `_bytes`, `_usd`, `_usd_per_h`. All times `*_at_s` and `deadline_s` are seconds on the
backend's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from elastic.errors import SpecError

MarketType = Literal["spot", "on-demand", "reserved", "owned"]
NodeStatus = Literal["pending", "ready", "prepared", "draining", "quarantined", "lost"]
CopyKind = Literal["live", "peer", "durable"]
Source = Literal["fresh", "live", "peer", "durable"]
Cause = Literal["start", "notice", "loss", "growth", "release", "rebalance", "infeasible", "rollback"]
FailureKind = Literal["collective", "process", "program", "out_of_memory", "infrastructure"]
Outcome = Literal["succeeded", "failed", "stopped"]

# --------------------------------------------------------------------------------------------- pools and nodes


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

    @property
    def usd_per_gpu_h(self) -> float:
        return self.usd_per_node_h / max(1, self.gpus_per_node)


@dataclass(frozen=True)
class Node:
    """One machine of a pool; `gpus` workers run on it (on CPU a worker is one process)."""

    node_id: str
    pool: str
    gpus: int = 1
    status: NodeStatus = "ready"
    deadline_s: float | None = None
    speed: float = 1.0


@dataclass(frozen=True, order=True)
class WorkerId:
    """One GPU process: the `local_rank`-th worker of a node."""

    node_id: str
    local_rank: int

    def __str__(self) -> str:
        return f"{self.node_id}/{self.local_rank}"


# --------------------------------------------------------------------------------------------- model and layout


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor of the training state.

    `tp_dim`: the dimension that tensor parallelism cuts, None = replicated over tp. `block`: index of the model block that it
    belongs to, -1 = before the blocks (first stage), n_blocks = after them (last stage), None = on every rank (step, RNG).
    `tied_to`: fqn of the tensor (named earlier) that it shares its memory with. Only trainable tensors have optimizer state;
    buffers are never cut.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None = None
    block: int | None = None
    tied_to: str | None = None
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True)
class ModelProfile:
    """What the planner knows of a model: numbers only. `specs` are parameters and buffers, without optimizer state."""

    n_blocks: int
    n_params: int
    specs: tuple[TensorSpec, ...]
    optimizer_entries: tuple[str, ...] = ()  # entries of the parameter's shape, per parameter
    optimizer_scalars: tuple[str, ...] = ()  # scalar entries, per parameter
    flop_per_token: float = 0.0
    tp_limit: int = 1  # largest tp that the model's plan and shapes allow (1 = no tp plan)


@dataclass(frozen=True)
class HardwareProfile:
    """Peaks and measured corrections per accelerator type; thin here."""

    accelerator_type: str = "CPU"
    peak_flop_per_s: float = 1e10
    memory_bytes: int = 0
    link_bytes_per_s: float = 2.9e9


AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged; axis names as torchtitan uses them. Rank order: pp outermost, tp innermost."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatch_size: int = 0  # samples per microbatch; 0 = the planner's choice
    schedule: str = "1f1b"
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

    def __str__(self) -> str:
        parts = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(parts) or "dp_shard=1"


def parse_layout(text: str) -> Layout:
    """`'dp_shard=8,tp=4'` -> Layout. Raises SpecError naming the field that is wrong."""
    values: dict[str, Any] = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        if name not in (*AXES, "microbatch_size"):
            raise SpecError(f"layout '{text}': '{name}' is not an axis; axes are {', '.join(AXES)}")
        if not value.isdigit() or (int(value) < 1):
            raise SpecError(f"layout '{text}': {name} must be a whole number of at least 1, not '{value}'")
        values[name] = int(value)
    return Layout(**values)


@dataclass(frozen=True)
class Holding:
    """`worker` holds the boxes of rank `rank` of generation `generation` as they were after `step` optimizer steps."""

    worker: WorkerId
    generation: int
    rank: int
    step: int
    kind: Literal["live", "peer"]


@dataclass(frozen=True)
class Resume:
    """Where a new generation takes its state from.

    fresh: initialise. live: from the running generation, at the boundary where it stops (`step` and `holdings` are then
    not known beforehand: `holdings` names every rank of the old generation with step -1). peer: from `holdings`, all of
    `step`. durable: from `uri`. `generation`, `layout`, `layers` say how the source is cut (live and peer).
    """

    source: Source = "fresh"
    step: int = 0
    generation: int = 0
    layout: Layout | None = None
    layers: tuple[int, ...] = ()
    holdings: tuple[Holding, ...] = ()
    uri: str = ""


@dataclass(frozen=True)
class Plan:
    """One generation: who runs what. `ranks[i]` is the worker of rank i; `samples[d]` the samples per step of dp rank d."""

    generation: int
    layout: Layout
    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    n_microbatches: int = 1
    resume: Resume = field(default_factory=Resume)
    cause: Cause = "start"
    peer_every: int = 0  # optimizer steps between peer copies, 0 = none
    durable_every: int = 0  # optimizer steps between durable copies, 0 = only at the end
    predicted_step_time_s: float = 0.0
    memory_bytes: int = 0
    usd_per_h: float = 0.0

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node ids in rank order, each once."""
        return tuple(dict.fromkeys(worker.node_id for worker in self.ranks))


@dataclass(frozen=True)
class Box:
    """A rank's part of a logical tensor: `sizes[d]` elements from `offsets[d]` on along each dimension d."""

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        n = 1
        for size in self.sizes:
            n *= size
        return n

    @property
    def n_bytes(self) -> int:
        return self.n_elements * DTYPE_BYTES[self.dtype]


DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """A part of a logical tensor that goes from one place to another (own memory when both are the same).

    `source` and `destination` are participant indices of the transition: 0..n-1 the ranks of the new plan, then the
    workers that only send. `holding` is the source generation's rank whose boxes are read there.
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
        n = DTYPE_BYTES[self.dtype]
        for size in self.sizes:
            n *= size
        return n


@dataclass(frozen=True)
class Copy:
    """A whole copy of the training state after `step` optimizer steps."""

    step: int
    kind: CopyKind
    generation: int
    layout: Layout
    layers: tuple[int, ...] = ()
    holdings: tuple[Holding, ...] = ()
    uri: str = ""
    n_bytes: int = 0


# --------------------------------------------------------------------------------------------- events


@dataclass(frozen=True)
class Event:
    """A fact, in the past tense."""


@dataclass(frozen=True)
class DriverStarted(Event):
    """All that the policy and a replay need: the job and the pools as plain data, the model and hardware profiles.

    `attached`: a driver was here before; its journal has been folded and its workers may still run.
    `durable`: copies found in the run's storage at start.
    """

    run: str
    epoch: int
    job: dict[str, Any]
    pools: tuple[Pool, ...]
    model: ModelProfile
    hardware: tuple[HardwareProfile, ...] = ()
    attached: bool = False
    durable: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class NodeReady(Event):
    node: Node


@dataclass(frozen=True)
class NodePrepared(Event):
    """All workers of the node have imported the program and wait for a plan. `pids` are their process ids."""

    node_id: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Notice(Event):
    """The node will be taken at `deadline_s` (backend's clock)."""

    node_id: str
    deadline_s: float
    origin: str = ""


@dataclass(frozen=True)
class NoticeWithdrawn(Event):
    node_id: str


@dataclass(frozen=True)
class NodeLost(Event):
    """The node and all its workers are gone. `cause`: why it is believed so ('released' = given back by us)."""

    node_id: str
    cause: str = ""


@dataclass(frozen=True)
class RequestFailed(Event):
    pool: str
    request_id: str
    reason: str


@dataclass(frozen=True)
class PlanEntered(Event):
    """Every rank of the plan holds its state; the next message is its first step."""

    generation: int
    step: int
    phases_s: dict[str, float] = field(default_factory=dict)  # groups, build, transfer of rank 0, waiting for others included
    bytes_moved: int = 0
    peak_bytes: int = 0
    left_at_s: float | None = None  # when the old generation finished its last step (backend's clock)


@dataclass(frozen=True)
class PlanFailed(Event):
    """A generation cannot run as planned; `measured_bytes` > 0 where memory was the reason."""

    generation: int
    reason: str
    infeasible: bool = False
    measured_bytes: int = 0


@dataclass(frozen=True)
class StepDone(Event):
    """One per group and step. `step` counts optimizer steps finished, this one included."""

    generation: int
    step: int
    train_loss: float
    tokens: int
    step_time_s: float
    data_s: float = 0.0
    copy_s: float = 0.0
    grad_norm: float = 0.0
    digest: str = ""  # of the sample ids of this step


@dataclass(frozen=True)
class Evaluated(Event):
    generation: int
    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyStored(Event):
    """A whole copy is acknowledged (peer: by every partner; durable: its commit marker is written)."""

    copy: Copy
    seconds: float = 0.0
    stall_s: float = 0.0


@dataclass(frozen=True)
class WorkerFailed(Event):
    """A worker raised or its process is gone. The process lives unless `kind` is 'process'.

    collective: a peer went away. program: the user's code raised. out_of_memory: with `measured_bytes`.
    """

    worker: WorkerId
    generation: int
    kind: FailureKind
    error: str
    measured_bytes: int = 0


@dataclass(frozen=True)
class Quiesced(Event):
    """A worker has left its generation and is idle; `holdings` is all that it can still give to others."""

    worker: WorkerId
    generation: int
    step: int
    holdings: tuple[Holding, ...] = ()


@dataclass(frozen=True)
class Silent(Event):
    """The worker has not answered for `silent_s`, its bound for `phase` is passed, and no peer progresses."""

    worker: WorkerId
    generation: int
    phase: str
    silent_s: float


@dataclass(frozen=True)
class DigestChecked(Event):
    """The content of every logical tensor before and after a transition was compared."""

    generation: int
    ok: bool
    n_bytes: int = 0


@dataclass(frozen=True)
class ShardStored(Event):
    """A rank has written its part of a durable copy. Goes from worker to backend, which tells the policy CopyStored."""

    generation: int
    step: int
    rank: int
    n_bytes: int
    seconds: float = 0.0
    stall_s: float = 0.0
    digest: int = 0  # sum (mod 2**64) over the elements that the rank owns


@dataclass(frozen=True)
class DigestPart(Event):
    """One participant's sums (mod 2**64) over the elements that it owned before and owns after a transition. Goes from
    worker to backend, which adds them up and tells the policy DigestChecked. None = it owned nothing on that side."""

    generation: int
    participant: int
    n_participants: int
    before: int | None
    after: int | None
    n_bytes: int = 0


@dataclass(frozen=True)
class SpeedMeasured(Event):
    node_id: str
    speed: float


@dataclass(frozen=True)
class PriceSeen(Event):
    pool: str
    usd_per_node_h: float


@dataclass(frozen=True)
class StopAsked(Event):
    """A person (or a signal) asked the run to stop; the state is saved first."""

    reason: str


@dataclass(frozen=True)
class DrillAsked(Event):
    """A drill was carried out (kill, hang ...) or asks for something (add). `drill` as in the drill file."""

    drill: dict[str, Any]


@dataclass(frozen=True)
class Decided(Event):
    decision: Decision


# --------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True)
class Action:
    """An order; idempotent by generation or id."""


@dataclass(frozen=True)
class RequestNodes(Action):
    pool: str
    count: int
    request_id: str


@dataclass(frozen=True)
class ReleaseNode(Action):
    node_id: str


@dataclass(frozen=True)
class DrainNode(Action):
    node_id: str


@dataclass(frozen=True)
class Quarantine(Action):
    node_id: str
    reason: str


@dataclass(frozen=True)
class Prepare(Action):
    """Start the workers of a node (or replace those that are gone) and let them import the program."""

    node_id: str


@dataclass(frozen=True)
class EnterPlan(Action):
    """Every worker named in the plan or in its `resume.holdings` enters the generation; a running one stops at the next
    step boundary by itself. Workers that are only holders send their boxes and leave."""

    plan: Plan


@dataclass(frozen=True)
class SetShares(Action):
    generation: int
    samples: tuple[int, ...]
    from_step: int


@dataclass(frozen=True)
class Quiesce(Action):
    """Stop the generation at its next step boundary; `save`: leave a durable copy of it."""

    generation: int
    save: bool = True


@dataclass(frozen=True)
class Abort(Action):
    """Break off every generation up to this one; `kill` names workers that do not answer and must be ended first."""

    generation: int
    kill: tuple[WorkerId, ...] = ()


@dataclass(frozen=True)
class StoreCopy(Action):
    """Take a durable copy at the next step boundary of the generation."""

    generation: int


@dataclass(frozen=True)
class Stop(Action):
    """End of the run: take everything down."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Decision:
    """What to do now, why (a sentence for a person, with numbers), and when to look again without an event."""

    actions: tuple[Action, ...] = ()
    reason: str = ""
    wake_at_s: float | None = None


def names_of(cls: type) -> tuple[str, ...]:
    """Field names of a dataclass, in order."""
    return tuple(f.name for f in fields(cls))
