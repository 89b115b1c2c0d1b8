"""Drills: when an entry is due."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.storage import Storage
from elastic.worker.hosting.inbox import INBOX

log = logging.getLogger(__name__)

DONE = f"{INBOX}done/"
MARK_MOST_S = 4.0  # the driver waits so long for the mark of an entry


def _mark(i: int) -> str:
    return f"{DONE}{i:04d}.json"


def carried_out(entries: Sequence[Mapping[str, Any]], storage: Storage) -> list[Mapping[str, Any]]:
    """Those that earlier drivers of the run have carried out."""
    marks = set(storage.list(DONE)) if entries else set()
    return [entry for i, entry in enumerate(entries) if _mark(i) in marks]


@dataclass
class Schedule:
    """The job's drill. An entry is carried out once per run: a mark in the run's storage outlives
    the driver."""

    entries: Sequence[Mapping[str, Any]]
    storage: Storage
    _left: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._left = sorted(
            range(len(self.entries)), key=lambda i: (self.entries[i].get("at_step") or 0, i)
        )

    def due(self, step: int) -> list[dict[str, Any]]:
        """Entries whose step is reached, that nobody has carried out."""
        found = []
        while self._left and (self.entries[self._left[0]].get("at_step") or 0) <= step:
            i = self._left[0]
            try:
                mine = self.storage.put(
                    _mark(i), json.dumps(dict(self.entries[i])).encode(), if_absent=True
                )
            except (
                OSError
            ) as error:  # storage does not answer, or is full: retried at the next step
                log.warning("the drill of step %s waits: %s", self.entries[i].get("at_step"), error)
                break
            self._left.pop(0)
            if mine:
                found.append(dict(self.entries[i]))
        return found
