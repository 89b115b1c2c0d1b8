"""Lines of a journal on their way to a thread that may be slow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from support.waiting import until

from elastic.errors import JournalDamaged
from elastic.ledger import heard_lines
from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Line
from elastic.types import Decision, NodeLost, ReleaseNode, StepDone

N = 100_000


def line_of(step: int) -> Line:
    """Each hundredth has a decision besides."""
    at_s = float(step)
    decision = Decision((ReleaseNode(f"n{step}"),), "no use") if step % 100 == 0 else None
    return Line(at_s, 2, ((at_s, StepDone(1, step, 1.0, 8, 1.0)),), decision)


def merged(lines: Sequence[Line]) -> Iterator[Line]:
    """As the journal has them."""
    for at in range(0, len(lines), 2):
        both = lines[at : at + 2]
        if any(line.decision is not None for line in both):
            yield from both
        else:
            yield replace(both[-1], events=tuple(event for line in both for event in line.events))


class Seen:
    """Takes lines, the first one when it may; `steps`, `released`: what they told."""

    def __init__(self, given: list[Line]) -> None:
        self.may, self.steps, self.released = threading.Event(), list[int](), list[str]()
        self.n_read = 0
        self._given = given
        self.heard = HeardLines(self._follow, "seen", 600.0, read=self._journal)

    def _journal(self) -> Iterator[Line]:
        self.n_read += 1
        yield Line(0.0, 1, ((0.0, NodeLost("of another driver")),))
        yield from merged(list(self._given))

    def _follow(self) -> None:
        while self.heard.take(0.01, self._take):
            pass

    def _take(self, line: Line) -> None:
        self.may.wait(600.0)
        for _, event in line.events:
            assert isinstance(event, StepDone)
            self.steps.append(event.step)
        for action in line.decision.actions if line.decision is not None else ():
            assert isinstance(action, ReleaseNode)
            self.released.append(action.node_id)


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_bounded_number_waits_and_the_others_are_taken_from_the_journal(
    goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once and in order, also those that come while it is read."""
    monkeypatch.setattr(heard_lines, "WRITTEN_S", 0.0)
    given: list[Line] = []
    seen = Seen(given)
    seen.heard.start()
    for step in range(N):
        given.append(line_of(step))
        seen.heard.hear(given[-1])
        assert len(seen.heard._lines) <= heard_lines.WAITING_MOST
    seen.may.set()
    n = N
    if goes_on:
        until(lambda: len(seen.steps) > 2 * heard_lines.WAITING_MOST, "the journal")
        n += 1000
    for step in range(N, n):
        given.append(line_of(step))
        seen.heard.hear(given[-1])
    seen.heard.close()
    assert seen.steps == [*range(n)]
    assert seen.released == [f"n{step}" for step in range(0, n, 100)]
    assert seen.n_read <= 2


def test_a_reader_that_keeps_up_never_reads_the_journal() -> None:
    seen = Seen([])
    seen.may.set()
    seen.heard.start()
    for step in range(1000):
        seen.heard.hear(line_of(step))
    seen.heard.close()
    assert seen.steps == [*range(1000)] and seen.n_read == 0


def test_a_journal_that_cannot_be_read_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heard_lines, "WRITTEN_S", 0.0)
    monkeypatch.setattr(heard_lines, "WAITING_MOST", 10)
    seen = Seen([])

    def damaged() -> Iterator[Line]:
        raise JournalDamaged("line 3: it was altered")

    monkeypatch.setattr(seen.heard, "_read", damaged)
    for step in range(20):
        seen.heard.hear(line_of(step))
    seen.may.set()
    seen.heard.start()
    until(lambda: "are missing" in caplog.text, "the word of it")
    seen.heard.hear(line_of(20))
    seen.heard.close()
    assert seen.steps == [*range(10), 20]
    assert "seen: lines of the journal are missing (line 3" in caplog.text
