"""Buffers that a forward changes (running statistics, counters): what a step did to them that is
not applied is taken back.

Every rank does it for its own, in the same step, since all of them skip the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# a larger buffer is copied only where the forward of the first step has changed it
SMALL_BYTES = 1 << 20


class StepBuffers:
    """`tensors`: the buffers in the training state that are on this rank. A module without any
    costs nothing."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.watched = list(tensors)
        # the values from before the forward; those of it, where it was taken back
        self._others: list[torch.Tensor] = []
        self._noted = self._taken_back = self._looked = False

    @torch.no_grad()
    def note(self) -> None:
        """A forward is about to begin."""
        if not self._others:
            self._others = [torch.empty_like(tensor) for tensor in self.watched]
        for other, tensor in zip(self._others, self.watched, strict=True):
            other.copy_(tensor)
        self._noted, self._taken_back = True, False

    def keep(self) -> None:
        """The step is applied, with what its forward has done; also where that was taken back
        before."""
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
