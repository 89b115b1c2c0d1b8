"""Between host and device: batches copied there without waiting, numbers read back together.

On CUDA the host waits for the device wherever it asks for a value (`.item()`, `bool()`, a mask as
an index) and in each copy from pageable memory. A step does so once, in `read`, when its gradients
are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from elastic.worker.process.doing import doing
from elastic.worker.process.side_stream import SideStream, boundary

Batch = dict[str, torch.Tensor]
Number = torch.Tensor | float


def to_device(batch: Mapping[str, torch.Tensor], device: torch.device) -> Batch:
    """The batch on the device; for CUDA through pinned memory, so that the host does not wait for
    the copies."""
    return {key: sent(x, device) for key, x in batch.items()}


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same of one tensor."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = _pinned(x)
    return x.to(device, non_blocking=True)


def pinned(batch: Mapping[str, torch.Tensor]) -> Batch:
    """In memory that a GPU can be copied to from; what is there already stays as it is."""
    return {key: _pinned(x) if x.device.type == "cpu" else x for key, x in batch.items()}


def _pinned(x: torch.Tensor) -> torch.Tensor:
    """As it is where no pinned memory is to be had, which HostMemory says: the host then waits for
    its copy."""
    try:
        return x.pin_memory()
    except RuntimeError:
        return x


class Incoming:
    """Batches on their way to a GPU, on a stream beside the training's: those of the next step are
    copied while the present one runs. On a CPU a batch is used as it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = SideStream(device)
        # as they were given, on the device, and since when
        self._sent: list[tuple[Batch, Batch, torch.cuda.Event | None]] = []

    def send(self, batches: Sequence[Batch]) -> None:
        """These come next; whatever was sent before and not taken is let go."""
        self._sent = []
        with self._side.behind(None) as stream:
            for batch in batches if stream is not None else ():
                self._sent.append((batch, to_device(batch, self.device), boundary(self.device)))

    def take(self, batch: Batch) -> Batch:
        """The batch on the device, for the current stream, which waits for the copy; the host does
        not."""
        for i, (given, there, copied) in enumerate(self._sent):
            if given is batch and copied is not None:
                del self._sent[i]
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                for x in there.values():
                    # its memory is the other stream's, which may not use it again before this one
                    # has
                    x.record_stream(stream)
                return there
        return to_device(batch, self.device)


def read(values: Iterable[Number]) -> list[list[float]]:
    """The elements of each value, in float64; a number that is on the host already is its own. The
    host waits once for each device that a tensor lies on: for all that was enqueued there, on the
    current stream, before."""
    values = list(values)
    found = [[] if isinstance(value, torch.Tensor) else [float(value)] for value in values]
    places: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.setdefault(value.device, []).append(i)
    for there in places.values():
        flat = [values[i].detach().double().flatten() for i in there]  # type: ignore[union-attr]
        with doing("device"):
            numbers = iter(torch.cat(flat).tolist())
        for i, part in zip(there, flat, strict=True):
            found[i] = [next(numbers) for _ in range(part.numel())]
    return found


def join_default_stream(value: Number) -> None:
    """What is enqueued on the default stream from now on comes after the work of this thread's
    stream on the device of `value`; the host waits for neither. Other threads use the default
    stream."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        torch.cuda.default_stream(value.device).wait_stream(torch.cuda.current_stream(value.device))


def square_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float64 [n]: the sum of squares of each tensor, on their device; 16-bit ones are added up in
    float32."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if any(tensor.dtype is torch.float64 for tensor in tensors):
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    else:
        norms = list(torch._foreach_norm(tensors, 2, torch.float32))
    return torch.stack(norms).double().square()
