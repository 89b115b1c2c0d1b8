"""The runs that a page shows: those that were named, or all of a storage folder, of which a run is
read when somebody looks at it."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.errors import ElasticError, SpecError
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.dashboard.followed_run import FollowedRun, PageSources
from elastic.observe.dashboard.run_summary import snapshot
from elastic.observe.dashboard.step_curve import Stretch

LOOK_S, LOOK_REMOTE_S = 5.0, 10.0  # between two looks at a journal
LIST_S, LIST_REMOTE_S = 10.0, 60.0  # between two looks for runs that have begun
# an answer that takes 10 ms of a core is made once a second at most: a page costs that core 1 %
DUTY = 100.0
QUICK_S = 0.005  # an answer, for which no other page waits
MOST_ANSWERS = 256


def id_of(run: RunFolder) -> str:
    """The same after a restart of the server; safe in a URL, whatever the folder is called."""
    return hashlib.sha256(run.uri.encode()).hexdigest()[:10]


@dataclass
class _Answer:
    """Of a run, as it goes to pages."""

    version: int
    body: bytes  # gzip
    again_at_s: float
    took_s: float


class RunShelf:
    """`named`: runs to show; () = all of `storage`, the newest of which is read at once."""

    def __init__(
        self, named: tuple[RunFolder, ...], sources: PageSources, storage: str | None = None
    ) -> None:
        self._sources, self._storage = sources, storage
        self._all = not named
        self._known: dict[str, RunFolder] = {id_of(run): run for run in named}
        self._followed: dict[str, FollowedRun] = {}
        self._answers: dict[tuple[str, Stretch | None], _Answer] = {}
        self._next: dict[str, float] = {}
        self._listed_at_s = 0.0
        self._lock = threading.Lock()
        if self._all:
            self._list()
        first = list(self._known) if not self._all else list(self._known)[:1]
        for key in first:
            self.followed(key)

    @property
    def runs(self) -> list[FollowedRun]:
        """Those that are read."""
        return list(self._followed.values())

    @property
    def versions(self) -> dict[str, int]:
        return {key: run.version for key, run in self._followed.items()}

    def followed(self, key: str) -> FollowedRun:
        """Raises KeyError."""
        with self._lock:
            if key not in self._followed:
                self._followed[key] = FollowedRun(self._known[key], self._sources)
            return self._followed[key]

    def check(self) -> None:
        """Raises SpecError where there is nothing to show of a run that was named,
        JournalDamaged."""
        for run in self.runs if not self._all else ():
            run.check()

    @property
    def _list_every_s(self) -> float:
        return LIST_REMOTE_S if "://" in find_runs.storage_uri(self._storage) else LIST_S

    def _list(self) -> None:
        """The newest first."""
        if self._known and time.monotonic() - self._listed_at_s < self._list_every_s:
            return
        self._listed_at_s = time.monotonic()
        found = [run for _, run in reversed(find_runs.all_runs(self._storage))]
        self._known = {id_of(run): run for run in found} | self._known

    @property
    def next_s(self) -> float:
        """When the next journal's time comes (monotonic)."""
        listed = [self._listed_at_s + self._list_every_s] if self._all else []
        return min([*listed, *(self._next.get(key, 0.0) for key in self._followed)], default=0.0)

    def look(self, every_s: float = LOOK_S) -> bool:
        """At all journals whose time has come: is anything new? `every_s`: between this look at one
        in a folder and the next."""
        n = len(self._known)
        if self._all:
            # out of reach for a while: those that are known stay
            with suppress(ElasticError, OSError):
                self._list()
        changed = len(self._known) != n
        for key, run in list(self._followed.items()):
            now_s = time.monotonic()
            if now_s >= self._next.get(key, 0.0):
                changed |= run.look()
                least_s = LOOK_REMOTE_S if run.run.storage.remote else 0.0
                self._next[key] = time.monotonic() + max(least_s, every_s)
        return changed

    def last_look(self) -> bool:
        """As `look`, at all journals that are followed at once; the answers that follow are new."""
        changed = [run.look() for run in self.runs]
        self._answers.clear()
        return any(changed)

    def listed(self) -> list[dict[str, Any]]:
        rows = []
        for key, place in list(self._known.items()):
            run = self._followed.get(key)
            read = run is not None and not run.empty
            rows.append(
                {
                    "id": key,
                    "name": place.name,
                    "uri": place.uri,
                    "read": read,
                    "phase": run.view.phase if run is not None and read else "",
                }
            )
        return rows

    def is_quick(self, key: str, asked: Stretch | None = None) -> bool:
        """Took the last answer to this so little that the next one needs no thread?"""
        known, run = self._answers.get((key, asked)), self._followed.get(key)
        local = run is not None and not run.reading and not run.run.storage.remote
        return local and known is not None and known.took_s < QUICK_S

    def answer(self, key: str, asked: Stretch | None = None) -> bytes:
        """The newest snapshot, or what is `asked` of its curves, that there is time for. Raises
        KeyError."""
        run = self.followed(key)
        known = self._answers.get((key, asked))
        if known is not None and (
            known.version == run.version or time.monotonic() < known.again_at_s
        ):
            return known.body
        began_s, cpu_s, version = time.monotonic(), time.thread_time(), run.version
        body = packed(snapshot(run) if asked is None else run.series(asked))
        now_s = time.monotonic()
        again_at_s = now_s + DUTY * (time.thread_time() - cpu_s)
        while len(self._answers) >= MOST_ANSWERS:
            with suppress(StopIteration, KeyError):
                del self._answers[next(iter(self._answers))]
        self._answers[key, asked] = _Answer(version, body, again_at_s, now_s - began_s)
        return body


def packed(data: Any) -> bytes:
    """By gzip: an eighth longer than at its level 5, in a quarter of the time."""
    return gzip.compress(compact(data), 1)


def compact(data: Any) -> bytes:
    """JSON; numbers that are none become null."""
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False).encode()


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if data - data == 0 else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data


def shelf_of(names: list[str], sources: PageSources, storage: str | None = None) -> RunShelf:
    """Of runs by name, folder or URI; [] = all of the storage folder. Raises SpecError."""
    named = tuple(find_runs.open_run(name, storage) for name in names)
    shelf = RunShelf(named, sources, storage)
    if not shelf.listed():
        raise SpecError(
            f"no runs in {find_runs.storage_uri(storage)}: start one with `elastic run JOB "
            "--dashboard`, or name the folder of another one"
        )
    return shelf
