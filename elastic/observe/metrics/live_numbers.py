"""Follows the journal of a run that is going on, in a thread of its own, and tells what is known to
whoever asked for it: the step's path and the driver's loop know nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.run_numbers import RunNumbers, Sample
from elastic.policy.state.fold import Change, changes

log = logging.getLogger(__name__)

TAKEN_EVERY_S = 5.0  # lines, in a batch


class JournalReader(Protocol):
    """Who reads along, entry by entry. `live`: by the driver that runs now."""

    def take(self, change: Change, numbers: RunNumbers, live: bool) -> None: ...

    def tick(self) -> None:
        """Every few seconds, and at the end."""


class LiveNumbers(HeardLines):
    """`tell`: called with all values every few seconds. Raises nothing into the run: what fails is
    said once in the log and asked no more."""

    def __init__(
        self,
        run: RunFolder,
        tell: Sequence[Callable[[str, Sequence[Sample]], None]],
        readers: Sequence[JournalReader] = (),
    ) -> None:
        super().__init__(self._follow, "live numbers", read=run.lines)
        self._run, self._tell, self._readers = run, [*tell], [*readers]
        self._numbers = RunNumbers()

    # ----------------------------------------------------------------------------- in the thread

    def _follow(self) -> None:
        try:
            for line in self._earlier():
                self._take(line, live=False)
        except Exception as error:  # noqa: BLE001 - storage, or a journal of another version
            log.warning("%s: numbers begin with this driver (%s)", self._run.name, error)
            self._numbers = RunNumbers()
        while self.take(TAKEN_EVERY_S, partial(self._take, live=True)):
            self._tick()
        self._tick()

    def _earlier(self) -> Iterable[Line]:
        """All that earlier drivers of the run have written, so that what is counted goes on."""
        if not self._before:
            return ()
        return (line for line in self._run.lines() if line.epoch < self._epoch)

    def _take(self, line: Line, live: bool) -> None:
        if line.epoch < self._numbers.state.epoch:
            return  # its writer had lost its lease
        for change in changes((line,), self._numbers.state):
            self._numbers.take(change)
            for reader in self._readers:
                reader.take(change, self._numbers, live)

    def _tick(self) -> None:
        for reader in self._readers:
            reader.tick()
        samples = self._numbers.samples() if self._tell else ()
        for tell in [*self._tell]:
            try:
                tell(self._run.name, samples)
            except Exception as error:  # noqa: BLE001 - Ray, or a library of metrics
                log.warning("%s: numbers are told no more: %s", self._run.name, error)
                self._tell.remove(tell)
