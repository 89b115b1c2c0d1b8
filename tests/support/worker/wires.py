"""Ranks in threads of one process, and messages between them through queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


class Gone(RuntimeError):
    """What a process group raises when a peer is gone."""


@dataclass
class Lines:
    """All queues between the ranks. `alter(source, to, tensor)` may change what is delivered."""

    queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = field(default_factory=dict)
    broken: threading.Event = field(default_factory=threading.Event)
    alter: Callable[[int, int, torch.Tensor], None] = lambda source, to, tensor: None
    sent_bytes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    hold: threading.Event = field(default_factory=threading.Event)  # cleared: nothing is delivered

    def __post_init__(self) -> None:
        self.hold.set()

    def between(self, source: int, to: int) -> queue.Queue[torch.Tensor]:
        """The same queue for both ends, also where both ask for it at once: a `defaultdict` could
        give each its own."""
        return self.queues.setdefault((source, to), queue.Queue())


@dataclass(frozen=True)
class QueueWire:
    lines: Lines
    rank: int

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        for tensor in tensors:
            if self.lines.broken.is_set():
                raise Gone("connection closed by peer")
            copy = tensor.clone()
            self.lines.alter(self.rank, to, copy)
            self.lines.sent_bytes[self.rank] += copy.numel() * copy.element_size()
            self.lines.between(self.rank, to).put(copy)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        while True:
            if self.lines.broken.is_set():
                raise Gone("connection closed by peer")
            if not self.lines.hold.wait(0.02):
                continue
            try:
                tensor.copy_(self.lines.between(source, self.rank).get(timeout=0.02))
                return
            except queue.Empty:
                continue
