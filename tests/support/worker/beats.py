"""What workers answer to polls, made up."""

from __future__ import annotations

from typing import Any

from elastic.worker.process.beat import Beat


def beat_of(generation: int = 1, phase: str = "stepping", progress: int = 0, **more: Any) -> Beat:
    """Without news. `more`: of Beat."""
    return Beat((), generation, phase, step=progress, progress=progress, pid=0, **more)
