"""`elastic run --supervise`: the driver as a process below this one, started again where that may
help.

Started again: a driver that was killed, and one that has lost its run, cannot reach its storage or
has crashed (exit code 4). What ends a run for good is never covered up: it succeeded, failed, was
stopped, or its input is wrong.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from elastic.errors import LostContact

FIRST_S, MOST_S = 5.0, 300.0  # between two starts; doubled from one to the next
LONG_S = 600.0  # a driver that has lived so long was not at fault from the start
TRIES = 10  # starts in a row of drivers that did not live so long
FINAL = (0, 1, 2, 3)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervised(
    words: Sequence[str],
    say: Callable[[str], None],
    waits: Callable[[float], object] | None = None,
    *,
    again: Sequence[str] = (),
) -> int:
    """Runs the command until it has ended for good; its exit code, 128 + the signal's number where
    it was killed.

    A signal that asks this process to end continues to the driver (a hangup as SIGTERM: it saves),
    and nothing is started after it. `waits`: between two starts. `again`: the command from the
    second start on, where it is another.
    """
    asked = threading.Event()
    driver: list[subprocess.Popen[bytes]] = []

    def passed_on(number: int, frame: FrameType | None) -> None:
        asked.set()
        if driver:
            # none where it has ended
            driver[0].send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    before = {
        number: signal.signal(number, passed_on)
        for number in SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        short, again_s = 0, FIRST_S
        while True:
            began_s = time.monotonic()
            # Ctrl-C comes by way of this process, once
            driver[:] = [subprocess.Popen(words, process_group=0)]
            code = driver[0].wait()
            words = again or words
            long = time.monotonic() - began_s > LONG_S
            short, again_s = (0, FIRST_S) if long else (short + 1, again_s)
            if code in FINAL or asked.is_set() or short >= TRIES:
                return 128 - code if code < 0 else code
            start = f"start {short + 1} of at most {TRIES} in a row"
            say(f"the driver {_how(code)}; it is started again in {again_s:.0f} s ({start})")
            (waits or asked.wait)(again_s)
            again_s = min(MOST_S, 2 * again_s)
            if asked.is_set():
                return LostContact.exit_code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def command_of(argv: Sequence[str], again: bool = False) -> list[str]:
    """The same command as one that is supervised. The word stands before a script's own arguments.
    `again`: not the start that was typed, but one after it."""
    at = argv.index("--supervise")
    way = "-m" if os.getcwd() == sys.path[0] else "-Pm"  # may it import from where the user stands?
    words = ["--supervised", *(["--started-again"] if again else [])]
    return [sys.executable, way, "elastic", *argv[:at], *words, *argv[at + 1 :]]


def _how(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}"
        if code < 0
        else f"ended with exit code {code}"
    )
