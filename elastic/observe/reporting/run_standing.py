"""How a run stands, however long it is: what has read its journal is kept in the user's cache
folder, with the place that it has come to, and continues from there.

It holds for the code that has read, and where the journal still begins with what was read; else the
journal is read from its first line. Where few lines were read nothing is kept.
"""

from __future__ import annotations

import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from elastic.ledger import kept_reading
from elastic.ledger.journal import Doubles, Line
from elastic.ledger.journal_growth import JournalGrowth, JournalPlace
from elastic.ledger.run_folder import RunFolder, key_of
from elastic.observe import find_runs
from elastic.observe.accounting.accounts import Books
from elastic.observe.accounting.sampled_curve import SampledCurve, counts_until
from elastic.observe.diagnosis.evidence import EvidenceReader
from elastic.observe.reporting.run_seen import RunStanding, seen_of_run
from elastic.observe.run_view import SKIPPED, Point, View
from elastic.policy.state.fold import EMPTY, State, changes
from elastic.text import DAY_S
from elastic.version import user_cache

# names the folder where it is kept, instead of one in the user's cache
PLACE = "ELASTIC_STATUS"
NAMED = ".elastic-status"  # how its files end: the folder may hold others
LEAST_LINES = 2000  # that were read: fewer are read again as fast
KEEP_S = 10.0  # between two times in one reading: what is interrupted is not for nothing
KEPT_STEPS = 50_000  # that may still be undone; see Books
KEPT_PLANS, KEPT_FACTS = 16, 8  # of the newest generations
TOLD = ("CopyFailed", "CopyDamaged", SKIPPED)  # kinds of notes
OLD_S = 90 * DAY_S  # what nobody has continued from for so long is removed
MOST_BYTES = 1e9  # of all runs together: then what was kept first is removed


@dataclass
class _Readers:
    """Of all that a status tells, and of no more: bounded however long the run is."""

    view: View = field(default_factory=View)
    books: Books = field(default_factory=lambda: Books(keeps=KEPT_STEPS))
    evidence: EvidenceReader = field(default_factory=EvidenceReader)
    trend: SampledCurve = field(default_factory=SampledCurve)
    deep: bool = False  # more was undone than is kept

    def take(self, line: Line) -> None:
        for change in changes((line,), self.view.state):
            last = counts_until(change)
            self.deep |= last is not None and last < self.view.reached - KEPT_STEPS
            for reader in (self.view, self.books, self.evidence, self.trend):
                reader.take(change)

    def forget(self) -> None:
        view = self.view
        del view.points[:-KEPT_STEPS]
        view.noise.clear()
        view.notes = [note for note in view.notes if note.kind in TOLD]
        for generation in sorted(view.planned)[:-KEPT_PLANS]:
            del view.planned[generation]
        self.evidence.forget(KEPT_FACTS)

    def standing(self) -> RunStanding:
        account = self.books.closed()
        return RunStanding(self.view, account, self.evidence.found(account), self.trend)


@dataclass
class _Kept:
    """The readers as they are written down: the State of all of them once, and the view's points as
    numbers."""

    code: str
    place: JournalPlace
    state: State
    points: Doubles
    view: View
    books: Books
    evidence: EvidenceReader
    trend: SampledCurve
    deep: bool


def standing_of_run(run: RunFolder) -> RunStanding:
    """Raises SpecError where the journal says nothing."""
    file = _file(run)
    readers, place = _known(file)
    growth, n, kept_s = JournalGrowth(run, place), 0, time.monotonic()

    def part_read() -> None:
        nonlocal kept_s
        readers.forget()
        if n and time.monotonic() > kept_s + KEEP_S:
            _keep(file, readers, growth)
            kept_s = time.monotonic()

    with find_runs.uncollected():
        for line in growth.look(part_read):
            if not n and growth.begun > 1:
                readers = _Readers()
            readers.take(line)
            n += 1
        another = not n and growth.begun > 1
        if another or growth.trouble or readers.view.state is EMPTY:
            return seen_of_run(run)  # which says what is wrong
        readers.forget()
        if n >= LEAST_LINES:
            _keep(file, readers, growth)
        if readers.deep:
            return seen_of_run(run)
    return readers.standing()


def _file(run: RunFolder) -> Path:
    return user_cache(PLACE, "status") / f"{key_of(run.uri)}{NAMED}"


def _keep(file: Path, readers: _Readers, growth: JournalGrowth) -> None:
    """Where it cannot be written the journal is read again."""
    view, books, evidence = readers.view, readers.books, readers.evidence
    with suppress(OSError):
        if (place := growth.place) is None:
            return
        rows = (
            (p.step, p.train_loss, p.at_s, p.generation, p.tokens, p.step_time_s)
            for p in view.points
        )
        kept = _Kept(
            kept_reading.code(), place, view.state, array("d", chain.from_iterable(rows)),
            replace(view, state=EMPTY, points=[]), replace(books, state=EMPTY, _places=None),
            replace(evidence, state=EMPTY), readers.trend, readers.deep,
        )  # fmt: skip
        kept_reading.write(file, kept_reading.text_of(kept))
        _clear(file.parent)


def _clear(folder: Path) -> None:
    """What is old, and what is too much."""
    found = [(file, file.stat()) for file in folder.glob(f"*{NAMED}*")]
    n_bytes, old_s = 0, time.time() - OLD_S
    for file, stat in sorted(found, key=lambda one: -one[1].st_mtime_ns):
        n_bytes += stat.st_size
        if n_bytes > MOST_BYTES or stat.st_mtime < old_s:
            file.unlink(missing_ok=True)


def _known(file: Path) -> tuple[_Readers, JournalPlace | None]:
    """What this user has kept, with code like this."""
    kept = kept_reading.read(file, _Kept)
    if kept is None:
        return _Readers(), None
    each = iter(kept.points)
    points = [
        Point(int(step), train_loss, at_s, int(generation), int(tokens), step_time_s)
        for step, train_loss, at_s, generation, tokens, step_time_s in zip(
            each, each, each, each, each, each, strict=True
        )
    ]
    state = kept.state
    return _Readers(
        replace(kept.view, state=state, points=points), replace(kept.books, state=state),
        replace(kept.evidence, state=state), kept.trend, kept.deep,
    ), kept.place  # fmt: skip
