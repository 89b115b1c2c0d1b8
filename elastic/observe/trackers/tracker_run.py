"""What a library of a tracker is asked to do: one run there for one run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from elastic.observe.trackers.tracker_points import TrackerPoint


@dataclass(frozen=True)
class TrackedRun:
    """`key`: follows from the run's own identity, so that whoever goes on with the run goes on with
    the same one there. `settings`: of the job's key `trackers`."""

    key: str
    name: str
    job: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class TrackerRun(Protocol):
    """Raises whatever the library does."""

    def open(self, run: TrackedRun) -> int | None:
        """The newest step that it has of the run; None = it does not say."""

    def log(self, points: Sequence[TrackerPoint]) -> None: ...

    def end(self, outcome: str) -> None:
        """`outcome`: '' = the run may go on with another driver."""
