"""What a thread of a worker is doing, as the code that does it says: `with doing("copying"): ...`.

A driver asks it of a worker that makes no progress (stall_site.py), and decides by it over the life
of that worker. Without torch: the driver's side reads the words too.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Literal

# '' = not known; script: in a collective of all ranks that a script calls itself
Doing = Literal["", "own", "others", "script", "device", "batch", "compiling", "copying"]
# handoff: waits until the other of two threads hands over
Said = Literal["others", "device", "batch", "copying", "handoff"]
WAITING: tuple[Doing, ...] = ("others", "script", "device")  # in a collective
# of the work of a GPU: what it does now by itself, or with others, or nothing
Part = Literal["own", "others", "done"]
# beside the names of groups, then the kind of part: how many parts a GPU has done
DEVICE = "device:"
PATIENT: dict[Doing, str] = {
    "batch": "waits for its batch",
    "compiling": "compiles",
    "copying": "stores a copy",
}


@dataclass(frozen=True)
class InCollective:
    """Which collective a rank waits in: its kind, as torch calls it, and its group, as
    `Beat.arrived` names that."""

    kind: str
    axis: str
    first: int


# by thread, the innermost last, with the frame that said it
_said: dict[int, list[tuple[FrameType, Said]]] = {}


class doing(ContextDecorator):
    """This thread does `what` in the block, whatever it calls."""

    def __init__(self, what: Said) -> None:
        self.what = what

    def __enter__(self) -> None:
        _said.setdefault(threading.get_ident(), []).append((sys._getframe(1), self.what))

    def __exit__(self, *_: object) -> None:
        mine = _said[threading.get_ident()]
        mine.pop()
        if not mine:
            del _said[threading.get_ident()]


def said(thread: int) -> dict[FrameType, Said]:
    """By the thread of this identity: the frames in which it has said what it is doing. From any
    thread."""
    return dict(_said.get(thread, ()))


@contextmanager
def innermost_frames() -> Iterator[dict[int, FrameType]]:
    """Of each thread, by its identity; what called them is looked at in the block.

    No garbage is looked for meanwhile: Python 3.11 makes the frame object of a caller when it is
    asked for, and garbage that it finds while it does may let that thread run on, whose frame is
    gone then: a segmentation fault."""
    looked = gc.isenabled()
    gc.disable()
    try:
        yield sys._current_frames()
    finally:
        if looked:
            gc.enable()
