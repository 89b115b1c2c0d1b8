"""Random operations on DTensors: who draws is settled when a generation is entered.

torch settles it at the first such operation on CUDA, with a broadcast over the default group.
Workers that only send, and those that have settled it in an earlier generation, would not take part
in that, and the others would wait for them.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

# Private: what torch itself sets, see tests/worker/parallel/test_dtensor_random.py.
from torch.distributed.tensor import _random


def settle_random(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Without a collective: each step seeds its ranks (worker.step.optimizer_step.seed), those of
    one tp group equally. `device`: this rank's, which torch would take from its number."""
    if mesh is not None and mesh.device_type == "cuda":
        tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
        tracker._device = device
        _random._rng_tracker = tracker
