"""What is in a worker's memory when the next state is built: nothing of the generation before but what is held."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from elastic.worker.session import Session


class Left:
    """A generation with gradients, in a circle as a model and its hooks make them."""

    def __init__(self) -> None:
        self.gradients = torch.ones(3)
        self.hook = self.forward

    def forward(self) -> torch.Tensor:
        return self.gradients


def session(broken: Any, out_of_memory: bool = False) -> Session:
    made = Session.__new__(Session)
    made._broken, made._out_of_memory = broken, out_of_memory
    return made


@pytest.fixture
def no_collector() -> Any:
    """The garbage collector comes many generations later by itself."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_gradients_that_nobody_asks_for_any_more_are_gone() -> None:
    left = Left()
    gone = weakref.ref(left)
    made = session(left)
    del left
    made._forget_broken()
    assert gone() is None and made._broken is None


@pytest.mark.usefixtures("no_collector")
def test_what_the_frames_of_an_error_keep_is_gone() -> None:
    left = Left()
    gone = weakref.ref(left)
    del left
    assert gone() is not None, "no circle: this test shows nothing"
    made = session(None, out_of_memory=True)
    made._forget_broken()
    assert gone() is None and not made._out_of_memory


def test_the_peak_of_a_generation_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    session(None)._forget_broken()
    assert calls == ["empty", "reset"]


def test_a_lost_device_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", fails)
    session(None)._forget_broken()
