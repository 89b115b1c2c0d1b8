"""The allocators, the C library's and CUDA's, set for a process that lives through many
generations."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
LARGE_BYTES = 4 << 20
KEEP_BYTES = 64 << 20


# Shards of one layout fit into the holes that those of another left; host memory is pinned by
# threads that also touch its pages: 6.3 GB/s where cudaHostAlloc took 1.7 to 2.1 (an H200, 13 GB).
CUDA_SETTING = (
    "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
)
# Pinned host memory: larger blocks are neither rounded up to a power of two nor kept by torch when
# they are freed. Buffers are used again by elastic.worker.state.host_copy, so that torch's own
# cache would only hold those of earlier shard sizes.
PINNED_SETTING = "pinned_max_cached_size_mb:64"
# the older name of the same
SETTINGS, OLD_SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def cuda_environment() -> dict[str, str]:
    """What should stand in the environment before CUDA memory is allocated."""
    return {
        SETTINGS: ",".join([CUDA_SETTING, *([PINNED_SETTING] if knows_pinned_setting() else [])])
    }


def knows_pinned_setting() -> bool:
    """Does the installed torch know PINNED_SETTING? A build for CUDA refuses a key that it does not
    know. Without importing it: by the header of its allocators' settings, which every wheel has."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    header = Path(found.origin).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    return header.is_file() and PINNED_SETTING.split("_mb")[0] in header.read_text()


def rounds_pinned() -> bool:
    """Does torch round pinned buffers up to a power of two bytes? It does unless one of its two
    limits for that is set."""
    settings = os.environ.get(SETTINGS, "") + os.environ.get(OLD_SETTINGS, "")
    return not any(
        key in settings for key in ("pinned_max_cached_size_mb", "pinned_max_round_threshold_mb")
    )


def settle_cuda_allocator() -> None:
    """For CUDA memory that is not yet allocated; a setting of the user's own stays."""
    if OLD_SETTINGS not in os.environ:
        for name, value in cuda_environment().items():
            os.environ.setdefault(name, value)


def settle_allocator() -> bool:
    """Blocks of 4 MiB and more go back to the system when they are freed. False: this C library has
    no `mallopt`.

    glibc raises its threshold for separate mappings to the largest block freed so far, at most 32
    MiB. Then shards, gathered layers and copies of all sizes share one heap, which gets holes: at 1
    GB of state over four CPU workers a process grew from 2.8 to 6.5 GB within a hundred steps; with
    a fixed threshold it stays at 2.3. Any fixed value turns the raising off.
    """
    mallopt = _of_libc("mallopt")
    return (
        mallopt is not None
        and bool(mallopt(M_MMAP_THRESHOLD, LARGE_BYTES))
        and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
    )


def trim() -> bool:
    """Free pages in the middle of the heaps go back to the system too. Takes some ten milliseconds,
    without Python's lock."""
    malloc_trim = _of_libc("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0))


def _of_libc(name: str) -> Any:
    """The C library's function; None where it has no such one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
