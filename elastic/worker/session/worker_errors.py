"""What an error in a worker is: of which kind, and in which words it is reported."""

from __future__ import annotations

import re
import sys

from elastic.config.masking import masked_text
from elastic.errors import (
    DataUnread,
    ElasticError,
    NodeMemoryFull,
    PeerGarbled,
    ProgramError,
    SpecError,
    StateLost,
    StorageDamaged,
    StorageFailed,
    StorageFull,
    StorageRefused,
)
from elastic.types import FailureKind
from elastic.user_frames import log_text, raised_at, user_traceback
from elastic.worker.process.call_log import MISMATCH
from elastic.worker.process.cuda_errors import ASSERT, cuda_error, device_lost, out_of_memory
from elastic.worker.process_groups.reach import PeersUnreached
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.session.loss_probe import LayoutDiffers
from elastic.worker.step.faulty_rank import Tripped


def kind_of(error: BaseException) -> FailureKind:
    if out_of_memory(error):
        return "out_of_memory"
    if said := cuda_error(error):
        return "device" if device_lost(error) and ASSERT not in said else "program"
    if isinstance(error, StateLost | StorageDamaged | StorageFull | NodeMemoryFull):
        return "infrastructure"
    if isinstance(error, StorageFailed):
        return "storage"
    if isinstance(error, StorageRefused):
        return "refused"
    if isinstance(error, DataUnread):
        return "unread"
    if isinstance(error, Tripped):
        return "not_finite" if error.trip.guard == "not_finite" else "guard"
    if isinstance(error, LayoutDiffers):
        return "layout"
    if isinstance(error, ElasticError) and not isinstance(error, PeerGarbled):
        return "program"
    if is_collective_error(error):
        return "mismatch" if MISMATCH in str(error).lower() else "collective"
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return "infrastructure"
    return "program"


FRAMES_MOST = 4000  # characters of a traceback that go to the driver, the last ones


def print_error(error: BaseException) -> str:
    """The traceback of an error of the program, to standard error, without secrets: the user's
    frames, and the whole of it for the log alone. What ours say in one line is all. Returns the
    user's frames, for a driver that this process's log is not at hand of; those of a script were
    printed where it raised."""
    if kind_of(error) != "program":
        return ""
    if isinstance(error, ElasticError) and error.__cause__ is None:
        return "\n".join(getattr(error, "__notes__", ()))[-FRAMES_MOST:]
    print(masked_text(log_text(error)), end="", file=sys.stderr)
    return masked_text(user_traceback(error))[-FRAMES_MOST:]


def text_of(error: BaseException) -> str:
    """One line with the innermost cause, and for errors of the program the place in the user's
    file."""
    if isinstance(error, StateLost | StorageFailed | StorageRefused | LayoutDiffers):
        return str(error)  # it names the file, its cause does not
    if isinstance(error, DataUnread):
        return masked_text(" ".join(str(error).split()))
    if kind_of(error) == "device":
        return f"CUDA error: {cuda_error(error)}"
    while error.__cause__ is not None:
        error = error.__cause__
    # before it is cut: nobody knows half a secret
    line = masked_text(" ".join(f"{type(error).__name__}: {error}".split()))
    # gloo: its source line, its advice
    line = re.sub(r"\[/\S+:\d+\] ", "", line).split(" This is typically caused by")[0]
    line = line[:600]
    if isinstance(error, SpecError | ProgramError | NodeMemoryFull | StateLost | PeersUnreached):
        return str(error)
    if is_collective_error(error):
        return line
    place = raised_at(error)
    return f"{line} (at {place.filename}:{place.lineno})" if place else line
