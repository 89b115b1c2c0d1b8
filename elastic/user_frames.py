"""An error as its user sees it: the frames of the user's own files, and the line of the error."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from elastic.text import LOG_MARK, n_of
from elastic.version import PACKAGE

OURS = f"{PACKAGE}{os.sep}"
STDLIB, INSTALLED = (f"{sysconfig.get_paths()[kind]}{os.sep}" for kind in ("stdlib", "purelib"))
USER_SITE = f"{site.getusersitepackages()}{os.sep}"  # what `pip install --user` has installed
LIBRARIES = ("<", OURS, STDLIB, INSTALLED, USER_SITE)
# of what is installed, a model may be the user's, torch is not
BACKWARD, AUTOGRAD = "its backward pass", f"torch{os.sep}autograd{os.sep}graph.py"
COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}distributed_c10d.py"  # what programs call
# in which it gets what it sends, or what it fills
TENSORS = ("tensor", "input_tensor", "input", "output_tensor", "output")
STOOD = "_elastic_stood_at"
MACHINERY = ("<", f"{OURS}worker{os.sep}", f"{INSTALLED}torch{os.sep}")


def raised_at(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of the user's own files; where none is on the way, of a library's that
    runs models, and else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    for others in (LIBRARIES, MACHINERY):
        if own := [frame for frame in frames if not frame.filename.startswith(others)]:
            return own[-1]
    return frames[-1] if frames else None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, that of its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def told(error: BaseException) -> str:
    """An error of the user's code in one line, with its place there."""
    place = raised_at(error)
    at = f" ({os.path.basename(place.filename)}:{place.lineno})" if place else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}{at}"


def user_line() -> str:
    """Where the user's own files are now: the innermost of them, and its line; '' = nowhere."""
    for frame in outwards(sys._getframe(1)):
        if not frame.f_code.co_filename.startswith(LIBRARIES):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def place_among(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Where a program is, by frames and lines from the innermost one outwards: in a file that is
    neither torch's nor ours, or else in a backward pass; '' = in neither. With the collective that
    it is in, and how large that is: what ranks do at one line may be another on each."""
    backward = collective = ""
    for frame, line in frames:
        file = frame.f_code.co_filename
        if file.endswith(COLLECTIVES):
            collective = f" ({frame.f_code.co_name}{_size(frame.f_locals)})"
        if file.endswith(AUTOGRAD):
            backward = BACKWARD
        python = file.startswith(STDLIB) and not file.startswith(INSTALLED)
        if not python and not file.startswith(("<", OURS, MACHINERY[-1])):
            return f"{file}, line {line}{collective}"
    return backward and backward + collective


def _size(given: Mapping[str, Any]) -> str:
    """Of what a collective is called with."""
    tensor = next((given[name] for name in TENSORS if hasattr(given.get(name), "numel")), None)
    return "" if tensor is None else f" of {n_of(tensor.numel(), 'number')}"


def stood_at(error: BaseException) -> str:
    """Where a program was when this was raised, as `place_among`."""
    frames, trace = list[tuple[FrameType, int]](), error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return str(getattr(error, STOOD, "")) or place_among(reversed(frames))


def without_frames(error: BaseException) -> BaseException:
    """It holds nothing any more but where its program was."""
    setattr(error, STOOD, stood_at(error))
    return error.with_traceback(None)


def user_traceback(error: BaseException) -> str:
    """The traceback without what is not the user's; the whole one where none of it is."""
    told = traceback.TracebackException.from_exception(error)
    if not _cut(told):
        return _whole(error)
    left = [told]
    while left:
        one = left.pop()
        for further in (one.__cause__, one.__context__):
            if further is not None:
                if not _cut(further):
                    further.stack = None  # type: ignore[assignment]  # its line alone is shown
                left.append(further)
    return "".join(told.format())


def log_text(error: BaseException) -> str:
    """For the log of a process: what its user sees, and the whole traceback behind it, which
    stays in the log."""
    told, whole = user_traceback(error), _whole(error)
    if told == whole:
        return told
    return told + "".join(f"{LOG_MARK}{line}\n" for line in whole.splitlines())


def _whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _cut(told: traceback.TracebackException) -> bool:
    """Leaves the user's frames. False: there are none, and nothing was changed."""
    own = [frame for frame in told.stack if not frame.filename.startswith(LIBRARIES)]
    if own:
        told.stack = traceback.StackSummary.from_list(own)
    return bool(own)


# --------------------------------------------------------------------- in the user's own process

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_told: set[type[BaseException]] = set()


@contextmanager
def plainly(*kinds: type[BaseException]) -> Iterator[None]:
    """Around what users call: where nobody catches an error of these kinds that this package has
    raised, the process ends with the user's frames. A hook that is neither Python's nor Ray's
    stays."""
    try:
        yield
    except kinds:
        _told.update(kinds)
        hook = sys.excepthook
        if hook is sys.__excepthook__ or str(hook.__module__).startswith("ray."):
            sys.excepthook = _uncaught(hook)
        raise


def _uncaught(before: Hook) -> Hook:
    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = traceback.extract_tb(trace)
        if issubclass(kind, tuple(_told)) and frames and frames[-1].filename.startswith(OURS):
            print(user_traceback(error), end="", file=sys.stderr)
        else:
            before(kind, error, trace)

    return told
