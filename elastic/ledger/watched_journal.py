"""A journal whose lines are also shown, or told to somebody, while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.ledger.journal import Journal, Line
from elastic.types import Decision, Event


@dataclass
class WatchedJournal:
    """`one_file`: it stays one, with a line for each change of the group."""

    journal: Journal
    hear: Sequence[Callable[[Line], None]]
    one_file: bool = False

    @property
    def due_at_s(self) -> float | None:
        return self.journal.due_at_s

    @property
    def settled(self) -> bool:
        return self.journal.settled

    @property
    def trouble(self) -> Exception | None:
        return self.journal.trouble

    def append(
        self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None
    ) -> None:
        self.journal.append(at_s, events, decision)
        line = Line(at_s, self.journal.epoch, tuple(events), decision)
        for hear in self.hear:
            hear(line)

    def close_part(self, state: Any) -> None:
        if not self.one_file:
            self.journal.close_part(state)

    def flush(self) -> None:
        self.journal.flush()

    def close(self) -> None:
        self.journal.close()
