"""Errors of a GPU's calls: which of them stay, and what a process that has met one may not do.

A CUDA error is *sticky* when every later call of the process returns it too: the context is gone,
and this process can read nothing on that GPU any more. Such an error is the device's. Three CUDA
errors are not: out of memory; a call that the runtime refused (wrong arguments, no kernel for this
GPU), which is the program's and leaves the context as it was; and a device-side assert (an index
out of range in a kernel), which is the program's too, though the context is gone.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator

import torch
import torch.distributed as dist

from elastic.errors import InternalError

# torch adds lines of advice, which name other errors
CUDA_ERROR = re.compile(r"(?:CUDA|HIP)(?: driver)? error: ([^\n]*)")
ASSERT, MEMORY = "device-side assert", ("out of memory", "_STATUS_ALLOC_FAILED")
# NCCL's last warning, in torch's error of the call that needed the memory
NCCL_MEMORY = re.compile(r"out of memory|Failed to CUDA (?:malloc|calloc)")
REFUSED_CALLS = (  # the words of cudaGetErrorString and torch
    "invalid argument", "invalid configuration argument", "invalid device function",
    "invalid device ordinal", "invalid resource handle", "no kernel image is available",
    "too many resources requested for launch", "operation not supported", "operation not permitted",
    "peer access", "when stream is capturing", "invalid pitch", "symbol not found",
    "driver version is insufficient", "no CUDA-capable device", "_STATUS_INVALID_VALUE",
    "_STATUS_NOT_SUPPORTED", "_STATUS_NOT_INITIALIZED", "_STATUS_ARCH_MISMATCH",
)  # fmt: skip


def cuda_error(error: BaseException) -> str:
    """What CUDA said, such as `unspecified launch failure`, where this error or one that it came of
    is CUDA's; else ''."""
    for one in _chain(error):
        known = isinstance(one, RuntimeError | InternalError)
        known = known and not isinstance(one, dist.DistError)
        if known and (found := CUDA_ERROR.search(str(one))):
            return found.group(1).strip() or "unknown error"
        if isinstance(one, torch.AcceleratorError):
            return str(one).partition("\n")[0].strip() or "unknown error"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def out_of_memory(error: BaseException) -> bool:
    """Memory gave out, here or on the GPU, also where NCCL says so, which takes its buffers beside
    torch's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if said := cuda_error(error):
        return any(words in said for words in MEMORY)
    return any(
        isinstance(one, dist.DistError) and NCCL_MEMORY.search(str(one)) for one in _chain(error)
    )


def of_device_or_memory(error: BaseException) -> bool:
    """CUDA's, or memory gave out: it says nothing of what was called."""
    return out_of_memory(error) or bool(cuda_error(error))


def is_assert(error: BaseException) -> bool:
    """A device-side assert?"""
    return ASSERT in cuda_error(error)


def device_lost(error: BaseException) -> bool:
    """Can this process use its GPU no more?"""
    said = cuda_error(error)
    return bool(said) and not any(words in said for words in (*MEMORY, *REFUSED_CALLS))


_held: list[torch.Tensor] = []  # to the end of this process


def hold_tensors() -> None:
    """Nothing that is a tensor now is freed any more. After a sticky error: torch's deleter of
    pinned memory asks the device about its copies, and what it raises there ends the process
    (std::terminate; seen on an H200 with torch 2.11), which is to serve what it holds in host
    memory."""
    _held.extend(x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))


def holds_lost(error: BaseException) -> bool:
    """`device_lost`, and then nothing is freed any more: for the thread that has met the error
    first, before it lets go of anything."""
    if lost := device_lost(error):
        hold_tensors()
    return lost


def let_go(buffers: list[torch.Tensor]) -> None:
    """Frees the memory of these, which are in host memory, without Python's lock: for what is
    pinned CUDA waits until no kernel is on the device, also for one that never ends, and whoever
    aborts that needs the lock. After a sticky error it stays."""
    while buffers and not _held:
        buffers.pop().set_()  # type: ignore[call-overload]
    buffers.clear()
