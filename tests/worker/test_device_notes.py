"""What is said of a GPU, by a made-up NVML."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.types import DeviceNoted, WorkerId
from elastic.worker.device_notes import DeviceNotes

ME = WorkerId("a", 1)
CUDA = torch.device("cuda", 0)


class NotSupported(Exception):
    pass


class Nvml:
    """The names of pynvml that are asked for, with the answers of one GPU."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1, "nvmlDeviceGetTemperature": 60, "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetPcieReplayCounter": 3, "nvmlDeviceGetNvLinkErrorCounter": NotSupported,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            **answers,
        }  # fmt: skip
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.asked.append("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("answers", {}):
            raise AttributeError(name)
        answer = self.answers[name]

        def ask(handle: str, *arguments: int) -> Any:
            assert handle == "handle"
            if answer is NotSupported:
                raise NotSupported
            return answer(*arguments) if callable(answer) else answer

        return ask


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0b1c"))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # the test looks itself
    return found


def watched(nvml: Nvml) -> tuple[DeviceNotes, list[DeviceNoted]]:
    said: list[Any] = []
    notes = DeviceNotes(ME, CUDA, said.append)
    notes.look()
    return notes, said


def test_of_a_healthy_gpu_nothing_is_said(nvml: Nvml) -> None:
    notes, said = watched(nvml)
    notes.look()
    assert said == []
    assert nvml.asked == ["nvmlInit", "GPU-0b1c"]


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x44}, "clocks lowered by the power limit and the temperature (hardware)"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "clocks lowered by the power brake"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x5}, ""),
        ({"nvmlDeviceGetTemperature": 93}, "90 °C or more"),
        (
            {"nvmlDeviceGetTotalEccErrors": lambda kind, counter: 4 * kind},
            "4 uncorrected memory errors since this worker began",
        ),
        ({"nvmlDeviceGetPcieReplayCounter": 2500}, "more than 1000 PCIe replays since this worker began"),
        ({"nvmlDeviceGetRemappedRows": (5, 0, 1, 0)}, "a row is to be remapped: the GPU must be reset"),
        (
            {"nvmlDeviceGetTemperature": 86, "nvmlDeviceGetRemappedRows": (0, 2, 0, 1)},
            "85 °C or more; 2 rows of its memory remapped after errors that were not corrected; a row could not be remapped: "
            "the GPU must be replaced",
        ),
    ],
)
def test_what_is_said(nvml: Nvml, answers: dict[str, Any], sentence: str) -> None:
    notes, said = watched(nvml)
    nvml.answers |= answers
    notes.look()
    notes.look()
    assert said == ([DeviceNoted(ME, sentence)] if sentence else []), "once"


def test_link_errors_count_from_the_first_look_on(nvml: Nvml) -> None:
    nvml.answers["nvmlDeviceGetNvLinkErrorCounter"] = lambda link, counter: 100
    notes, said = watched(nvml)
    assert said == []
    nvml.answers["nvmlDeviceGetNvLinkErrorCounter"] = lambda link, counter: 100 + (link == 3)
    notes.look()
    assert said == [DeviceNoted(ME, "2 NVLink errors since this worker began")], "replays and recoveries of one link"


def test_when_it_is_over_that_is_said_too(nvml: Nvml) -> None:
    notes, said = watched(nvml)
    nvml.answers["nvmlDeviceGetTemperature"] = 90
    notes.look()
    nvml.answers["nvmlDeviceGetTemperature"] = 70
    notes.look()
    assert [event.note for event in said] == ["90 °C or more", ""]


def test_what_this_driver_does_not_tell_is_left_out(nvml: Nvml) -> None:
    """Older packages know the reasons by another name."""
    nvml.answers = {name: NotSupported for name in nvml.answers if "Clocks" not in name}
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x8
    _, said = watched(nvml)
    assert said == [DeviceNoted(ME, "clocks lowered by a hardware slowdown")]


def test_nothing_is_watched_without_the_package_or_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    DeviceNotes(ME, CUDA, pytest.fail)
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    DeviceNotes(ME, torch.device("cpu"), pytest.fail)
    assert nvml.asked == []


def test_a_library_that_cannot_begin_is_no_reason_to_stop(nvml: Nvml) -> None:
    def raises() -> None:
        raise NotSupported("Driver Not Loaded")

    nvml.nvmlInit = raises  # type: ignore[method-assign]
    DeviceNotes(ME, CUDA, pytest.fail)


def test_the_thread_looks_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(nvmlDeviceGetTemperature=95)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    told, said = threading.Event(), []

    def hear(event: Any) -> None:
        said.append(event)
        told.set()

    notes = DeviceNotes(ME, CUDA, hear, every_s=0.01)
    assert told.wait(60)
    notes.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "device-notes"] or [threading.Thread()]
    if thread.ident is not None:
        thread.join(60)
        assert not thread.is_alive()
    assert said == [DeviceNoted(ME, "95 °C or more")]
