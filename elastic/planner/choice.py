"""What the planner has chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.types import Layout, WorkerId


@dataclass(frozen=True)
class Choice:
    """The parts of a Plan that the planner decides, with what it expects and what it rejected: the
    layouts that are simpler than this one."""

    layout: Layout
    ranks: tuple[WorkerId, ...]
    samples: tuple[int, ...]
    layers: tuple[int, ...]
    n_microbatches: int
    memory_bytes: int
    activation_bytes: int = 0  # beside `memory_bytes`, while a step is computed; 0 = not known
    parts: Mapping[str, float] = field(default_factory=dict)  # of a step, as the search costs it
    model_step_s: float = 0.0  # of a step, by the cost model; 0 = the model is not known
    hardware_known: bool = False  # else `model_step_s` is of default hardware, to compare layouts
    rejected: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()  # that it was chosen from, in their order
