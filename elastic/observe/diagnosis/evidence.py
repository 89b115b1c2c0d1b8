"""What a journal holds of where the time of a run went: the facts that verdicts are read from.
Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.observe.accounting.accounts import Account
from elastic.observe.node_speeds import NodeSpeeds
from elastic.observe.step_times import LEAST
from elastic.policy.state.fold import EMPTY, Change, State
from elastic.types import (
    CopyFailed,
    CopyStored,
    Decided,
    DeviceNoted,
    EnterPlan,
    Node,
    NodePrepared,
    Plan,
    PlanEntered,
    RankProfiled,
    RanksTimed,
    StepDone,
    WorkerId,
)

MOST = 1 << 16  # steps of a generation that medians are taken of


@dataclass
class GenerationFacts:
    """Steps of one generation without its first one, which also builds and compiles, in any order;
    of more than MOST each second one, or each fourth, and so on (`every`). `spent_s`: in all of
    them; `timed`: the newest report of how fast each rank computes."""

    plan: Plan
    steps_s: list[float] = field(default_factory=list)
    computing_s: list[float] = field(default_factory=list)  # waiting for data and copies left out
    imbalance: list[float] = field(default_factory=list)
    timed: RanksTimed | None = None
    profile: str = ""  # the newest one that a rank has written
    n_seen: int = 0
    spent_s: float = 0.0
    every: int = 1

    @property
    def step_s(self) -> float:
        """The median step, waiting for data and copies left out."""
        self.computing_s.sort()  # they are asked for again and again, and then almost in order
        n = len(self.computing_s)
        return (self.computing_s[n // 2] + self.computing_s[(n - 1) // 2]) / 2 if n else 0.0

    def take(self, done: StepDone) -> None:
        self.n_seen += 1
        if self.n_seen == 1 or done.step_time_s <= 0:
            return
        self.spent_s += done.step_time_s
        if self.n_seen % self.every:
            return
        self.steps_s.append(done.step_time_s)
        self.computing_s.append(max(0.0, done.step_time_s - done.data_s - done.copy_s))
        if done.imbalance:
            self.imbalance.append(done.imbalance)
        if len(self.steps_s) > MOST:
            self.every *= 2
            self.computing_s.sort()  # each second one is as good a sample then
            for numbers in (self.steps_s, self.computing_s, self.imbalance):
                del numbers[::2]


@dataclass
class Checkpoints:
    """Those that were stored: bytes and seconds in all, what the steps waited for them, what they
    were slower meanwhile; and how many fell due too early."""

    stored: int = 0
    n_bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0
    skipped: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Evidence:
    """`main`: the generation that trained longest; None = none has made enough steps. `nodes`:
    those that there are or were. `devices`: what GPUs have said of themselves, any time.
    `links`: bytes per second between a node and a neighbor, as found when it was admitted.
    `parts`: seconds of a step in the main generation by what they are for, as a
    profile of it has measured them (`traced`), else as the cost model has them ({} = the hardware
    is not known)."""

    state: State
    account: Account
    main: GenerationFacts | None
    nodes: Mapping[str, Node]
    node_speeds: NodeSpeeds
    devices: Mapping[WorkerId, str]
    links: Mapping[str, float]
    checkpoints: Checkpoints
    replica_slowed_s: float
    parts: Mapping[str, float] = field(default_factory=dict)
    traced: bool = False

    @property
    def wall_s(self) -> float:
        """In which a driver ran it."""
        return self.account.totals.wall_s - self.account.seconds["not_running"]

    def share(self, *categories: str) -> float:
        """Of the time in which a driver ran it."""
        spent_s = sum(self.account.seconds[name] for name in categories)
        return max(0.0, spent_s) / self.wall_s if self.wall_s > 0 else 0.0

    def usd(self, *categories: str) -> float:
        return sum(self.account.usd[name] for name in categories)


@dataclass
class EvidenceReader:
    """Built by `take`, entry by entry; others may read along."""

    generations: dict[int, GenerationFacts] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    node_speeds: NodeSpeeds = field(default_factory=NodeSpeeds)
    devices: dict[WorkerId, str] = field(default_factory=dict)
    links: dict[str, float] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    replica_slowed_s: float = 0.0
    state: State = EMPTY
    plan: Plan | None = None  # that was entered last

    def take(self, change: Change) -> None:
        self.node_speeds.take(change, self.plan)
        self.state = change.after
        if change.after.nodes is not change.before.nodes:
            self.nodes |= change.after.nodes
        self.plan = change.after.plan or self.plan
        match event := change.event:
            case StepDone() if (facts := self._facts(event.generation)) is not None:
                facts.take(event)
            case RanksTimed() if (facts := self._facts(event.generation)) is not None:
                facts.timed = event
            case RankProfiled(error="") if (facts := self._facts(event.generation)) is not None:
                facts.profile = event.profile_id
            case DeviceNoted(worker, note) if note:
                self.devices[worker] = note
            case NodePrepared(admission=found) if found is not None and found.neighbor:
                self.links[event.node_id] = found.link_bytes_per_s
            case CopyStored() if event.copy.kind == "durable":
                kept = self.checkpoints
                kept.stored, kept.n_bytes = kept.stored + 1, kept.n_bytes + event.copy.n_bytes
                kept.seconds += event.seconds
                kept.stall_s += event.stall_s
            case CopyStored() if event.copy.kind == "peer":
                self.replica_slowed_s += event.slowed_s
            case CopyFailed(skipped=skipped):
                self.checkpoints.skipped += skipped
                self.checkpoints.failed += not skipped
            case PlanEntered() | Decided():
                self._plans(change)
            case _:
                pass

    def _facts(self, generation: int) -> GenerationFacts | None:
        if generation not in self.generations:
            plan = self.state.plans.get(generation)
            if plan is None:
                return None
            self.generations[generation] = GenerationFacts(plan)
        return self.generations[generation]

    def _plans(self, change: Change) -> None:
        """A plan as it was ordered: the State forgets it, and its shares may be set later."""
        ordered = (
            [a.plan for a in change.event.decision.actions if isinstance(a, EnterPlan)]
            if isinstance(change.event, Decided)
            else []
        )
        for plan in ordered:
            self.generations.setdefault(plan.generation, GenerationFacts(plan))
        now = change.after.plan
        if now is not None and now.generation in self.generations:
            self.generations[now.generation].plan = now

    @property
    def main(self) -> GenerationFacts | None:
        """The one that trained longest; None = none has made enough steps."""
        enough = [one for one in self.generations.values() if len(one.steps_s) >= LEAST]
        return max(enough, key=lambda one: one.spent_s, default=None)

    def forget(self, kept: int) -> None:
        """Of all but the newest generations, and the one that trained longest."""
        main = self.main
        for number in sorted(self.generations)[:-kept]:
            if self.generations[number] is not main:
                del self.generations[number]

    def found(self, account: Account) -> Evidence:
        """As it stands, without `parts`."""
        return Evidence(
            self.state, account, self.main, self.nodes, self.node_speeds, self.devices, self.links,
            self.checkpoints, self.replica_slowed_s,
        )  # fmt: skip
