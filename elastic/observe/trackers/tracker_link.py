"""The driver's end of a tracker: points go into its process by a thread of its own, and wait here
until the library has taken them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_process import marked
from elastic.observe.trackers.tracker_run import TrackedRun
from elastic.version import python_path

log = logging.getLogger(__name__)

MODULE = "elastic.observe.trackers.tracker_process"
WAITING_MOST = 20_000  # points
# between two batches behind the first, unless so many wait: libraries take the points of many steps
# at once in a half of the processor time
SEND_EVERY_S, SEND_MOST = 15.0, 500
SILENT_S = 120.0  # that a library may take for the oldest point before somebody is told
BEGIN_AGAIN_S, BEGIN_AGAIN_MOST_S = 2.0, 300.0
LATER = "training continues, and what is missing is sent when the run is run again"


class TrackerLink:
    """One tracker of a run. What is wrong with it is said once, in the log."""

    def __init__(self, library: str, run: TrackedRun, *, mark: Path, output: Path) -> None:
        self._library, self._run, self._mark, self._output = library, run, mark, output
        self._changed = threading.Condition()
        self._points: deque[TrackerPoint] = deque()  # that it has not taken yet
        self._sent = 0  # the newest step that was sent to this process
        self._send_s = 0.0  # when the next batch is due (monotonic)
        self._gone: subprocess.Popen[str] | None = None  # that will answer no more
        self._known = marked(mark, run.key)  # the newest step that it has taken
        self._since_s: float | None = None  # when the oldest point began to wait
        self._opened = self._ended = self._left = self._said = False
        self._full = False  # a point was refused: those behind it are, too
        self._outcome: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"to {library}", daemon=True)
        self._thread.start()

    @property
    def known(self) -> int:
        """The newest step that the library has taken."""
        return self._known

    def put(self, point: TrackerPoint, live: bool = True) -> None:
        """Where it is read from the journal (not `live`), which is faster than any library, waits
        until half of the room is free, which stays for live ones, as long as the library takes any;
        then it is refused. Live ones never wait."""
        most = WAITING_MOST if live else WAITING_MOST // 2
        with self._changed:
            if point.step <= self._known:
                return
            if not live and not self._full and len(self._points) >= most:
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: len(self._points) < most or self._left or self._outcome is not None,
                    SILENT_S,
                )
            if len(self._points) >= most or self._full:
                # with the next one it would know a newer step, and nobody would miss this one
                self._refuse(point.step)
                return
            self._points.append(point)
            if len(self._points) == 1 or len(self._points) % SEND_MOST == 0:
                self._changed.notify_all()
            now_s = time.monotonic()
            self._since_s = now_s if self._since_s is None else self._since_s
            if now_s - self._since_s > SILENT_S:
                self._tell(f"has not answered for {SILENT_S:.0f} s")

    def end(self, outcome: str) -> None:
        """No more points will come."""
        with self._changed:
            self._outcome = outcome
            self._changed.notify_all()

    def close(self, until_s: float) -> None:
        """After `end`: waits so long until all is sent (monotonic), then leaves the rest."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        with self._changed:
            process, n = self._process, len(self._points)
            if not self._ended:
                self._tell(f"has not taken {n} of the steps, or does not end")
            self._left = True
            self._changed.notify_all()
        if self._thread.is_alive() and process is not None:
            process.kill()

    # ----------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        wait_s = BEGIN_AGAIN_S
        while not self._ended:
            with suppress(OSError):  # its process is gone
                self._serve()
            with self._changed:
                if self._ended:
                    return
                self._tell("has ended by itself")
                wait_s = BEGIN_AGAIN_S if self._opened else min(BEGIN_AGAIN_MOST_S, 2 * wait_s)
                if self._changed.wait_for(lambda: self._left, wait_s):
                    return

    def _serve(self) -> None:
        """One process, to its end."""
        self._opened, self._sent, self._send_s = False, 0, 0.0
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with self._output.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, self._library, str(self._mark)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
                env={**os.environ, "PYTHONPATH": python_path()},
                start_new_session=True,  # Ctrl-C is the driver's
            )  # fmt: skip
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        answers = threading.Thread(
            target=self._hear, args=(process,), name=f"from {self._library}", daemon=True
        )
        answers.start()
        with process:  # closes its pipes, waits
            self._send(process.stdin, self._run.plain())
            while (words := self._next()) is not None:
                self._send(process.stdin, *words)
            with suppress(BrokenPipeError):
                self._send(process.stdin, {"end": self._outcome})
                process.stdin.close()
            answers.join()

    def _next(self) -> list[dict[str, Any]] | None:
        """What is to be sent; None: all of it was, and the run has ended. Raises OSError where the
        process is gone."""
        with self._changed:
            while self._gone is None or self._gone is not self._process:
                now_s, last = time.monotonic(), self._outcome is not None
                waiting = bool(self._points) and self._points[-1].step > self._sent
                due = last or now_s >= self._send_s or len(self._points) >= SEND_MOST
                if self._opened and waiting and due:
                    found = [one for one in self._points if one.step > self._sent]
                    self._sent, self._send_s = found[-1].step, now_s + SEND_EVERY_S
                    return [asdict(one) for one in found]
                if self._opened and last:
                    return None
                self._changed.wait(self._send_s - now_s if waiting and not due else None)
        raise BrokenPipeError

    def _send(self, stream: IO[str], *words: dict[str, Any]) -> None:
        stream.write("".join(f"{json.dumps(word)}\n" for word in words))
        stream.flush()

    def _hear(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            answer = json.loads(line)
            with self._changed:
                if "failed" in answer:
                    self._tell(f"is retried: {answer['failed']}")
                step = answer.get("opened", answer.get("told"))
                if step is not None:
                    self._opened, self._known = True, max(self._known, step)
                    while self._points and self._points[0].step <= self._known:
                        self._points.popleft()
                    self._since_s = time.monotonic() if self._points else None
                self._ended = self._ended or "ended" in answer
                self._changed.notify_all()
        with self._changed:
            self._gone = process
            self._changed.notify_all()

    def _refuse(self, step: int) -> None:
        if not self._full:
            self._full = True
            what = f"does not keep up: steps from {step} on are not sent by this driver"
            log.warning("%s: tracker %s %s; %s", self._run.name, self._library, what, LATER)

    def _tell(self, what: str) -> None:
        if not self._said:
            self._said = True
            log.warning("%s: tracker %s %s; %s", self._run.name, self._library, what, LATER)
