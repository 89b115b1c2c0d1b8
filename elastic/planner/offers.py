"""What `elastic plan` answers: the best layouts on given nodes, what each costs, and why the others
are out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elastic.planner.cost.memory import Step
from elastic.types import HardwareProfile, Layout, MarketType

Purpose = Literal["fastest", "cheapest", "deadline"]


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one pool. `lost_per_node_h`: how often one is taken, per hour; `zone`: '' =
    not known."""

    pool: str
    hardware: HardwareProfile
    n_nodes: int
    gpus_per_node: int
    usd_per_node_h: float = 0.0
    market_type: MarketType = "owned"
    lost_per_node_h: float = 0.0
    zone: str = ""
    host_memory_bytes: int = 0

    @property
    def n_gpus(self) -> int:
        return self.n_nodes * self.gpus_per_node

    @property
    def usd_per_h(self) -> float:
        return self.n_nodes * self.usd_per_node_h


@dataclass(frozen=True)
class Aim:
    """What a plan is for. `tokens`: to be trained on in all, 0 = not said. `deadline_h` is asked
    for by purpose `deadline`. `n_best`: how many offers are kept."""

    purpose: Purpose = "fastest"
    tokens: float = 0.0
    deadline_h: float = 0.0
    n_best: int = 5
    budget_usd: float = 0.0  # for all of it; 0 = not said


@dataclass(frozen=True)
class OfferPart:
    """What one group does in an offer: `n_gpus` of it, `samples` of a step for each of its
    data-parallel ranks (of a microbatch times their number), `layers` of each of its pipeline
    stages (of all stages where the group has whole pipelines)."""

    pool: str
    n_gpus: int
    samples: int
    layers: tuple[int, ...]
    busy: float  # share of the step in which its GPUs compute or communicate


@dataclass(frozen=True)
class Offer:
    """A layout on these nodes. `seconds`: of a step by what they are for, in sum `step_s`;
    `memory`: bytes of the GPU that needs most by what they are for; `room_bytes`: what there is on
    it. `efficiency`: throughput over that of as many lone GPUs. `goodput`: share of the paid time
    that is training where nodes are taken. `usd_per_mtoken` counts that, network, storage and head.
    """

    layout: Layout
    parts: tuple[OfferPart, ...]
    step: Step
    step_s: float
    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    room_bytes: int
    host_bytes: float
    tokens_per_s: float
    mfu: float
    usd_per_h: float
    usd_per_mtoken: float
    efficiency: float
    goodput: float = 1.0
    hours: float = 0.0  # to the aim's tokens, with validations and lost time; 0 = none were named
    usd: float = 0.0
    state_bytes: float = 0.0
    # that a checkpoint holds the steps up; it is written behind them in `copy_write_s`
    copy_stall_s: float = 0.0
    copy_write_s: float = 0.0
    # of training, that one taken node costs; `moved_s` of it fetch what was there
    lost_node_s: float = 0.0
    moved_s: float = 0.0
    why: str = ""
    warnings: tuple[str, ...] = ()
    nodes: Mapping[str, int] = field(default_factory=dict)  # pool -> those that are paid for

    @property
    def n_gpus(self) -> int:
        return sum(part.n_gpus for part in self.parts)

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Offers:
    """`best`: the best first. `rejected`: family of layouts -> why none of it is among them.
    `n_looked_at`: layouts whose cost was computed."""

    best: tuple[Offer, ...]
    rejected: Mapping[str, str] = field(default_factory=dict)
    n_looked_at: int = 0
