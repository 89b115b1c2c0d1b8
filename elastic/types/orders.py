"""What goes to one worker: an action as it is, and what only the workers are told of it. None of it
is written to a journal."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.types.actions import Action
from elastic.types.admission import Entry
from elastic.types.nouns import Plan, WorkerId


@dataclass(frozen=True)
class Rendezvous:
    """Where the participants of a generation meet: the plan's ranks, then workers that only send.
    `store`: host and port of a TCPStore that listens already; `secret`: by which they know each
    other, new for each generation ('' = they have none). It goes over Ray and nowhere else.
    `epoch`: of the driver that orders the generation, 0 = there is none."""

    participants: tuple[WorkerId, ...]
    store: tuple[str, int]
    timeout_s: float = 60.0
    secret: str = field(default="", repr=False)
    epoch: int = 0


@dataclass(frozen=True)
class WorkerOrder:
    """`rendezvous`: with EnterPlan and FormGroups. `entry`: with Prepare; None = the node is not
    looked at."""

    action: Action
    rendezvous: Rendezvous | None = None
    entry: Entry | None = None


# What the backend orders by itself.


@dataclass(frozen=True)
class WriteShard(Action):
    """Write another rank's part of a checkpoint -> ShardStored, or CopyFailed where its boxes are
    not held there."""

    plan: Plan
    step: int
    rank: int


@dataclass(frozen=True)
class InjectFault(Action):
    """A drill: the worker's device is slow, stalls, silently corrupts its results, or fails (see
    DeviceFaults)."""

    fault: str
    factor: float = 1.0
    unit_s: float = 0.0
    jitter: float = 0.0
    place: str = "forward"


@dataclass(frozen=True)
class Isolate(Action):
    """A drill: for so long the worker does not reach its peers, or storage. The connections to its
    peers break, and a generation that is ordered meanwhile is entered afterwards. `apart_from`:
    only the peers on these nodes; a generation that has such does not meet."""

    for_s: float
    nodes: bool = False
    storage: bool = False
    apart_from: tuple[str, ...] = ()
