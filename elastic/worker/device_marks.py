"""How far a GPU has come in what its host has given it: marks between parts of the work, counted when it has passed them.

Hosts run ahead of their GPUs, and collectives are counted when they are enqueued: where one GPU hangs in a kernel, all hosts
wait at the same line with the same counts. The GPUs that wait for it have passed more marks than it has.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import torch

AHEAD = 512  # marks that are not yet known to be passed, before the training thread looks itself


class DeviceMarks:
    """`mark` on the training thread, `passed` on any. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._lock = threading.Lock()
        self._ahead: deque[torch.cuda.Event] = deque()
        self._free: list[torch.cuda.Event] = []
        self._n = 0

    def mark(self) -> None:
        """Behind what this thread has enqueued on its stream."""
        if not self._on:
            return
        with self._lock:
            if len(self._ahead) >= AHEAD:
                self._look()
            event = self._free.pop() if self._free else torch.cuda.Event()
            event.record()
            self._ahead.append(event)

    def passed(self) -> int:
        """How many marks the device has passed, without waiting for it."""
        with self._lock, suppress(RuntimeError):  # of a device that is lost
            self._look()
        return self._n

    def _look(self) -> None:
        while self._ahead and self._ahead[0].query():
            self._free.append(self._ahead.popleft())
            self._n += 1
