"""Where the tests wait: for an event, with a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elastic.worker.process.doing import innermost_frames

T = TypeVar("T")
WITHIN_S = 300.0  # for hangs only: far above what anything takes on a busy machine
# the same where hosts boot, set up and import torch at once, and one that was too slow is replaced
HOSTS_S = 1200.0
FIRST_S, LOOK_S = 0.001, 0.01  # pauses between looks: each twice the one before, up to LOOK_S
SHARE = 0.2  # of a core, at most, that a look may take from what is looked at


def until(
    condition: Callable[[], T], what: str | Callable[[], str], within_s: float = WITHIN_S
) -> T:
    """Waits until the condition is true; returns what it gave. `what`: what is waited for; a
    function is asked at the end.

    A last look begins after that, so that a machine that stalled fails nothing.
    """
    began_s, pause_s = time.monotonic(), FIRST_S / 2
    while True:
        looked_s = time.monotonic()
        if found := condition():
            return found
        assert looked_s - began_s < within_s, (
            f"not within {within_s:g} s: {what if isinstance(what, str) else what()}"
        )
        took_s = time.monotonic() - looked_s
        # a look that is dear is taken seldom
        pause_s = max(min(2 * pause_s, LOOK_S), took_s / SHARE - took_s)
        time.sleep(pause_s)  # sleeps: here, for all


def is_waiting(thread: threading.Thread, where: str = "") -> bool:
    """Does the thread stand in a wait of Python's (an event, a condition, a future)? `where`: in a
    call of that function."""
    with innermost_frames() as frames:
        frame = frames.get(thread.ident or 0)
        found = frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (
            threading.__file__,
            "wait",
        )
        while found and where and frame is not None and frame.f_code.co_name != where:
            frame = frame.f_back
        return found and frame is not None


def once_waiting(where: str, do: Callable[[], object]) -> threading.Thread:
    """Does it as soon as the calling thread waits in a call of the function `where`."""
    this = threading.current_thread()

    def follow() -> None:
        until(lambda: is_waiting(this, where), f"a wait in {where}")
        do()

    thread = threading.Thread(target=follow)
    thread.start()
    return thread
