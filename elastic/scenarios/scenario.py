"""A scenario: what a run trains, what happens to it, what must hold all the same. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Cause = Literal["notice", "loss", "growth", "rollback", "infeasible", "none"]
Victim = Literal["second", "newcomer", "sender"]
RUN_CHECKS = (
    "end", "orders", "samples", "losses", "content", "replay", "bill", "survivors", "nothing left",
)  # fmt: skip


@dataclass(frozen=True)
class Strike:
    """A worker is killed when a plan is ordered and nobody has entered it. `on`: cause of the plan;
    `whom`: its rank 1, one that holds nothing of the state yet, or one that is to send its boxes
    (rank 1 of the generation before)."""

    on: Cause
    whom: Victim


@dataclass(frozen=True)
class Act:
    """One thing that happens, once the run trains calmly. `name`: of its check. `drill`: words as
    `elastic drill` takes them (with `; ` between several), '' = it comes by itself (a node that was
    lost is replaced).
    `leads_to`: the cause of the transition that it is judged by. `back`: afterwards as many workers
    train as at first, else fewer. `pause_most_s`: where finding it out takes its time; else the
    pause must be shorter than the start of the run."""

    name: str
    drill: str
    leads_to: Cause
    back: bool = False
    pause_most_s: float | None = None
    strike: Strike | None = None

    @property
    def replaces(self) -> bool:
        """A node that was lost is replaced; the transition that left it may have the new one."""
        return self.back and not self.drill and self.strike is None

    @property
    def kind(self) -> str:
        """kill, notice, hang, ...; '' = it comes by itself."""
        return self.drill.partition("=")[0]


@dataclass(frozen=True)
class Nodes:
    """Nodes that a run starts on this host: `spot` ones, and `on_demand` ones, `workers` on each.
    `layouts`: of that many workers."""

    spot: int
    layouts: Mapping[int, str]
    on_demand: int = 0
    workers: int = 1

    @property
    def total(self) -> int:
        return self.spot + self.on_demand


@dataclass(frozen=True)
class Scenario:
    """`promise`: in a sentence. `nodes`: those that it starts. `on_cluster`: they are there, as a
    Ray cluster, before it starts. `job`: keys of job.yaml over those of every scenario. `program`
    or `script`: of programs/, what it trains. `also`: causes of transitions that may come besides.
    `anywhere`: on any nodes, also on those of a user's cluster, which stay. `whole`: in the tests,
    of the whole tier."""

    name: str
    promise: str
    acts: tuple[Act, ...]
    nodes: Nodes
    job: Mapping[str, Any] = field(default_factory=dict)
    program: str = "paced"
    script: str = ""
    also: tuple[Cause, ...] = ()
    on_cluster: bool = False
    anywhere: bool = False
    whole: bool = False
    least_s: float = 60.0  # that certify gives it at least

    @property
    def checks(self) -> tuple[str, ...]:
        """The names of what is held, in their order."""
        acts = tuple(act.name for act in self.acts)
        return (*acts, *(f"{self.name}: {name}" for name in RUN_CHECKS))
