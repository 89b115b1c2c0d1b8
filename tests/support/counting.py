"""Work that is counted instead of timed: the same on any machine under any load."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container
from types import FrameType
from typing import Any


def operations(work: Callable[[], object]) -> int:
    """Python operations that the call takes, those of all that it calls included; what C does in
    one of them is one."""
    found = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def calls(work: Callable[[], object]) -> int:
    """Python functions that are entered: fewer, and counted faster."""
    return calls_by_name(work, of=("call",)).total()


def calls_by_name(
    work: Callable[[], object], of: Container[str] = ("call", "c_call")
) -> Counter[str]:
    """Of functions, Python's and C's, in this thread."""
    seen: Counter[str] = Counter()

    def count(frame: FrameType, event: str, what: Any) -> None:
        if event in of:
            seen[frame.f_code.co_qualname if event == "call" else what.__qualname__] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


def growth(
    work: Callable[[int], Callable[[], object]],
    few: int,
    many: int,
    counted: Callable[[Callable[[], object]], int] = operations,
) -> float:
    """How many times as much there is to do at `many` as at `few`, for each of them: 1 = it grows
    with their number."""
    return counted(work(many)) / counted(work(few)) / (many / few)
