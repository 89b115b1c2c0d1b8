"""`python -m elastic.observe.trackers.tracker_process LIBRARY MARK`: the process that a library of
a tracker lives in. Whatever it does there, hang and crash included, is not the driver's.

It reads a line of JSON for the run, then one for each point, and at last how the run has ended.
MARK is a file with the newest step that the library has taken: whoever goes on with the run goes on
behind it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from elastic.observe.trackers.mlflow_run import MlflowRun
from elastic.observe.trackers.tracker_points import TrackerPoint
from elastic.observe.trackers.tracker_run import TrackedRun, TrackerRun
from elastic.observe.trackers.trackio_run import TrackioRun
from elastic.observe.trackers.wandb_run import WandbRun

LIBRARIES: dict[str, Callable[[], TrackerRun]] = {
    "wandb": WandbRun, "mlflow": MlflowRun, "trackio": TrackioRun,
}  # fmt: skip
AT_ONCE = 500  # points
GATHER_S = 0.1  # from the first of them on: they are sent in bursts, and a library is faster so
NICE = 10  # workers of the same machine come first
AGAIN_S, AGAIN_MOST_S = 2.0, 120.0
LOCK_MOST_S = 60.0  # for which the process of a driver that is gone may still be writing

Say = Callable[..., None]


def main() -> None:
    library, mark = sys.argv[1:]
    os.nice(NICE)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def say(**answer: Any) -> None:
        try:
            print(json.dumps(answer), file=answers, flush=True)
        except OSError:  # the driver is gone; what it has sent is still told
            pass

    serve(LIBRARIES[library](), Path(mark), sys.stdin, say=say)
    os._exit(0)  # threads of the library may hang


def serve(tracker: TrackerRun, mark: Path, words: IO[str], *, say: Say) -> None:
    """To the end of the words. What the library raises is retried."""
    first = words.readline()
    if not first:
        return
    run = TrackedRun(**json.loads(first))
    with locked(mark):
        told = marked(mark, run.key)
        found = again(lambda: tracker.open(run), say) or 0
        told = max(told, found)
        say(opened=told)
        outcome = ""
        for points, end in batches(words):
            points = [point for point in points if point.step > told]
            if points:
                again(lambda points=points: tracker.log(points), say)  # type: ignore[misc]
                told = points[-1].step
                write_mark(mark, run.key, told)
                say(told=told)
            outcome = end or outcome
        again(lambda: tracker.end(outcome), say, most=1)
        say(ended=True)


def again(work: Callable[[], Any], say: Say, most: int = 1_000_000) -> Any:
    """Until it succeeds, or `most` times."""
    wait_s = AGAIN_S
    for n in range(most):
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - a boundary: somebody else's library
            text = " ".join(str(error).split())[:300]
            say(failed=f"{type(error).__name__}: {text}")
            if n + 1 < most:
                time.sleep(wait_s)
                wait_s = min(AGAIN_MOST_S, 2 * wait_s)
    return None


def batches(words: IO[str]) -> Iterator[tuple[list[TrackerPoint], str]]:
    """Points as many as have come, and how the run has ended where that has been said."""
    come: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in words:
            come.put(line)
        come.put("")

    threading.Thread(target=read, name="words", daemon=True).start()
    while True:
        lines = [come.get()]
        if lines[-1]:
            time.sleep(GATHER_S)
        try:
            while lines[-1] and len(lines) < AT_ONCE:
                lines.append(come.get_nowait())
        except Empty:
            pass
        found = [json.loads(line) for line in lines if line]
        ends = [word["end"] for word in found if "end" in word]
        yield [TrackerPoint(**word) for word in found if "end" not in word], "".join(ends[-1:])
        if not lines[-1]:
            return


# ----------------------------------------------------------------------------------------- the mark


class locked:
    """Nobody else writes the mark meanwhile; waits for the process of a driver that is gone."""

    def __init__(self, mark: Path) -> None:
        mark.parent.mkdir(parents=True, exist_ok=True)
        self._file = mark.with_suffix(".lock").open("w")

    def __enter__(self) -> None:
        until_s = time.monotonic() + LOCK_MOST_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until_s:
                    return
                time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def marked(mark: Path, key: str) -> int:
    """The newest step that was told of this run."""
    try:
        found = json.loads(mark.read_text())
        return int(found["step"]) if found["key"] == key else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def write_mark(mark: Path, key: str, step: int) -> None:
    made = mark.with_suffix(".tmp")
    made.write_text(json.dumps({"key": key, "step": step}))
    made.replace(mark)


if __name__ == "__main__":
    main()
