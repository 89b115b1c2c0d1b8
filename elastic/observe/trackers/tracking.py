"""The trackers of a run: what each of them gets, and until when they are waited for."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from elastic.config.job import JobSpec
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.run_numbers import RunNumbers
from elastic.observe.trackers.tracker_link import TrackerLink
from elastic.observe.trackers.tracker_points import TrackerPoint, TrackerPoints
from elastic.observe.trackers.tracker_run import TrackedRun
from elastic.policy.state.fold import ENDED, Change, State

log = logging.getLogger(__name__)

KEEP_S = 60.0  # between two copies of the marks into a storage that is no folder
CLOSE_MOST_S = 20.0
CONFIG = ("steps", "global_batch", "seed", "precision", "layout", "purpose")


def key_of_run(state: State) -> str:
    """The same for every driver of a run, and another one for a run of the same name."""
    born = hashlib.sha256(f"{state.run} {state.first_started_at_s}".encode()).hexdigest()[:8]
    return f"{state.run[:100]}-{born}"


class Tracking:
    """Reads along (LiveNumbers). The run's identity is known with its first entry."""

    def __init__(
        self, place: RunFolder, spec: JobSpec, trackers: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._place, self._spec, self._trackers = place, spec, trackers
        self._links: dict[str, TrackerLink] = {}
        self._points = TrackerPoints(self._put)
        self._outcome, self._live = "", False  # the entry that was taken last: by this driver?
        self._kept_s = time.monotonic()

    def take(self, change: Change, numbers: RunNumbers, live: bool) -> None:
        state = numbers.state
        if not self._links and state.first_started_at_s is not None:
            self._open(state)
        self._outcome = state.phase if state.phase in ENDED else ""
        self._live = live
        self._points.take(change, numbers, live)

    def standing(self) -> dict[str, Any]:
        return self._points.standing()

    def settled(self, standing: Mapping[str, Any]) -> bool:
        """What its points tell up to there no tracker needs again."""
        return all(link.known >= standing["_told"] for link in self._links.values())

    def resume(self, standing: Mapping[str, Any], state: State) -> bool:
        if state.first_started_at_s is None:
            return False
        self._open(state)
        if not self.settled(standing):
            return False  # one was added, or was behind
        self._points.resume(standing)
        return True

    def tick(self) -> None:
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep()

    def close(self) -> None:
        """Nothing more is read. Waits a bounded time until all is sent."""
        self._live = True
        self._points.close()
        for link in self._links.values():
            link.end(self._outcome)
        until_s = time.monotonic() + CLOSE_MOST_S
        for link in self._links.values():
            link.close(until_s)
        self._keep()

    def _put(self, point: TrackerPoint) -> None:
        for link in self._links.values():
            link.put(point, self._live)

    def _open(self, state: State) -> None:
        job = self._spec.model_dump(include=set(CONFIG))
        config = {"elastic_run": state.run, **{name: str(job[name]) for name in CONFIG}}
        folder, key = self._place.folder, key_of_run(state)
        for library, settings in self._trackers.items():
            run = TrackedRun(key, state.run, self._spec.name, settings, config)
            mark = folder / _mark(library)
            if not mark.exists() and self._place.storage.remote:
                with suppress(OSError):  # another machine's; there may be none
                    mark.parent.mkdir(parents=True, exist_ok=True)
                    mark.write_bytes(self._place.storage.get(_mark(library)))
            output = self._place.logs / f"tracker-{library}.log"
            self._links[library] = TrackerLink(library, run, mark=mark, output=output)

    def _keep(self) -> None:
        """Where the run is in object storage the marks go there too: the next driver may be
        elsewhere."""
        self._kept_s = time.monotonic()
        if not self._place.storage.remote:
            return
        for library in self._links:
            try:
                if (self._place.folder / _mark(library)).exists():
                    self._place.keep(_mark(library))
            except OSError as error:
                log.info("%s: the mark of %s is not kept: %s", self._place.name, library, error)


def _mark(library: str) -> str:
    return f"trackers/{library}.json"
