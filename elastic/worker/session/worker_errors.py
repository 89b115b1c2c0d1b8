"""What an error in a worker is: of which kind, and in which words it is reported.

A CUDA error is *sticky* when every later call of the process returns it too: the context is gone,
and this process can read nothing on that GPU any more. Such an error is the device's, kind
`device`. Three CUDA errors are not: out of memory; a call that the runtime refused (wrong
arguments, no kernel for this GPU), which is the program's and leaves the context as it was; and a
device-side assert (an index out of range in a kernel), which is the program's too, though the
context is gone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from elastic.config.masking import masked_text
from elastic.errors import (
    ElasticError,
    InternalError,
    PeerGarbled,
    ProgramError,
    SpecError,
    StateLost,
    StorageFailed,
)
from elastic.types import FailureKind
from elastic.user_frames import log_text, raised_at
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.session.layout_probe import LayoutDiffers
from elastic.worker.step.faulty_rank import Tripped

# torch adds lines of advice, which name other errors
CUDA_ERROR = re.compile(r"(?:CUDA|HIP)(?: driver)? error: ([^\n]*)")
ASSERT, MEMORY = "device-side assert", ("out of memory", "_STATUS_ALLOC_FAILED")
REFUSED_CALLS = (  # the words of cudaGetErrorString and torch
    "invalid argument", "invalid configuration argument", "invalid device function",
    "invalid device ordinal", "invalid resource handle", "no kernel image is available",
    "too many resources requested for launch", "operation not supported", "operation not permitted",
    "peer access", "when stream is capturing", "invalid pitch", "symbol not found",
    "driver version is insufficient", "no CUDA-capable device", "_STATUS_INVALID_VALUE",
    "_STATUS_NOT_SUPPORTED", "_STATUS_NOT_INITIALIZED", "_STATUS_ARCH_MISMATCH",
)  # fmt: skip


def cuda_error(error: BaseException) -> str:
    """What CUDA said, such as `unspecified launch failure`, where this error or one that it came of
    is CUDA's; else ''."""
    for one in _chain(error):
        known = isinstance(one, RuntimeError | InternalError) and not isinstance(
            one, dist.DistError
        )
        if known and (found := CUDA_ERROR.search(str(one))):
            return found.group(1).strip() or "unknown error"
        if isinstance(one, torch.AcceleratorError):
            return str(one).partition("\n")[0].strip() or "unknown error"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def is_assert(error: BaseException) -> bool:
    """A device-side assert?"""
    return ASSERT in cuda_error(error)


def device_lost(error: BaseException) -> bool:
    """Can this process use its GPU no more?"""
    said = cuda_error(error)
    return bool(said) and not any(words in said for words in (*MEMORY, *REFUSED_CALLS))


def kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    if said := cuda_error(error):
        memory = any(words in said for words in MEMORY)
        return (
            "out_of_memory"
            if memory
            else "device"
            if device_lost(error) and ASSERT not in said
            else "program"
        )
    if isinstance(error, StateLost | StorageFailed):
        return "infrastructure"
    if isinstance(error, Tripped):
        return "not_finite" if error.trip.guard == "not_finite" else "guard"
    if isinstance(error, LayoutDiffers):
        return "layout"
    if isinstance(error, ElasticError) and not isinstance(error, PeerGarbled):
        return "program"
    if is_collective_error(error):
        return "collective"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return "infrastructure"
    return "program"


def print_error(error: BaseException) -> None:
    """The traceback of an error of the program, to standard error, without secrets: the user's
    frames, and the whole of it for the log alone. What ours say in one line is all."""
    if kind_of(error) == "program" and (
        not isinstance(error, ElasticError) or error.__cause__ is not None
    ):
        print(masked_text(log_text(error)), end="", file=sys.stderr)


def text_of(error: BaseException) -> str:
    """One line with the innermost cause, and for errors of the program the place in the user's
    file."""
    if isinstance(error, StateLost | LayoutDiffers):
        return str(error)  # it names the file, its cause does not
    if kind_of(error) == "device":
        return f"CUDA error: {cuda_error(error)}"
    while error.__cause__ is not None:
        error = error.__cause__
    line = " ".join(f"{type(error).__name__}: {error}".split())
    # gloo: its source line, its advice
    line = re.sub(r"\[/\S+:\d+\] ", "", line).split(" This is typically caused by")[0]
    line = line[:600]
    if isinstance(error, SpecError | ProgramError | StateLost):
        return str(error)
    if is_collective_error(error):
        return line
    place = raised_at(error)
    return f"{line} (at {place.filename}:{place.lineno})" if place else line
