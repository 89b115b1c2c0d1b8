"""How much memory is free here, for processes and on a GPU, and what this process holds."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """What processes here can still take: the kernel's estimate, or less where a control group
    allows less. Files that it keeps in memory count as free, since it lets go of them."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no control group, or "max"
        most, used = (
            int((CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        stat = dict(
            line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines()
        )
        free = min(free, max(0, most - used + int(stat.get("inactive_file", 0))))
    return free


def resident_bytes(pid: int | str = "self") -> int:
    """Of a process, this one by default. Raises OSError where it has ended."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_used_bytes() -> int:
    """Of this process, or of the GPU that it trains on: torch's peak, or what is in use now where
    that is more, since NCCL and CUDA take theirs beside it."""
    if not torch.cuda.is_available():
        return resident_bytes()
    used = 0
    with suppress(RuntimeError):  # a GPU that others have filled, or that is lost
        free, whole = torch.cuda.mem_get_info()
        used = whole - free
    return max(torch.cuda.max_memory_allocated(), used)


def free_gpu_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0
