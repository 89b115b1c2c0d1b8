"""How far a GPU has come in what its host has given it: marks between parts of the work, counted
when it has passed them.

Hosts run ahead of their GPUs, and collectives are counted when they are enqueued: where one GPU
hangs in a kernel, all hosts wait at the same line with the same counts. So a mark says what lies
before it: "others", work that needs other ranks too (before a block: its parameters are gathered,
what another stage sends has come), or "own", a block's work. The GPU that hangs stands before an
own one, those that wait for it before others. How many marks a GPU has passed says little of it:
ranks may have unequally many micro-batches.

Only where there is a GPU: on a CPU hooks return what they are given, and nothing is marked.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Any

import torch

from elastic.worker.process.doing import Part
from elastic.worker.program.calls import tensors_in

AHEAD = 512  # marks that are not yet known to be passed, before the training thread looks itself


class DeviceMarks:
    """`mark`, `entering` and `leaving` on the thread that enqueues (backward passes have one of
    their own), `passed` on any."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._lock = threading.Lock()
        self._ahead: deque[tuple[torch.cuda.Event, Part]] = deque()
        self._free: list[torch.cuda.Event] = []
        self._n = 0
        self._back: _Back | None = None  # of the block that is entered

    def mark(self, part: Part) -> None:
        """Behind what this thread has enqueued on its stream: a part of this kind."""
        if not self._on:
            return
        with self._lock:
            if len(self._ahead) >= AHEAD:
                self._look()
            event = self._free.pop() if self._free else torch.cuda.Event()
            event.record()
            self._ahead.append((event, part))

    def passed(self) -> tuple[int, Part]:
        """How many marks the device has passed, without waiting for it, and in what kind of part it
        is now."""
        with self._lock:
            with suppress(RuntimeError):  # of a device that is lost
                self._look()
            return self._n, self._ahead[0][1] if self._ahead else "done"

    def entering(self, args: Any) -> Any:
        """A block's arguments, behind FSDP2's own hook: its parameters are there. In the backward
        pass the gradient of the first argument that has one is the last thing that is the block's
        own, before that hook's sums over ranks begin."""
        self._back = None
        if not self._on:
            return args
        self.mark("others")
        if not (torch.is_grad_enabled() and isinstance(args, tuple)):
            return args
        at = next((i for i, one in enumerate(args) if _has_gradient(one)), None)
        if at is None:
            return args
        back = self._back = _Back(self)
        # a leaf would keep the hook
        given = args[at] if args[at].grad_fn is not None else args[at].view_as(args[at])
        given.register_hook(back.ends)
        return (*args[:at], given, *args[at + 1 :])

    def leaving(self, output: Any) -> None:
        """What a block gives. FSDP2 gathers for the backward pass in a hook of that tensor, which
        comes before those of the operation that made it."""
        self.mark("own")
        back, self._back = self._back, None
        if back is not None:
            made = next((one for one in tensors_in(output) if _has_gradient(one)), None)
            if made is not None and made.grad_fn is not None:
                made.grad_fn.register_prehook(back.begins)

    def _look(self) -> None:
        while self._ahead and self._ahead[0][0].query():
            self._free.append(self._ahead.popleft()[0])
            self._n += 1


def _has_gradient(one: Any) -> bool:
    return type(one) is torch.Tensor and one.requires_grad


class _Back:
    """The backward pass through a block once. Where its begin was not seen its end says nothing:
    the gather lies between."""

    def __init__(self, marks: DeviceMarks) -> None:
        self._marks, self._begun = marks, False

    def begins(self, gradients: Any) -> None:
        self._begun = True
        self._marks.mark("others")

    def ends(self, gradient: torch.Tensor) -> None:
        if self._begun:
            self._begun = False
            self._marks.mark("own")
