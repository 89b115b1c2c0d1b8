"""Named ranges of a step, for its profile: in the trace of torch.profiler, and as NVTX ranges for
Nsight where there is a GPU. Nobody pays for them while no profile is on.

A range whose name begins with an axis (`tp`, `pp`, `cp`, `commit`) waits for other ranks of that
axis; `data`, `copies` and `optimizer` are what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "elastic."
STEP, STAGE = "step", "stage"  # a whole step; a microbatch in a stage, which waits for nobody
Ranges = Callable[[str], AbstractContextManager[None]]

_NONE: AbstractContextManager[None] = nullcontext()
_recorder: list[Ranges] = []  # the newest counts: none while no profile is on


def axis_range(name: str) -> AbstractContextManager[None]:
    """`with axis_range("commit"): ...`"""
    return _recorder[-1](name) if _recorder else _NONE


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    with record_function(PREFIX + name):
        yield


@contextmanager
def _recorded_with_nvtx(name: str) -> Iterator[None]:
    with record_function(PREFIX + name):
        torch.cuda.nvtx.range_push(PREFIX + name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()


def record_ranges(device: torch.device) -> Callable[[], None]:
    """From now on ranges are recorded; until what is returned is called."""
    made: Ranges = _recorded_with_nvtx if device.type == "cuda" else _recorded

    def mine(name: str) -> AbstractContextManager[None]:
        return made(name)

    _recorder.append(mine)
    return lambda: _recorder.remove(mine)
