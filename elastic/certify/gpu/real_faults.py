"""What a drill makes up of a device, done to the GPU itself."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.session.session import Session

BACK = "endless_back"  # a kernel of a backward pass
# of the GPU's clock: about a minute, longer than anything that is waited for here
ENDLESS_CYCLES = 120 * 10**9


class RealFaults(DeviceFaults):
    """Each is done once. On a CPU it is made up."""

    real = ""
    MADE_UP: ClassVar[dict[str, str]] = {
        "illegal": "device_error",
        "endless": "stall",
        BACK: "stall",
    }

    def inject_fault(self, kind: str, *arguments: Any, **more: Any) -> None:
        if torch.cuda.is_available() and kind in self.MADE_UP:
            self.real = kind
        else:
            super().inject_fault(self.MADE_UP.get(kind, kind), *arguments, **more)

    @property
    def alters(self) -> bool:
        return self.real == BACK or super().alters

    def altered(self, output: Any) -> Any:
        """A kernel of the block's backward pass: behind its gather and the mark there."""
        if self.real == BACK and output.grad_fn is not None:
            self.real = ""
            output.grad_fn.register_prehook(lambda gradients: _sleep())
        return super().altered(output)

    def stand(self) -> None:
        super().stand()
        if self.real == BACK:
            return
        kind, self.real = self.real, ""
        if kind == "endless":
            _sleep()
        elif kind:
            gone = torch.empty(1 << 20, device="cuda")
            gone.untyped_storage().resize_(0)  # a kernel that writes to it has no address
            gone.fill_(1.0)
            torch.cuda.synchronize()


def _sleep() -> None:
    torch.cuda._sleep(ENDLESS_CYCLES)


class RealFaultSession(Session):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._faults = RealFaults()
