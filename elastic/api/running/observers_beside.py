"""`python -m elastic.api.running.observers_beside`: the observers of a run that ranks under
torchrun drive themselves, in a process beside rank 0, which tells it the journal through a pipe
(elastic/worker/standalone/told_beside.py). So no library of a tracker is in a process that trains.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from elastic.api.running.observers import Observers
from elastic.config.job import JobSpec, job_of
from elastic.errors import SpecError
from elastic.ledger.journal import parse_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.trackers.tracker_process import NICE
from elastic.storage import open_storage

# ranks that are started anew may come before the observers of those before have left their port
PORT_WAIT_S, LOOK_S = 5.0, 0.2
PORT = "metrics_port:"


def main() -> None:
    """Ends when its standard input does: with rank 0, however that ends."""
    os.nice(NICE)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the ranks
    words = (line for line in sys.stdin if line.strip())
    asked = json.loads(next(words))
    try:
        observers = _made(RunFolder.of(open_storage(asked["run"])), _spec(asked))
    except SpecError as error:
        _answer({"refused": " ".join(str(error).split())})
        return
    _answer({"ready": True})
    try:
        _follow(observers, words)
    finally:
        observers.close()


def _spec(asked: dict[str, Any]) -> JobSpec:
    keys = {name: value for name, value in asked["job"].items() if name != "folder"}
    return job_of(keys, Path(keys["program"]), asked["where"])


def _made(place: RunFolder, spec: JobSpec) -> Observers:
    """Raises SpecError."""
    until_s = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return Observers(place, spec, None, port=None, say=_say, ray=False)
        except SpecError as error:
            if not str(error).startswith(PORT) or time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)


def _follow(observers: Observers, words: Iterable[str]) -> None:
    lines = iter(words)
    first = next(lines, "")
    if not first:
        return  # the run did not begin
    start = json.loads(first)
    observers.start([parse_line(line) for line in islice(lines, start["before"])], start["epoch"])
    for line in lines:
        observers.hear(parse_line(line))


def _say(text: str) -> None:
    _answer({"say": text})


def _answer(word: dict[str, Any]) -> None:
    print(json.dumps(word), flush=True)


if __name__ == "__main__":
    main()
