"""Follows the journal of a run that is going on, in a thread of its own, and tells what is known to
whoever asked for it: the step's path and the driver's loop know nothing of it.

What it knows is kept in the run's folder every few minutes, with the place in the journal that it
is of: the next driver reads on from there. Where the run is in object storage it goes there too:
that driver may be elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from elastic.errors import ElasticError, JournalDamaged
from elastic.ledger import kept_reading
from elastic.ledger.heard_lines import HeardLines, n_entries
from elastic.ledger.journal import Line
from elastic.ledger.journal_growth import JournalGrowth, JournalPlace
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.run_numbers import Labels, RunNumbers, Sample
from elastic.observe.metrics.stored_copies import StoredCopies
from elastic.policy.state.fold import EMPTY, Change, State, changes

log = logging.getLogger(__name__)

TAKEN_EVERY_S = 5.0  # lines, in a batch
KEPT_EVERY_S = 300.0
KEPT = "live-numbers.kept"  # in the run's folder


class JournalReader(Protocol):
    """Who reads along, entry by entry. `live`: by the driver that runs now."""

    def take(self, change: Change, numbers: RunNumbers, live: bool) -> None: ...

    def tick(self) -> None:
        """Every few seconds, and at the end."""

    def standing(self) -> dict[str, Any]:
        """What it needs of the entries so far to take the next ones, as plain data."""

    def settled(self, standing: Mapping[str, Any]) -> bool:
        """Nobody needs the entries up to there again."""

    def resume(self, standing: Mapping[str, Any], state: State) -> bool:
        """Continues from there. False: it needs entries before. Raises KeyError, TypeError,
        ValueError for what is no such standing."""


@dataclass(frozen=True)
class _Kept:
    """As it is written down: the State once."""

    code: str
    place: JournalPlace
    state: State
    numbers: RunNumbers
    counted: tuple[tuple[str, Labels, float], ...]
    readers: tuple[dict[str, Any], ...]

    @classmethod
    def of(
        cls, place: JournalPlace, numbers: RunNumbers, readers: Sequence[dict[str, Any]]
    ) -> _Kept:
        books = replace(numbers.books, state=EMPTY, _places=None)
        counted = tuple((*key, value) for key, value in numbers.counted.items())
        bare = replace(numbers, state=EMPTY, books=books, counted=Counter())
        return cls(kept_reading.code(), place, numbers.state, bare, counted, tuple(readers))

    def whole(self) -> RunNumbers:
        counted = Counter({(name, labels): value for name, labels, value in self.counted})
        books = replace(self.numbers.books, state=self.state)
        return replace(self.numbers, state=self.state, books=books, counted=counted)


class LiveNumbers(HeardLines):
    """`tell`: called with all values every few seconds. Raises nothing into the run: what fails is
    said once in the log and asked no more. A reader may hold its thread up: `tell` belongs into
    another one's then. `kept`: its file, which is no other one's."""

    def __init__(
        self,
        run: RunFolder,
        tell: Sequence[Callable[[str, Sequence[Sample]], None]],
        readers: Sequence[JournalReader] = (),
        *,
        kept: str = KEPT,
    ) -> None:
        super().__init__(self._follow, "live numbers", read=run.lines)
        self._run, self._tell, self._readers = run, [*tell], [*readers]
        self._kept = kept
        self._numbers = RunNumbers()
        self._growth: JournalGrowth | None = None  # of the journal's file; None = nothing is kept
        self._copies, self._is_kept = StoredCopies(run), False  # by this driver
        self._n_written = 0  # entries of this driver that it has read there
        self._keep_s = 0.0  # when something is kept next (monotonic)
        # what is to be kept: of which place and after which entry; its text, and of whom it waits
        self._at: tuple[int, JournalPlace] | None = None
        self._text: tuple[bytes, tuple[dict[str, Any], ...]] | None = None

    # ----------------------------------------------------------------------------- in the thread

    def _follow(self) -> None:
        try:
            self._take_earlier()
        except Exception as error:  # noqa: BLE001 - storage, or a journal of another version
            log.warning("%s: numbers begin with this driver (%s)", self._run.name, error)
            self._numbers, self._growth = RunNumbers(), None
        while self.take(TAKEN_EVERY_S, self._take_live):
            self._tick()
        self._tick()
        self._send(last=True)

    def _take_earlier(self) -> None:
        """All that earlier drivers of the run have written, so that what is counted goes on: what
        was kept of it, and the lines since."""
        if not self._before:
            self._growth = JournalGrowth(self._run)
            return
        self._fetch()
        kept = kept_reading.read(self._run.folder / self._kept, _Kept)
        growth = JournalGrowth(self._run, kept.place if kept is not None else None)
        lines = growth.look()
        first = next(lines, None)
        if kept is not None and (growth.begun > 1 or not self._resumes(kept)):
            growth = JournalGrowth(self._run)
            lines = growth.look()
            first = next(lines, None)
        for line in chain([first] if first is not None else (), lines):
            if line.epoch < self._epoch:
                self._take(line, live=False)
            self._n_written += n_entries(line) if line.epoch == self._epoch else 0
        if growth.trouble:
            raise JournalDamaged(growth.trouble)
        self._growth = growth

    def _fetch(self) -> None:
        """What the driver before has kept, on whatever machine it was: what lies here may be older.
        That stays where nothing else can be had."""
        if self._run.storage.remote:
            with suppress(OSError):
                stored = self._run.storage.get(self._kept)
                if kept_reading.of_text(stored, _Kept) is not None:
                    kept_reading.write(self._run.folder / self._kept, stored)

    def _resumes(self, kept: _Kept) -> bool:
        if len(kept.readers) != len(self._readers):
            return False
        with suppress(KeyError, TypeError, ValueError):
            for reader, standing in zip(self._readers, kept.readers, strict=True):
                if not reader.resume(standing, kept.state):
                    return False
            self._numbers = kept.whole()
            return True
        return False

    def _take_live(self, line: Line) -> None:
        if time.monotonic() >= self._keep_s and not self._is_away:
            self._keep_s = time.monotonic() + KEPT_EVERY_S
            self._look_ahead()
        self._keep_if_there()
        self._take(line, live=True)

    def _take(self, line: Line, live: bool) -> None:
        if line.epoch < self._numbers.state.epoch:
            return  # its writer had lost its lease
        for change in changes((line,), self._numbers.state):
            self._numbers.take(change)
            for reader in self._readers:
                reader.take(change, self._numbers, live)

    def _tick(self) -> None:
        self._keep_if_there()
        for reader in self._readers:
            reader.tick()
        samples = self._numbers.samples() if self._tell else ()
        for tell in [*self._tell]:
            try:
                tell(self._run.name, samples)
            except Exception as error:  # noqa: BLE001 - Ray, or a library of metrics
                log.warning("%s: numbers are told no more: %s", self._run.name, error)
                self._tell.remove(tell)

    # -------------------------------------------------------------------------------------- keeping

    @property
    def _is_away(self) -> bool:
        """Whatever is asked of storage now would hold the thread up for minutes, and nobody waits
        for it: what is kept when storage is back goes there."""
        return self._run.storage.remote and self._numbers.state.away is not None

    def _look_ahead(self) -> None:
        """How far the journal is written: lines are heard sooner than that, and come in batches."""
        growth = self._growth
        if growth is None:
            return
        try:
            for line in growth.look():
                self._n_written += n_entries(line) if line.epoch == self._epoch else 0
        except (OSError, ElasticError) as error:
            log.info("%s: its numbers are not kept (%s)", self._run.name, error)
        if growth.begun > 1:
            self._growth = None  # it is not the journal that was read
        elif (place := growth.place) is not None:
            self._at = self._n_written, place

    def _keep_if_there(self) -> None:
        if self._at is not None and self._at[0] <= self._n_taken:
            (n, place), self._at = self._at, None
            if n == self._n_taken:
                readers = tuple(reader.standing() for reader in self._readers)
                self._text = kept_reading.text_of(_Kept.of(place, self._numbers, readers)), readers
        if self._text is not None:
            text, standings = self._text
            if all(map(lambda r, s: r.settled(s), self._readers, standings)):
                self._text = None
                with suppress(OSError):
                    kept_reading.write(self._run.folder / self._kept, text)
                    self._is_kept = True
                    self._send()

    def _send(self, last: bool = False) -> None:
        if not self._run.storage.remote or not self._is_kept or self._is_away:
            return
        if (error := self._copies.send([self._kept], last=last)) is not None:
            log.info("%s: %s is not stored for now (%s)", self._run.name, self._kept, error)
