"""Buffers that a forward changes (running statistics, counters): what a step did to them that is
not applied is taken back, and each pass of a step finds them as the first one did, so that a step
of several passes leaves what one pass would leave.

Every rank does it for its own, in the same step, since all of them skip the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from elastic.errors import ProgramError

# a larger buffer is copied only where the forward of the first step has changed it
SMALL_BYTES = 1 << 20


class StepBuffers:
    """`tensors`: the buffers in the training state that are on this rank, `models`: its stages,
    which have them. A module without any costs nothing."""

    def __init__(self, tensors: Iterable[torch.Tensor], models: Iterable[nn.Module] = ()) -> None:
        self.watched = list(tensors)
        known = {tensor.data_ptr(): id(tensor) for tensor in self.watched if tensor.numel()}
        self._places: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._of_stage: list[set[int]] = []  # ids of the tensors that each stage has
        for model in models:
            places = [
                (module, name, buffer)
                for module in model.modules()
                for name, buffer in module._buffers.items()
                if buffer is not None and buffer.numel() and buffer.data_ptr() in known
            ]
            self._places += places
            self._of_stage.append({known[buffer.data_ptr()] for *_, buffer in places})
        self._versions: list[int] = []
        # the values from before the forward; those of it, where it was taken back
        self._others: list[torch.Tensor] = []
        self._noted = self._taken_back = self._looked = False

    @torch.no_grad()
    def note(self) -> None:
        """A forward is about to begin."""
        self.settle()
        if not self._others:
            self._others = [torch.empty_like(tensor) for tensor in self.watched]
        for other, tensor in zip(self._others, self.watched, strict=True):
            other.copy_(tensor)
        self._versions = [tensor._version for tensor in self.watched]
        self._noted, self._taken_back = True, False

    def again(self, stage: int = 0) -> None:
        """A forward of a step that has been noted is about to begin, through the `stage`-th of the
        models, and others may have been before."""
        self.settle()
        if not self._noted or self._taken_back or not self._of_stage:
            return
        mine = self._of_stage[stage]
        for i, tensor in enumerate(self.watched):
            if id(tensor) in mine and tensor._version != self._versions[i]:
                with torch.no_grad():
                    tensor.copy_(self._others[i])
                self._versions[i] = tensor._version

    def settle(self) -> None:
        """A buffer that a forward has put in the place of another (`self.n = self.n + 1`) is
        written into that one, which is in the training state."""
        for module, name, buffer in self._places:
            now = module._buffers.get(name)
            if now is None or now is buffer:
                continue
            if now.shape != buffer.shape:
                raise ProgramError(
                    f"forward gives the buffer {name} of {type(module).__name__} the shape "
                    f"{list(now.shape)}, it had {list(buffer.shape)}; a buffer that is moved and "
                    "stored keeps its shape"
                )
            with torch.no_grad():
                buffer.copy_(now)
            module._buffers[name] = buffer

    def keep(self) -> None:
        """The step is applied, with what its forward has done; also where that was taken back
        before."""
        self.settle()
        if self._taken_back:
            self._exchange()
        if self._noted and not self._looked:
            self._look()
        self._noted = self._taken_back = False

    def leave_out(self) -> None:
        """The step is skipped."""
        self.take_back()
        self._noted = self._taken_back = False

    def take_back(self) -> None:
        """The step was aborted; it may still be applied (`keep`). Of one that is applied nothing is
        taken back."""
        self.settle()
        if self._noted and not self._taken_back:
            self._exchange()
            self._taken_back = True

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor, other in zip(self.watched, self._others, strict=True):
            was = tensor.clone()
            tensor.copy_(other)
            other.copy_(was)

    def _look(self) -> None:
        """Large ones that stay as they are (masks, tables) are not copied any more; small ones may
        change now and then."""
        self._looked = True
        pairs = zip(self.watched, self._others, strict=True)
        self.watched = [
            now for now, was in pairs if now.nbytes <= SMALL_BYTES or not torch.equal(now, was)
        ]
        self._others = []
