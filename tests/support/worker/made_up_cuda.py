"""`torch.cuda` without a GPU: streams, events and the current device of each thread, with a record
of who did what where."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_here = threading.local()
NO_TENSORS: Any = SimpleNamespace(specs=(), optimizers=())  # the profile of a model without any


def current() -> int:
    """The current device of this thread; a new thread's is 0."""
    return int(getattr(_here, "device", 0))


def _index(device: Any) -> int:
    if device is None:
        return current()
    index = torch.device(device).index if not isinstance(device, int) else device
    return current() if index is None else index


@dataclass
class Cuda:
    """What was asked of it: (what, device, name of the thread, more)."""

    seen: list[tuple[str, int, str, Any]] = field(default_factory=list)

    def note(self, what: str, device: int, more: Any = None) -> None:
        self.seen.append((what, device, threading.current_thread().name, more))

    def of(self, what: str) -> list[tuple[int, str, Any]]:
        return [(device, thread, more) for name, device, thread, more in self.seen if name == what]


def make_up(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Replaces what the worker uses of torch.cuda."""
    cuda = Cuda()

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.device = _index(device)
            cuda.note("stream", self.device, priority)

        def wait_event(self, event: Any) -> None:
            cuda.note("stream waits", self.device, event)

        def synchronize(self) -> None:
            cuda.note("host waits", self.device, self)

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
            self.blocking, self.device = blocking, -1

        def record(self, stream: Any = None) -> None:
            self.device = stream.device if stream is not None else current()
            cuda.note("record", self.device, self)

        def synchronize(self) -> None:
            cuda.note("host waits", self.device, self)

    @contextmanager
    def device(which: Any) -> Iterator[None]:
        before, _here.device = current(), _index(which)
        try:
            yield
        finally:
            _here.device = before

    @contextmanager
    def stream(which: Any) -> Iterator[None]:
        before, _here.stream = getattr(_here, "stream", None), which
        try:
            with device(which.device):
                yield
        finally:
            _here.stream = before

    def current_stream(which: Any = None) -> Any:
        there = getattr(_here, "stream", None)
        if there is not None and there.device == _index(which):
            return there
        made = Stream.__new__(Stream)
        made.device = _index(which)
        return made

    for name, value in [
        ("Stream", Stream), ("Event", Event), ("device", device), ("stream", stream),
        ("current_stream", current_stream)
    ]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return cuda
