"""Where a thread stands: what a worker that does not get on is at. Without torch: the driver's side reads the words too."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Literal

Doing = Literal["", "own", "others", "device", "batch", "compiling", "copying"]  # '' = not known
Part = Literal["own", "others", "done"]  # of the work of a GPU: what it does now by itself, or with others, or nothing
DEVICE = "device:"  # beside the names of groups, then the kind of part: how many parts a GPU has done
PATIENT: dict[Doing, str] = {"batch": "waits for its batch", "compiling": "compiles", "copying": "stores a copy"}

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
COPYING = ("saving", "host_copy", "copies", "copy_stream", "durable")  # modules of elastic/worker, by how their names begin
READING = "readback.py"  # where the host waits for the device
FRAMES_MOST = 200


def standing(threads: Iterable[threading.Thread]) -> tuple[Doing, str]:
    """What the first of the threads that is at work does, and in which line: of the program, where it is in one. A thread that
    has handed over to another (a script's) is not at work."""
    frames = sys._current_frames()
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and (found := _of(frame)) is not None:
            return found
    return "", ""


def _of(frame: FrameType | None) -> tuple[Doing, str] | None:
    """None: it waits for its turn. Python's own files and torch's tell nothing but for those that wait or compile."""
    for _ in range(FRAMES_MOST):
        if frame is None:
            break
        file = frame.f_code.co_filename
        doing = _by_file(file)
        if doing == "turn":
            return None
        if doing is not None:
            return doing, f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "", ""


def _by_file(file: str) -> Literal["turn"] | Doing | None:
    if "/torch/" in file:
        if "/torch/distributed/" in file:
            return "others"
        return "compiling" if "/torch/_dynamo/" in file or "/torch/_inductor/" in file else None
    if file.startswith(HERE):
        package, _, module = file[len(HERE) :].rpartition(os.sep)
        if package == "worker" and module == "turns.py":
            return "turn"
        if package == "worker" and module == "control.py":
            return "others"
        if package == "worker" and module == READING:
            return "device"
        if package == "data":
            return "batch"
        return "copying" if package == "worker" and module.startswith(COPYING) else "own"
    in_python = file.startswith(STANDARD) and "site-packages" not in file
    return None if in_python or file.startswith("<") else "own"
