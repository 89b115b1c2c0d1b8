"""The watch of one node: a thread per source. Whoever asks gets all that is known once it changes,
in seconds from now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from elastic.cluster.notices.sources.detect import Sources
from elastic.cluster.notices.sources.metadata_request import Finding, NoticeSource

log = logging.getLogger(__name__)

DEAF_S = 30.0  # a source that has not answered for so long is named in a note


@dataclass(frozen=True)
class NoticeReport:
    """`version` grows with each change; 0 = nothing is known yet. `said`: of each source that has
    answered so far, what it says now; `in_s` counts from when the report was made."""

    version: int
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    said: Mapping[str, tuple[Finding, ...]] = field(default_factory=dict)


class Watch:
    """`find` may take a second: it runs in a thread too. A notice keeps the end that it had when it
    was first seen, whatever clocks say later; one that is said no more is gone; a source that does
    not answer changes nothing."""

    def __init__(self, find: Callable[[], Sources]) -> None:
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._version = 0
        self._sources = Sources()
        # source -> what -> finding, when first seen
        self._known: dict[str, dict[str, tuple[Finding, float]]] = {}
        self._deaf: dict[str, str] = {}
        threading.Thread(target=self._begin, args=(find,), name="notices", daemon=True).start()

    def news(self, seen: int, wait_s: float) -> NoticeReport:
        """What is known, as soon as it is newer than version `seen`, at the latest after
        `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > seen or self._ended.is_set(), wait_s)
            now_s = time.monotonic()
            said = {
                name: tuple(_from(finding, now_s - at_s) for finding, at_s in known.values())
                for name, known in self._known.items()
            }
            notes = (*self._sources.notes, *self._deaf.values())
            return NoticeReport(
                self._version, tuple(source.name for source in self._sources.found), notes, said
            )

    def close(self) -> None:
        with self._changed:
            self._ended.set()
            self._changed.notify_all()

    def _begin(self, find: Callable[[], Sources]) -> None:
        sources = find()
        with self._changed:
            self._sources = sources
            self._tell()
        for source in sources.found:
            threading.Thread(
                target=self._follow, args=(source,), name=f"notices-{source.name}", daemon=True
            ).start()

    def _follow(self, source: NoticeSource) -> None:
        answered_s = time.monotonic()
        while not self._ended.is_set():
            try:
                found = source.read()
            except Exception as error:  # noqa: BLE001 - no answer, or a document of another form
                if time.monotonic() - answered_s > DEAF_S:
                    self._note(
                        source.name,
                        f"{source.name}: no answer for {DEAF_S:.0f} s ({error}); asked on",
                    )
            else:
                answered_s = time.monotonic()
                self._note(source.name, "")
                self._take(source.name, {finding.what: finding for finding in found})
            self._ended.wait(source.every_s)

    def _take(self, name: str, found: dict[str, Finding]) -> None:
        with self._changed:
            before = self._known.get(name, {})
            if name in self._known and set(found) == set(before):
                return
            now_s = time.monotonic()
            self._known[name] = {
                what: before.get(what, (finding, now_s)) for what, finding in found.items()
            }
            self._tell()

    def _note(self, name: str, text: str) -> None:
        with self._changed:
            if bool(text) == (name in self._deaf):
                return
            if text:
                self._deaf[name] = text
            else:
                del self._deaf[name]
            self._tell()

    def _tell(self) -> None:
        self._version += 1
        self._changed.notify_all()


def _from(finding: Finding, passed_s: float) -> Finding:
    return (
        finding
        if finding.in_s is None
        else replace(finding, in_s=max(0.0, finding.in_s - passed_s))
    )
