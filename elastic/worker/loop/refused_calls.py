"""What a script must not call: torch's clipping of gradients in a loop's body, which are summed
over ranks in `run.step()`, so that before it there is nothing to clip; a GradScaler, by whose scale
nobody divides; and signal.signal, whose handlers belong to the process, of which the script is a
thread."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import utils

from elastic.errors import NoHandler, ProgramError
from elastic.user_frames import LIBRARIES

NAMES = ("clip_grad_norm_", "clip_grad_value_")
PLACES: tuple[Any, ...] = (utils, utils.clip_grad)


@contextmanager
def refused() -> Iterator[None]:
    """Meanwhile clipping parameters of which none has a gradient, or those of `run.model`, raises
    ProgramError, and so does a handler of a signal that the user's own files set, and what
    `unscaled` refuses."""
    before = {name: getattr(utils, name) for name in NAMES}
    own = signal.signal
    signal.signal = _checked_handler(own)  # type: ignore[assignment]
    for place in PLACES:
        for name, clip in before.items():
            setattr(place, name, _checked(name, clip))
    try:
        with unscaled():
            yield
    finally:
        signal.signal = own
        for place in PLACES:
            for name, clip in before.items():
                setattr(place, name, clip)


@contextmanager
def unscaled() -> Iterator[None]:
    """Meanwhile a loss that a GradScaler scales which is made meanwhile and not switched off raises
    ProgramError: in a worker too, where it may be on and off in the driver."""
    made, scale = GradScaler.__init__, GradScaler.scale
    GradScaler.__init__, GradScaler.scale = _noted(made), _checked_scale(scale)  # type: ignore[method-assign]
    try:
        yield
    finally:
        GradScaler.__init__, GradScaler.scale = made, scale  # type: ignore[method-assign]


def _checked(name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(clip)
    def checked(parameters: torch.Tensor | Iterable[torch.Tensor], *how: Any, **more: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        if given and all(one.is_meta for one in given):  # those of run.model in the trial
            raise ProgramError(
                f"{name} clips the gradients of this rank alone: those of all ranks are summed in "
                "run.step(); write run.step(clip_grad_norm=1.0) or the job's clip_grad_norm"
            )
        if all(one.grad is None for one in given):
            raise ProgramError(
                f"{name} finds no gradient, and so clips nothing: those of all ranks are summed in "
                "run.step(); write run.step(clip_grad_norm=1.0) or the job's clip_grad_norm"
            )
        return clip(given, *how, **more)

    return checked


def _noted(own: Callable[..., None]) -> Callable[..., None]:
    """Where there is no GPU it switches itself off: what it was asked for counts."""

    @wraps(own)
    def made(self: Any, *given: Any, **named: Any) -> None:
        own(self, *given, **named)
        asked = inspect.signature(own).bind(self, *given, **named)
        asked.apply_defaults()
        self._elastic_scales = asked.arguments["enabled"]

    return made


def _checked_scale(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def scale(self: Any, outputs: Any) -> Any:
        if getattr(self, "_elastic_scales", False):
            raise ProgramError(
                "GradScaler.scale multiplies the loss by what nobody divides by: run.step() does "
                "not know the scaler; leave it out, precision='bfloat16' needs none"
            )
        return own(self, outputs)

    return scale


def _checked_handler(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @wraps(own)
    def checked(signalnum: Any, handler: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
            return own(signalnum, handler)
        raise NoHandler(
            f"signal.signal({getattr(signalnum, 'name', signalnum)}, ...) works in no worker: the "
            "script is a thread of the process; leave the handler out: at a notice, a stop, "
            "SIGTERM or Ctrl-C elastic saves by itself"
        )

    return checked
