"""A run that is looked at: its journal, read as far as it goes, and what a page asks of it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.errors import ElasticError, SpecError
from elastic.ledger.journal import Line, parse_line
from elastic.ledger.journal_growth import JournalGrowth
from elastic.ledger.run_folder import RunFolder
from elastic.observe.accounting.accounts import Books
from elastic.observe.dashboard.generation_log import GenerationLog
from elastic.observe.dashboard.step_curve import StepCurve, Stretch
from elastic.observe.diagnosis.axis_rows import AxisRow
from elastic.observe.diagnosis.evidence import Evidence, EvidenceReader
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.diagnosis.verdicts import RunVerdict
from elastic.observe.reporting.capacity_history import CapacityHistory
from elastic.observe.run_view import RECENT, Note, View
from elastic.policy.state.fold import changes
from elastic.storage import Storage
from elastic.types import Plan

KEPT_PLANS = 16  # of thousands of ranks each
KEPT_STEPS = 20_000  # that may still be undone; see Books
MOST_MARKS = 150  # on a chart
MOST_NOTES = 500  # in one answer
SOME = 200  # lines, after which a page that asks gets its turn
MANY = 4000  # lines, after which a page is told that there are more
TURN_S = 0.0005
# what is marked on a chart, the weightiest first
MARKED = (
    "WrongNumbers", "GuardTripped", "CopyDamaged", "NodeLost", "WorkerFailed", "Silent",
    "PlanFailed", "StopAsked", "DriverStarted", "PlanEntered", "Notice", "DrillAsked", "CopyFailed",
    "NodesMute", "StorageSeen", "Evaluated",
)  # fmt: skip


@dataclass(frozen=True)
class PageSources:
    """What a journal does not tell. `holder`: of a run who drives it, at each call, '' = nobody;
    `verdicts`: what it is bound by; `traced`: seconds of a step of the running plan by what they
    are for, by a profile of the run, and `parts`: by the cost model; {} = not known; `axes`: what
    its axes send, and how long a step waits for each."""

    holder: Callable[[Storage], Callable[[], str]] = lambda run: lambda: ""
    verdicts: Callable[[Evidence, Storage], Sequence[RunVerdict]] = lambda seen, run: verdicts(seen)
    traced: Callable[[Evidence, Plan, Storage], Mapping[str, float]] = lambda seen, plan, run: {}
    parts: Callable[[Evidence, Plan], Mapping[str, float]] = lambda seen, plan: {}
    axes: Callable[[Evidence, Plan, Storage], Sequence[AxisRow]] = lambda seen, plan, run: ()


class FollowedRun:
    """Safe to be asked by several threads. `version` grows with what was read."""

    def __init__(self, run: RunFolder, sources: PageSources | None = None) -> None:
        self.run = run
        self.sources = sources or PageSources()
        self.trouble = ""  # why the page may not be up to date
        self.holder, self._watch = "", self.sources.holder(run.storage)
        self.version = 0
        self.reading = True  # the journal is read for the first time, or much was added
        self.lock = threading.RLock()
        self._growth = JournalGrowth(run)
        self._begin()

    def _begin(self) -> None:
        """Of this journal no line is known yet."""
        self._begun = self._growth.begun
        self.view, self.books, self.curve = View(), Books(keeps=KEPT_STEPS), StepCurve()
        self.generations, self.history = GenerationLog(), CapacityHistory()
        self.evidence = EvidenceReader()

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def empty(self) -> bool:
        """No line was read yet."""
        return not self.view.state.run

    def look(self) -> bool:
        """Reads what was added: was anything? What is wrong with a run that is there, or out of
        reach for a while, stands in `trouble`, and looked at again the next time."""
        before = (self.trouble, self.holder, self._growth.begun)
        try:
            n = self.read()
            self.holder = self._watch()
            self.trouble = self._growth.trouble
        except FileNotFoundError:
            n, self.trouble = 0, "there is no journal yet" if self.empty else "its journal is gone"
        except (ElasticError, OSError) as error:
            n, self.trouble = 0, " ".join(str(error).split())
        other = before != (self.trouble, self.holder, self._growth.begun)
        self.version += other
        return bool(n) or other

    def read(self) -> int:
        """Lines that were added and are known now. Raises SpecError, JournalDamaged and OSError."""
        n = 0
        try:
            for line in self._growth.look():
                with self.lock:
                    if self._growth.begun != self._begun:
                        self._begin()
                    self._take(line)
                n += 1
                if n % MANY == 0:
                    self.reading = True
                    self._told()
                if n % SOME == 0:
                    time.sleep(TURN_S)
        finally:
            first, self.reading = self.reading, False
            if n or first:
                self._told()
        return n

    def _take(self, line: Line) -> None:
        for change in changes((line,), self.view.state):
            for reader in (
                self.view, self.books, self.curve, self.generations, self.history, self.evidence,
            ):  # fmt: skip
                reader.take(change)

    def _told(self) -> None:
        """What the curve and the log of generations have anyway is forgotten."""
        with self.lock:
            del self.view.points[:-RECENT]
            for generation in sorted(self.view.planned)[:-KEPT_PLANS]:
                del self.view.planned[generation]
            self.evidence.forget(KEPT_PLANS)
            self.history.usd_at.clear()
            del self.history.moments[:-1]
            self.version += 1

    def check(self) -> None:
        """Raises SpecError where a page would have nothing to show, or cannot show it. Of a long
        journal the first and the newest line are looked at; the page shows how it is read."""
        try:
            parts, text = self.run.parts_and_text()
        except FileNotFoundError:
            parts, text = None, b""
        if not text.strip() and not (parts is not None and parts.names):
            raise SpecError(
                f"run '{self.name}': its journal is empty, no driver has written a line; look "
                "again when it has started, or start it with `elastic run --dashboard`"
            )
        for line in (text.partition(b"\n")[0], *text.split(b"\n")[-2:]):
            with suppress(ValueError):  # torn, or damaged: the reader says so
                parse_line(line.decode())

    # ------------------------------------------------------------------------------------- answers

    def series(self, asked: Stretch) -> dict[str, Any]:
        """Numbers of the steps, and what happened in between."""
        with self.lock:
            found = self.curve.charted(asked, self.view.started_at_s)
            return found | self._marks(asked) | {"version": self.version}

    def _marks(self, asked: Stretch) -> dict[str, Any]:
        began_s = self.view.started_at_s
        notes = []
        for note in self.view.notes:
            x = note.step if asked.by == "step" else note.at_s - began_s
            low = float("-inf") if asked.low is None else asked.low
            high = float("inf") if asked.high is None else asked.high
            if note.kind in MARKED and low <= x <= high:
                notes.append((x, note))
        kept = sorted(notes, key=lambda one: MARKED.index(one[1].kind))[:MOST_MARKS]
        rows = [
            {"x": round(x, 3), "kind": note.kind, "text": note.text}
            for x, note in sorted(kept, key=lambda one: one[0])
        ]
        return {"marks": rows, "marks_left_out": len(notes) - len(kept)}

    def notes(self, words: str = "", kind: str = "", before: int | None = None) -> dict[str, Any]:
        """Events and decisions that hold all `words`, the newest first; `before`: number of the
        oldest one that is known already."""
        wanted = words.casefold().split()
        with self.lock:
            notes, began_s = self.view.notes, self.view.started_at_s
            kinds = Counter(note.kind for note in notes)
            end = len(notes) if before is None else max(0, min(before, len(notes)))
            rows: list[dict[str, Any]] = []
            for number in range(end - 1, -1, -1):
                note = notes[number]
                if (not kind or note.kind == kind) and _holds(note, wanted):
                    rows.append(
                        {
                            "n": number,
                            "at_s": round(note.at_s - began_s, 3),
                            "step": note.step,
                            "kind": note.kind,
                            "text": note.text,
                        }
                    )
                if len(rows) == MOST_NOTES:
                    break
        more = bool(rows) and rows[-1]["n"] > 0 and len(rows) == MOST_NOTES
        return {"rows": rows, "kinds": dict(kinds.most_common()), "more": more}


def _holds(note: Note, words: list[str]) -> bool:
    text = f"{note.kind} {note.text} step {note.step}".casefold()
    return all(word in text for word in words)
