"""Hardware without the catalog, so that a run's own planning needs neither pydantic nor YAML: what
layouts are compared on where nothing is known, and a CPU that several processes share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from elastic.types import HardwareProfile


def among(gpu: HardwareProfile, n_processes: int) -> HardwareProfile:
    """A CPU on which so many processes compute at once, as `elastic profile` has measured it:
    between two measured numbers of them what all do together is interpolated, beyond the last one
    it stays. GPUs do not share a machine's cores: theirs is left out."""
    if not gpu.crowded_passes:
        return gpu
    if gpu.accelerator_type != "CPU":
        return replace(gpu, crowded_passes=())
    passes, alone = _shared(gpu.crowded_passes, n_processes), _shared(gpu.crowded_passes, 1)
    moved = _shared(gpu.crowded_bytes, n_processes) if gpu.crowded_bytes else gpu.memory_bytes_per_s
    return replace(
        gpu, crowded_passes=((1, alone), (n_processes, passes)), memory_bytes_per_s=moved
    )


def _shared(table: tuple[tuple[int, float], ...], n: int) -> float:
    """Of each of n processes."""
    every = [(k, k * each) for k, each in sorted(table)]
    if n <= every[0][0]:
        return every[0][1] / every[0][0]
    for (few, one), (many, two) in pairwise(every):
        if n <= many:
            return (one + (two - one) * (n - few) / (many - few)) / n
    return every[-1][1] / n


# What ranks layouts where nothing is known of the hardware: an H100 node by NVIDIA's data sheet.
NOMINAL = HardwareProfile(
    accelerator_type="H100-80GB-SXM", arch="Hopper", peak_flop_per_s=9.89e14, memory_bytes=80 << 30,
    flop_per_s=(("bfloat16", 9.89e14), ("float16", 9.89e14), ("float32", 4.9e14), ("float8",
    1.979e15)), reached=0.8, units=132, memory_bytes_per_s=3.35e12, node_bytes_per_s=4.5e11,
    host_bytes_per_s=6.3e10, link_bytes_per_s=5e10,
)  # fmt: skip

# A process on a CPU that nobody has measured: a guess, and named as one.
GUESSED_CPU = HardwareProfile(
    "CPU", 3e10, 0, 1e9, (("float32", 3e10), ("bfloat16", 3e10), ("float16", 3e10)),
    reached=0.7, units=1, memory_bytes_per_s=5e9, node_bytes_per_s=1e9, host_bytes_per_s=5e9,
    link_hop_s=1e-4, node_hop_s=1e-4, launch_s=1e-5, arch="CPU", op_bytes_per_s=2e9,
)  # fmt: skip
