"""Actions: what the policy orders a backend to do; and the Decision that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.types.events import Event
from elastic.types.nouns import Cause, Outcome, Plan, Rehearsal, WorkerId


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
    """`out_s`: for so long the node is not given to the run again; 0 = it may be, after others."""

    node_id: str
    reason: str
    out_s: float = 0.0


@dataclass(frozen=True)
class Prepare(Action):
    """Start the workers of a node (or replace those that are gone), let them look whether the node
    may take part, import the program and rehearse what may come: the first before they count as
    prepared, the others while they are idle. `gpu_bytes`: what the job needs at least of each
    worker's GPU, `host_bytes`: of the node's host memory; 0 = not known."""

    node_id: str
    rehearse: tuple[Rehearsal, ...] = ()
    gpu_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class EnterPlan(Action):
    """Every worker named in the plan or in its `resume.holdings` enters the generation; a running
    one stops at the next step boundary by itself. Workers that are only holders send their boxes
    and leave."""

    plan: Plan


@dataclass(frozen=True)
class FormGroups(Action):
    """The workers that will take part in the generation make its process groups, while the one
    before trains on -> GroupsFormed. EnterPlan uses them where they are for its generation, layout
    and workers; else it makes them anew."""

    plan: Plan


@dataclass(frozen=True)
class DropGroups(Action):
    """The process groups that FormGroups has asked for, of generations up to this one, are taken
    down."""

    generation: int


@dataclass(frozen=True)
class SetShares(Action):
    """Other numbers of samples per data-parallel rank for a generation that runs on, from a step
    after `from_step` on that all ranks agree on -> SharesSet."""

    generation: int
    samples: tuple[int, ...]
    from_step: int


@dataclass(frozen=True)
class Quiesce(Action):
    """Stop the generation at its next step boundary; `save`: leave a checkpoint of it.

    Of a script that is restarted: SIGTERM to every rank's process, SIGKILL after `grace_s`.
    `cause`: of the generation that follows, None = the run is to stop. `leaving`: nodes that will
    be preempted in `grace_s`; then only processes with a handler for SIGTERM get it, the others
    train until their node goes."""

    generation: int
    save: bool = True
    grace_s: float = 0.0
    cause: Cause | None = None
    leaving: tuple[str, ...] = ()


@dataclass(frozen=True)
class Abort(Action):
    """Abort every generation up to this one; `kill` names workers that do not answer and must be
    ended first."""

    generation: int
    kill: tuple[WorkerId, ...] = ()


@dataclass(frozen=True)
class StoreCopy(Action):
    """Take a checkpoint at the next step boundary of the generation."""

    generation: int


@dataclass(frozen=True)
class RemoveCopy(Action):
    """Remove a checkpoint that is not needed any more."""

    uri: str


@dataclass(frozen=True)
class SetCadence(Action):
    """Other steps between copies, for a generation that runs on."""

    generation: int
    peer_every: int
    durable_every: int


@dataclass(frozen=True)
class StartProfile(Action):
    """These ranks of the generation trace the `steps` steps behind `from_step` (where the order
    comes later, the next ones) -> RankProfiled; the others leave those steps out of what they
    measure. Once for each id."""

    generation: int
    profile_id: str
    steps: int
    ranks: tuple[int, ...]
    from_step: int


@dataclass(frozen=True)
class RollForward(Action):
    """Workers that hold the gradients of `step` and missed its commit apply it: `commit` is what a
    survivor got."""

    generation: int
    step: int
    commit: tuple[float, ...]


@dataclass(frozen=True)
class Stop(Action):
    """End of the run: take everything down."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class Decision:
    """What to do now, why (a sentence for a person, with numbers), and when to look again without
    an event."""

    actions: tuple[Action, ...] = ()
    reason: str = ""
    wake_at_s: float | None = None


@dataclass(frozen=True)
class Decided(Event):
    decision: Decision
