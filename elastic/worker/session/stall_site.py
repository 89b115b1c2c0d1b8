"""Where a worker that makes no progress has stalled: what its threads are doing, and in which
line."""

from __future__ import annotations

import os
import re
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from types import FrameType
from typing import Any, Literal

import torch

from elastic.user_frames import COLLECTIVES, outwards, place_among
from elastic.version import PACKAGE
from elastic.worker.process.doing import Doing, Said, innermost_frames, said

HERE = f"{PACKAGE}{os.sep}"
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
FRAMES_MOST = 200
AROUND = "/torch/distributed/c10d_logger.py"
MESSAGE = re.compile("send|recv")  # one rank sends what the other receives


def stall_site(threads: Iterable[threading.Thread]) -> tuple[Doing, str]:
    """What the first of the threads that is at work does, and in which line: of the program, where
    it is in one. A thread that has handed over to another (a script's) is not at work."""
    with innermost_frames() as frames:
        for thread in threads:
            frame = frames.get(thread.ident or 0)
            if frame is not None and (found := _site(frame, said(thread.ident or 0))) is not None:
                return found
    return "", ""


def waits_in(threads: Iterable[threading.Thread]) -> tuple[str, Any] | None:
    """The collective that the first of the threads waits in that is in one: as torch calls it, and
    its group (None = of all). Not a message from one rank to another."""
    with innermost_frames() as frames:
        for thread in threads:
            call: FrameType | None = None
            for frame in _outwards(frames.get(thread.ident or 0)):
                file = frame.f_code.co_filename
                if file.endswith(COLLECTIVES):
                    call = frame
                elif call is not None and not file.endswith(AROUND):
                    break
            if call is not None and not MESSAGE.search(call.f_code.co_name):
                return call.f_code.co_name, call.f_locals.get("group")
    return None


def _site(innermost: FrameType | None, said_in: dict[FrameType, Said]) -> tuple[Doing, str] | None:
    """None: it waits for its turn. From the innermost frame outwards: torch's own files say whether
    they wait for other ranks or compile; ours count for what was said around them, else for work of
    this rank, as a program's do; Python's own files say nothing."""
    ours = ""
    for frame in _outwards(innermost):
        file = frame.f_code.co_filename
        line = f"{os.path.basename(file)}:{frame.f_lineno} in {frame.f_code.co_name}"
        if (what := said_in.get(frame)) is not None:
            return None if what == "handoff" else (what, ours or line)
        if file.startswith(HERE):
            ours = ours or line
        elif (found := _outside(file)) is not None:
            if found == "others" and not ours and (called := _called_at(frame)):
                return "script", called
            if found == "others" and not ours:
                return found, place_among((f, f.f_lineno) for f in _outwards(frame)) or line
            return ("own", ours) if ours else (found, line)
    return ("own", ours) if ours else ("", "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    return islice(outwards(frame), FRAMES_MOST)


def _called_at(collective: FrameType) -> str:
    """The line of a program that calls this collective of all ranks itself; '' = torch or we do, or
    it is one of some ranks."""
    call: FrameType | None = None
    for frame in _outwards(collective):
        file = frame.f_code.co_filename
        if file.endswith(COLLECTIVES):
            call = frame
        elif not file.endswith(AROUND) and not file.startswith((STANDARD, "<")):
            if call is None or file.startswith(HERE) or "/torch/" in file:
                return ""
            if call.f_locals.get("group") not in (None, torch.distributed.group.WORLD):
                return ""
            return f"{file}, line {frame.f_lineno} ({call.f_code.co_name})"
    return ""


def _outside(file: str) -> Literal["own", "others", "compiling"] | None:
    """What a frame in a file that is not ours says."""
    if "/torch/" in file:
        if "/torch/distributed/" in file:
            return "others"
        return "compiling" if "/torch/_dynamo/" in file or "/torch/_inductor/" in file else None
    in_python = file.startswith(STANDARD) and "site-packages" not in file
    return None if in_python or file.startswith("<") else "own"
