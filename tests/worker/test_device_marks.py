"""How far a GPU has come, with made-up events: counted when they are passed, from any thread, and used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.types import Layout
from elastic.worker import device_marks
from elastic.worker.device_marks import DeviceMarks
from elastic.worker.generation import Generation
from elastic.worker.standing import DEVICE


class Device:
    """A GPU that has passed `n` of the events recorded on it; `made` events exist."""

    n = made = recorded = 0
    lost = False


class Event:
    def __init__(self) -> None:
        Device.made += 1
        self.number = 0

    def record(self) -> None:
        Device.recorded += 1
        self.number = Device.recorded

    def query(self) -> bool:
        if Device.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.number <= Device.n


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> DeviceMarks:
    for name, value in (("n", 0), ("made", 0), ("recorded", 0), ("lost", False)):
        monkeypatch.setattr(Device, name, value)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return DeviceMarks(torch.device("cuda", 0))


def test_what_is_enqueued_is_not_yet_passed(marks: DeviceMarks) -> None:
    for _ in range(5):
        marks.mark()
    assert marks.passed() == 0
    Device.n = 3
    assert marks.passed() == 3
    marks.mark()
    assert Device.made == 5, "an event that was passed is used again"
    Device.n = 6
    assert marks.passed() == 6


def test_a_lost_device_stays_where_it_was(marks: DeviceMarks) -> None:
    marks.mark()
    Device.n = 1
    assert marks.passed() == 1
    marks.mark()
    Device.lost = True
    assert marks.passed() == 1


def test_events_are_bounded_where_nobody_asks(marks: DeviceMarks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_marks, "AHEAD", 4)
    for n in range(50):
        marks.mark()
        Device.n = n
    assert Device.made <= 5
    assert marks.passed() == 49


def test_a_cpu_has_none() -> None:
    marks = DeviceMarks(torch.device("cpu"))
    marks.mark()
    assert marks.passed() == 0


def test_a_beat_tells_it_beside_the_collectives() -> None:
    """Among the ranks of the pipeline stage."""
    generation: Any = Generation.__new__(Generation)
    stepper = SimpleNamespace(at=SimpleNamespace(pp=1), spans=SimpleNamespace(marks=SimpleNamespace(passed=lambda: 7)))
    generation.plan = SimpleNamespace(layout=Layout(pp=2, dp_shard=2))
    generation.groups = SimpleNamespace(device=torch.device("cuda", 0), arrived=lambda: (("pp", 0, 4),))
    generation._built = None
    assert generation.arrived() == (("pp", 0, 4),)
    generation._built = stepper
    assert generation.arrived() == (("pp", 0, 4), (DEVICE, 2, 7))
