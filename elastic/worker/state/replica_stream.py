"""One rank's boxes on their way to another rank's host memory: paced chunks, a 64-bit sum each, a
clean end at any chunk.

Before each chunk goes a header [word, sum]; word GOES = the chunk is in the message after it, QUITS
= the sender has given up, no more comes. So both ends agree on where a stream ended, and the group
can be used again or taken down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from elastic.worker.state.state_transfer import sum64

CHUNK_BYTES = 4 << 20
GOES, QUITS = 1, 2
UNPACED_BYTES = 8 << 20  # so much may go at once: small states are not slowed down


class Wire(Protocol):
    """Blocking messages between ranks; those of one pair stay in order. Both raise RuntimeError
    when the other end is gone."""

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None: ...
    def receive(self, tensor: torch.Tensor, source: int) -> None: ...


@dataclass(frozen=True)
class GroupWire:
    """Over a process group with a CPU backend. `tag`: tells the messages of one copy from those of
    another."""

    group: dist.ProcessGroup
    tag: int = 0

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        works = [
            dist.isend(tensor, group=self.group, group_dst=to, tag=self.tag) for tensor in tensors
        ]
        for work in works:
            if work is not None:
                work.wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        work = dist.irecv(tensor, group=self.group, group_src=source, tag=self.tag)
        if work is not None:
            work.wait()


@dataclass
class RateLimit:
    """At most `bytes_per_s` in the long run (0 = no limit), `UNPACED_BYTES` at once. `hurry` ends
    the pacing."""

    bytes_per_s: float = 0.0
    hurry: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    _credit_bytes: float = UNPACED_BYTES
    _at_s: float = -1.0

    def wait(self, n_bytes: int) -> None:
        """Before sending `n_bytes`: sleeps as long as they are too early."""
        if not self.bytes_per_s:
            return
        now_s = self.clock()
        passed_s = now_s - self._at_s if self._at_s >= 0 else 0.0
        self._credit_bytes = (
            min(UNPACED_BYTES, self._credit_bytes + passed_s * self.bytes_per_s) - n_bytes
        )
        self._at_s = now_s
        if self._credit_bytes < 0:
            self.hurry.wait(-self._credit_bytes / self.bytes_per_s)


def send_boxes(
    buffer: torch.Tensor,
    wire: Wire,
    to: Sequence[int],
    *,
    pace: RateLimit,
    quit_now: threading.Event,
) -> bool:
    """Sends the buffer (uint8, a multiple of 8 bytes) to each of `to`. False: it was given up on
    the way."""
    for chunk in buffer.split(CHUNK_BYTES):
        pace.wait(chunk.numel() * len(to))
        if quit_now.is_set():
            break
        header = torch.tensor([GOES, sum64(chunk)], dtype=torch.int64)
        for rank in to:
            wire.send((header, chunk), rank)
    else:
        return True
    for rank in to:
        wire.send((torch.tensor([QUITS, 0], dtype=torch.int64),), rank)
    return False


def receive_boxes(buffer: torch.Tensor, wire: Wire, source: int) -> str:
    """Fills the buffer. '' when all of it came and every sum is right, else why not; takes every
    chunk that was sent."""
    header = torch.zeros(2, dtype=torch.int64)
    wrong = ""
    for k, chunk in enumerate(buffer.split(CHUNK_BYTES)):
        wire.receive(header, source)
        if int(header[0]) != GOES:
            return wrong or f"rank {source} gave up after {k} chunks"
        wire.receive(chunk, source)
        if int(header[1]) != sum64(chunk) and not wrong:
            wrong = (
                f"chunk {k} ({chunk.numel()} bytes) from rank {source} arrived altered: its "
                "64-bit sum differs"
            )
    return wrong
