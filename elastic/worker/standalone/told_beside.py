"""Trackers and the metrics endpoint of ranks that drive themselves: a process beside rank 0 hears
the journal and tells them (elastic/api/running/observers_beside.py). Where the job asks for none
there is no such process, and none of their libraries is needed."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from elastic.config.job import JobSpec
from elastic.errors import SpecError
from elastic.ledger.heard_lines import HeardLines
from elastic.ledger.journal import Line, write_line
from elastic.ledger.run_folder import RunFolder
from elastic.storage import open_storage
from elastic.version import python_path

log = logging.getLogger(__name__)

MODULE = "elastic.api.running.observers_beside"
READY_MOST_S = 120.0  # imports, on a busy machine
SEND_MOST_S, END_MOST_S = 10.0, 40.0
WAIT_S = 1.0


def is_asked(spec: JobSpec) -> bool:
    return bool(spec.trackers.chosen()) or spec.metrics_port is not None


class ToldBeside(HeardLines):
    """Begun at once, so that its imports run beside the program's. `say`: a line for a person.
    Raises nothing into the run once that has begun: what fails is said once in the log."""

    def __init__(self, run_uri: str, spec: JobSpec, say: Callable[[str], None]) -> None:
        super().__init__(
            self._send, "told beside", SEND_MOST_S,
            read=lambda: RunFolder.of(open_storage(run_uri)).lines(),
        )  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,  # signals to the ranks are not for it
        )  # fmt: skip
        self._say = say
        self._answered, self._refused = threading.Event(), ""
        self._begun = self._gone = False
        threading.Thread(target=self._hear, name="from told beside", daemon=True).start()
        job = {"run": run_uri, "job": spec.plain(), "where": spec.where}
        with suppress(BrokenPipeError):  # then it does not answer either
            self._put(json.dumps(job))

    def check(self) -> None:
        """Waits until it stands. Raises SpecError where a port is taken or a library is not
        here."""
        if not self._answered.wait(READY_MOST_S):
            self._refused = f"the process that tells the run's numbers is silent ({MODULE})"
        if self._refused:
            raise SpecError(self._refused)

    def start(self, before: Sequence[Line] = (), epoch: int = 0) -> None:
        self._begun = True
        super().start(before, epoch)

    def hear(self, line: Line) -> None:
        if not self._gone:
            super().hear(line)

    def close(self) -> None:
        """Waits a bounded time until everything was sent."""
        if self._begun:
            super().close()
        else:
            self._end_of_lines()
        try:
            self._process.wait(END_MOST_S)
        except subprocess.TimeoutExpired:
            log.warning("numbers of the run are not told to their end: that takes too long")
            self._process.kill()
            self._process.wait()

    # --------------------------------------------------------------------------------- in threads

    def _send(self) -> None:
        try:
            self._put(json.dumps({"epoch": self._epoch, "before": len(self._before)}))
            for line in self._before:
                self._put(write_line(line))
            self._before = ()
            while self.take(WAIT_S, lambda line: self._put(write_line(line))):
                pass
        except OSError:
            self._gone = True
            log.warning("numbers of the run are told no more: the process that does has ended")
        self._end_of_lines()

    def _put(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def _end_of_lines(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _hear(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for text in answers:
                answer = json.loads(text)
                if "say" in answer:
                    self._say(answer["say"])
                self._refused = answer.get("refused", self._refused)
                if "refused" in answer or "ready" in answer:
                    self._answered.set()
        if not self._answered.is_set():
            self._refused = f"the process that tells the run's numbers did not start ({MODULE})"
            self._answered.set()
