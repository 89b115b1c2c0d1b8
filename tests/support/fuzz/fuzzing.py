"""Runs a reader over many inputs and keeps what went wrong."""

from __future__ import annotations

import random
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from support.fuzz.target import Target

MOST_S = 5.0  # of CPU, for one input; a slow machine counts as fast
KEPT = 10


class Hang(BaseException):
    """No Exception: nobody on the way may take it for an error of the input."""


@dataclass
class Found:
    name: str
    n: int
    taken: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = (
            f"{self.name:15} {self.n:8,} inputs: {self.taken:,} read, {self.refused:,} refused, "
            f"{len(self.failures)} wrong"
        )
        each = f"{1000 * self.seconds / max(1, self.n):.2f} ms each, at most {self.slowest_s:.2f} s"
        return "\n".join([f"{text} ({each})", *self.failures[:KEPT]])


def fuzz(target: Target, n: int, seed: int = 0) -> Found:
    """Each input by the number of its own generator, so that one alone can be made again."""
    found, began_s = Found(target.name, n), time.monotonic()
    good = {one: target.read(one) for one in target.seeds}
    with bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about tensors without a storage of their own
        for number in range(n):
            source, data, accident = target.made(random.Random(f"{seed}/{target.name}/{number}"))
            one_s = time.process_time()
            problem = _problem(target, data, good[source] if accident else None, found)
            found.slowest_s = max(found.slowest_s, time.process_time() - one_s)
            if problem:
                found.failures.append(
                    f"  seed {seed}, number {number}: {problem}\n    input: {data[:200]!r}"
                )
    found.seconds = time.monotonic() - began_s
    return found


def _problem(target: Target, data: bytes, good: object, found: Found) -> str:
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        meant = target.read(data)
    except target.errors:
        found.refused += 1
        return ""
    except Hang:
        return f"took more than {MOST_S:.0f} s"
    except Exception:  # noqa: BLE001 - what is looked for
        return traceback.format_exc(limit=-3)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    found.taken += 1
    wrong = good is not None and target.kept is not None and not target.kept(meant, good)
    return "read as something else than was written" if wrong else ""


@contextmanager
def bounded() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)
