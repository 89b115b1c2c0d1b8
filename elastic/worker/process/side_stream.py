"""What threads beside the training thread need on CUDA: their current device, and streams of their
own. Elsewhere nothing.

CUDA's current device belongs to a thread, and is 0 in a new one: a stream that is made there
without a device lies on another GPU than the tensors, and an event recorded on it says nothing of
their copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, this CUDA device is the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run_on(device: torch.device, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for a thread whose current device is another one."""

    @functools.wraps(work)
    def there(*arguments: Any, **named: Any) -> Any:
        with on_device(device):
            return work(*arguments, **named)

    return there if device.type == "cuda" else work


def boundary(device: torch.device) -> torch.cuda.Event | None:
    """An event behind all work that the calling thread has given the device so far. None: not a
    CUDA device."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def waitable(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind the stream's work; a thread that waits for it sleeps instead of spinning."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class SideStream:
    """A stream of the lowest priority, made at its first use; that of the training's own is no
    higher."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def behind(self, event: torch.cuda.Event | None) -> Iterator[torch.cuda.Stream | None]:
        """Inside, work goes to this stream, behind the event. Gives the stream; None: not a CUDA
        device."""
        if self.device.type != "cuda":
            yield None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield self._stream
