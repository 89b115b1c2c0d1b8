"""What a drill lets a worker's device do: compute slowly, stall, silently corrupt results, fail;
and what it lets layouts do. For trials only.

The hooks on the model's blocks (elastic/worker/step/block_timing.py) ask for it in each pass, so
that what is timed, compared and waited for is what a device that is really slow, stuck or broken
would show.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace

import torch

# of the work of a pass there and back (the backward pass has two products for each of the forward
# pass)
FORWARD = 1 / 3
WRONG = 1.0 + 2.0**-6  # what the elements of a wrong result are multiplied by
PLACES = ("forward", "backward", "optimizer", "host_copy", "move")  # where a device can fail
MADE_UP = "CUDA error: uncorrectable ECC error encountered (made up by a drill)"
OTHER = 1.5  # what a block's output is multiplied by in a layout that computes something else


@dataclass(frozen=True)
class Slowness:
    """A pass takes `factor` times as long; with `unit_s` > 0 a sample takes unit_s x factor seconds
    at least through one block, there and back. `jitter`: up to this part more or less, drawn anew
    for each step."""

    factor: float = 1.0
    unit_s: float = 0.0
    jitter: float = 0.0

    @property
    def on(self) -> bool:
        return self.factor != 1.0 or self.unit_s > 0

    def missing_s(self, took_s: float, rows: int, part: float) -> float:
        """What is missing of a pass that has taken `took_s` and is this part of the way there and
        back."""
        least_s = rows * self.unit_s * part if self.unit_s > 0 else took_s
        return max(0.0, least_s * self.factor - took_s)


@dataclass
class DeviceFaults:
    """What is the matter with this worker's device; changed by `inject_fault` from any thread,
    asked for by the training thread.

    `layout`: not the device, but layouts: one that has several ranks on an axis on which the one
    before had one computes something else than the model, from now on; `other`: that of the
    generation that is here does."""

    slowness: Slowness = Slowness()
    wrong: bool = False
    layout: bool = False
    other: bool = False
    lost: bool = False  # the device has failed: it does in every place from then on
    _fails_in: str = ""
    _stall: bool = False
    _end: threading.Event = field(default_factory=threading.Event)
    _chance: random.Random = field(default_factory=random.Random)
    _now: Slowness = Slowness()

    def inject_fault(
        self,
        kind: str,
        factor: float = 1.0,
        unit_s: float = 0.0,
        *,
        jitter: float = 0.0,
        place: str = "forward",
    ) -> None:
        """`slow`, `stall`, `corrupt` or `device_error` (in this one of PLACES), as in a drill;
        `layout` is its wrong_layout. Raises ValueError for another kind or place."""
        match kind:
            case "slow":
                self.slowness = self._now = Slowness(factor, unit_s, jitter)
            case "stall":
                self._stall = True
            case "corrupt":
                self.wrong = True
            case "device_error" if place in PLACES:
                self._fails_in = place
            case "layout":
                self.layout = True
            case _:
                what = f"{kind}' in '{place}" if kind == "device_error" else kind
                raise ValueError(
                    "a device can be slow, stall, corrupt or fail, or layouts be wrong: not "
                    f"'{what}'"
                )

    def check(self, place: str) -> None:
        """Raises the made-up AcceleratorError where the device fails in this place, or has
        failed."""
        if self.lost or self._fails_in == place:
            self.lost = True
            raise torch.AcceleratorError(MADE_UP)

    def next_step(self) -> None:
        slow = self.slowness
        drawn = 1 + self._chance.uniform(-slow.jitter, slow.jitter) if slow.jitter else 1.0
        self._now = replace(slow, factor=slow.factor * drawn)

    @property
    def slow(self) -> Slowness:
        """Of this step."""
        return self._now

    def stand(self) -> None:
        """In a forward pass: for ever, where it is stalled; an error, where it has failed."""
        self.check("forward")
        while self._stall:
            self._end.wait(60.0)

    def corrupted(self, output: torch.Tensor) -> torch.Tensor:
        """What a device that silently corrupts its results makes of a result."""
        return output * WRONG if self.wrong and output.is_floating_point() else output

    @property
    def alters(self) -> bool:
        """Is what a block gives another thing than it should be?"""
        return self.wrong or self.other or self._fails_in == "backward"

    def altered(self, output: torch.Tensor) -> torch.Tensor:
        """What becomes of what a block gives."""
        if self._fails_in == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: self.check("backward"))
        found = self.corrupted(output)
        return found * OTHER if self.other and output.is_floating_point() else found

    @staticmethod
    def wait(seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)
