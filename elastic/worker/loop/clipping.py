"""torch's clipping of gradients in a loop's body: they are summed over ranks in `run.step()`, so
that before it there is nothing to clip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.nn import utils

from elastic.errors import ProgramError

NAMES = ("clip_grad_norm_", "clip_grad_value_")
PLACES: tuple[Any, ...] = (utils, utils.clip_grad)


@contextmanager
def refused() -> Iterator[None]:
    """Meanwhile clipping parameters of which none has a gradient, or those of `run.model`, raises
    ProgramError."""
    before = {name: getattr(utils, name) for name in NAMES}
    for place in PLACES:
        for name, clip in before.items():
            setattr(place, name, _checked(name, clip))
    try:
        yield
    finally:
        for place in PLACES:
            for name, clip in before.items():
                setattr(place, name, clip)


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
