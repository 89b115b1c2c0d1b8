"""A random operation on a DTensor has no collective of its own: not all participants of a
generation come to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random

from elastic.worker.parallel import dtensor_random
from elastic.worker.parallel.dtensor_random import settle_random


class Handle:
    """Of a made-up device."""

    @staticmethod
    def get_rng_state(*_: Any) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    set_rng_state = current_device = staticmethod(lambda *_: 0)
    is_available = staticmethod(lambda: True)


def test_it_is_settled_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(*_: Any) -> None:
        raise AssertionError("a collective that not all participants come to")

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(_random, "_resolve_device", lambda device_mesh: torch.device("cuda", 0))
    monkeypatch.setattr(_random, "_get_device_handle", lambda kind: Handle)
    monkeypatch.setattr(_random, "_rng_tracker", None)
    mesh: Any = SimpleNamespace(device_type="cuda")
    mine = torch.device("cuda", 3)
    settle_random(mesh, mine)
    first = _random._rng_tracker
    assert isinstance(first, _random.OffsetBasedRNGTracker)
    assert first._device == mine, "not that of the rank's number"
    settle_random(mesh, mine)
    assert _random._rng_tracker is not first, "it belongs to a generation's mesh"


def test_a_cpu_and_a_rank_without_a_mesh_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_random, "_rng_tracker", None)
    mesh: Any = SimpleNamespace(device_type="cpu")
    settle_random(mesh, torch.device("cpu"))
    settle_random(None, torch.device("cpu"))
    assert dtensor_random._random._rng_tracker is None
