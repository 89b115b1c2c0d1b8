"""How long this rank computes by itself: the forward passes of its blocks, from when their
parameters are there until they are done, waiting for others left out (but for the collectives of tp
and cp inside a block, whose ranks stand in one node).

On a GPU they are timed by events on its stream, in the first steps of a generation and then in one
of EVERY, the same ones on all ranks; on a CPU by the processor time of the training thread, so that
other processes on the same cores do not look like slowness of this one. Under FSDP2 the hooks lie
between its own: parameters are gathered before the first and freed after the second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from elastic.program import Program
from elastic.worker.process.fault_injection import FORWARD, DeviceFaults
from elastic.worker.program.calls import tensors_in
from elastic.worker.program.model_profile import block_names
from elastic.worker.step.device_marks import DeviceMarks

Mark = float | torch.cuda.Event
# steps of a generation that are timed on a GPU: as many first ones, then every such
FIRST, EVERY = 8, 8


class BlockTiming:
    """Hooks on the blocks of these stages (on the whole modules where the program names no blocks,
    or those are elsewhere)."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        program: Program,
        device: torch.device,
        *,
        faults: DeviceFaults,
    ) -> None:
        self.device, self.faults = device, faults
        self.marks = DeviceMarks(device)
        self._began: Mark | None = None
        self._back: _Back | None = None  # of the pass under way, where it is to be slow
        self._wall = 0.0  # when the pass began
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []  # to be used again
        self._n_steps = 0  # begun
        self.timing = True  # in the step under way
        self._seconds = 0.0
        blocks = [m for model in models for m in _blocks(model, program)]
        self.n_blocks = len(blocks) or 1
        for module in blocks or models:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)

    def next_step(self) -> None:
        self._give_back()
        self._seconds, self._began = 0.0, None
        self.faults.next_step()
        self.timing = (
            self.device.type != "cuda" or self._n_steps < FIRST or self._n_steps % EVERY == 0
        )
        self._n_steps += 1

    def taken_s(self) -> float:
        """Seconds of the forward passes since `next_step`; 0 in steps that are not timed. The
        device is done with them where the step's numbers have been read, else it is waited for."""
        if self._timed and not self._timed[-1][1].query():
            self._timed[-1][1].synchronize()  # the last on its stream
        for begun, ended in self._timed:
            self._seconds += begun.elapsed_time(ended) / 1e3
        self._give_back()
        return self._seconds

    def _give_back(self) -> None:
        self._free += [event for pair in self._timed for event in pair]
        self._timed = []

    def _begin(self, module: nn.Module, args: Any) -> Any:
        args = self.marks.entering(args)
        self.faults.stand()
        slow, training = self.faults.slow.on, torch.is_grad_enabled()
        if not slow and not (self.timing and training):
            return args  # no training (of validation, or of a check), or a step that is not timed
        self._wall, self._began = time.perf_counter(), self._mark()
        self._back = None
        if not (slow and training):
            return args
        self._back = _Back(self.faults, _rows(args))
        return self._back.behind(args)

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.marks.leaving(output)
        began, self._began = self._began, None
        if began is not None:
            self._done(began, args, output)
        return _spoilt(output, self.faults) if self.faults.alters else None

    def _done(self, began: Mark, args: Any, output: Any) -> None:
        ended, took_s = self._mark(), 0.0
        if isinstance(began, float):
            took_s = float(ended) - began  # type: ignore[arg-type]
            self._seconds += took_s
        else:
            self._timed.append((began, ended))  # type: ignore[arg-type]
        if self.faults.slow.on:
            self._be_slow(_rows(args), took_s)
            if self._back is not None:
                self._back.before(output)

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.thread_time()
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _be_slow(self, rows: int, took_s: float) -> None:
        """`took_s`: what the pass has taken of a processor; the wait for one is part of what it had
        to take."""
        slow = self.faults.slow
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        wall_s = time.perf_counter() - self._wall
        self._seconds += slow.missing_s(took_s or wall_s, rows, FORWARD)
        self.faults.wait(slow.missing_s(wall_s, rows, FORWARD))


def _blocks(model: nn.Module, program: Program) -> Iterable[nn.Module]:
    found = (model.get_submodule(name) for name in block_names(model, program.blocks))
    # not those of other stages
    return [block for block in found if next(block.parameters(), None) is not None]


def _rows(args: Any) -> int:
    """Samples of a pass, by dim 0 of the block's first argument."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(args) if tensor.ndim), 1)


def _spoilt(output: Any, faults: DeviceFaults) -> Any:
    if isinstance(output, torch.Tensor):
        return faults.altered(output)
    if isinstance(output, tuple):
        return tuple(_spoilt(one, faults) for one in output)
    return output


class _Back:
    """One backward pass through a block that takes as long as on a slow device."""

    def __init__(self, faults: DeviceFaults, rows: int) -> None:
        self.faults, self.rows, self.began = faults, rows, 0.0

    def behind(self, args: Any) -> Any:
        """The block's arguments: the backward pass through the first that has one ends with
        `end`."""
        for i, one in enumerate(args):
            if isinstance(one, torch.Tensor) and one.requires_grad and one.is_floating_point():
                late = _Late.apply(one, self)  # type: ignore[no-untyped-call]
                return (*args[:i], late, *args[i + 1 :])
        return args

    def before(self, output: Any) -> None:
        """The backward pass begins at the block's output."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin)
                return

    def _begin(self, gradient: torch.Tensor) -> None:
        self.began = time.perf_counter()

    def end(self) -> None:
        self.faults.wait(
            self.faults.slow.missing_s(time.perf_counter() - self.began, self.rows, 1 - FORWARD)
        )


class _Late(torch.autograd.Function):
    """Gives its input back; its backward pass is the last of the block's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: _Back) -> torch.Tensor:
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.back.end()
        return gradient, None
