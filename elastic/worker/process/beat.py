"""What a session of a worker answers to a poll."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.types import Event
from elastic.worker.process.call_log import PartCalls
from elastic.worker.process.doing import Doing


@dataclass(frozen=True)
class Beat:
    """Answer to a poll. `progress` changes whenever the worker makes progress; `arrived`: see
    Generation.arrived. `doing`, `where`: what a worker is at that has made no progress since the
    poll before; `calls`: what its script has called."""

    messages: tuple[tuple[int, Event], ...]
    generation: int
    phase: str
    step: int
    progress: int
    pid: int
    said: tuple[str, ...] = ()  # lines that rank 0 has printed; put in by the actor's shell
    arrived: tuple[tuple[str, int, int], ...] = ()
    doing: Doing = ""
    where: str = ""
    calls: tuple[PartCalls, ...] = ()
