"""What a job's layouts run on: a GPU kind with elastic's own worker, in the job's precision."""

from __future__ import annotations

from elastic.planner.cost import default_hardware
from elastic.planner.cost.compute import ComputeTarget
from elastic.planner.cost.kernels import MEASURED, generation
from elastic.planner.cost.step_cost import Site
from elastic.types import HardwareProfile, Job


def site_of(job: Job, gpu: HardwareProfile, per_node: int, *, world: int = 0) -> Site:
    """`world`: workers of the layout, all of which compute on this machine's cores where the
    profile says what that costs."""
    dtype = "float8" if job.float8 else job.precision
    gpu = default_hardware.among(gpu, max(per_node, world))
    if gpu.crowded_passes:
        return Site(ComputeTarget(gpu, MEASURED, dtype), max(per_node, world))
    kernels = generation("fsdp2", gpu.arch, job.compile)
    return Site(ComputeTarget(gpu, kernels, dtype), per_node)


def rate(site: Site) -> float:
    """FLOP/s that products reach there."""
    gpu = site.chip.gpu
    return gpu.peak(site.chip.dtype) * (gpu.reached or 1.0) * site.kernels.matmul
