"""The job of a script that enters elastic.loop."""

from __future__ import annotations

from typing import Any

from support.places import PROGRAMS
from support.worker.chain import job_of


def loop_job(name: str = "loop_tiny.py", **more: Any) -> dict[str, Any]:
    """The job of a script whose losses are those of tiny.py."""
    return job_of("tiny.py", **more) | {"script": str(PROGRAMS / name), "args": []}
