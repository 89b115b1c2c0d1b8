"""What is said of a GPU, by a made-up NVML."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.types import DeviceNoted, WorkerFailed, WorkerId
from elastic.worker.process.gpu_health import DeviceNotes, memory_holders

ME = WorkerId("a", 1)
CUDA = torch.device("cuda", 0)


class NotSupported(Exception):
    pass


class Nvml:
    """The names of pynvml that are requested, with the answers of one GPU."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1, "nvmlDeviceGetTemperature": 60,
            "nvmlDeviceGetTotalEccErrors": 0, "nvmlDeviceGetPcieReplayCounter": 3,
            "nvmlDeviceGetNvLinkErrorCounter": NotSupported, "nvmlDeviceGetRemappedRows": (0, 0, 0,
            0), **answers,
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
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0b1c")
    )
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
        (
            {"nvmlDeviceGetCurrentClocksEventReasons": 0x44},
            "clocks lowered by the power limit and the temperature (hardware)",
        ),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "clocks lowered by the power brake"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x5}, ""),
        ({"nvmlDeviceGetTemperature": 93}, "90 °C or more"),
        (
            {"nvmlDeviceGetTotalEccErrors": lambda kind, counter: 4 * kind},
            "4 uncorrected memory errors since this worker began",
        ),
        (
            {"nvmlDeviceGetPcieReplayCounter": 2500},
            "more than 1000 PCIe replays since this worker began",
        ),
        (
            {"nvmlDeviceGetRemappedRows": (5, 0, 1, 0)},
            "a row is to be remapped: the GPU must be reset",
        ),
        (
            {"nvmlDeviceGetTemperature": 86, "nvmlDeviceGetRemappedRows": (0, 2, 0, 1)},
            "85 °C or more; 2 rows of its memory remapped after errors that were not corrected; a "
            "row could not be remapped: the GPU must be replaced",
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
    assert said == [DeviceNoted(ME, "2 NVLink errors since this worker began")], (
        "replays and recoveries of one link"
    )


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


class Events(Nvml):
    """One with an event set: `xids` come one after the other, then nothing does."""

    def __init__(self, *xids: int) -> None:
        super().__init__()
        self.xids = list(xids)
        self.waits = 0

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: str) -> None:
        assert (handle, kinds, events) == ("handle", 0x8, "set")

    def nvmlEventSetWait_v2(self, events: str, wait_ms: int) -> SimpleNamespace:
        assert events == "set" and wait_ms > 0
        self.waits += 1
        if not self.xids:
            time.sleep(wait_ms / 1000)  # sleeps: as NVML does that has nothing to tell
            raise NotSupported("timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))


def test_a_critical_xid_is_noted_at_once_and_one_that_no_process_outlives_is_a_failed_device(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Events(31, 79, 79))
    said: list[Any] = []
    notes = DeviceNotes(ME, CUDA, said.append)
    notes.wait_for_xid(1)
    assert said == [DeviceNoted(ME, "Xid 31")], "a page fault of a process: CUDA tells that one"
    notes.wait_for_xid(1)
    notes.wait_for_xid(1)
    fallen = "Xid 79 (it has fallen off the bus)"
    assert said[1:] == [
        DeviceNoted(ME, f"Xid 31; {fallen}"),
        WorkerFailed(ME, 0, "device", "Xid 79: it has fallen off the bus"),
    ], "once"
    notes.wait_for_xid(1)
    assert len(said) == 3, "nothing has come"


def test_the_watch_waits_for_xids_between_its_looks_and_ends_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", events := Events(79))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0b1c")
    )
    told = threading.Event()
    said: list[Any] = []

    def report(event: Any) -> None:
        said.append(event)
        if isinstance(event, WorkerFailed):
            told.set()

    notes = DeviceNotes(ME, CUDA, report, every_s=600.0)
    assert told.wait(60), "long before the next look"
    notes.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "device-notes"]
    thread.join(60)
    assert not thread.is_alive() and events.waits >= 1


def test_a_driver_without_events_or_that_does_not_wait_is_watched_as_before(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, said = watched(nvml)
    assert notes._events is None and said == []
    unable = Events()
    unable.nvmlEventSetWait_v2 = lambda events, wait_ms: unable.missing  # type: ignore[method-assign,assignment]
    monkeypatch.setitem(sys.modules, "pynvml", unable)
    notes = DeviceNotes(ME, CUDA, said.append)
    notes.wait_for_xid(10_000)
    assert notes._events is None and said == [], "no endless loop"


def test_who_holds_memory_is_told_where_nvml_knows(nvml: Nvml) -> None:
    assert memory_holders(CUDA) == ()
    few = [
        SimpleNamespace(pid=7, usedGpuMemory=None),
        SimpleNamespace(pid=8, usedGpuMemory=72 << 30),
    ]
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = few
    assert (
        memory_holders(CUDA) == ((8, 72 << 30), (7, 0))
        and memory_holders(torch.device("cpu")) == ()
    )


def test_nothing_is_watched_without_the_package_or_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: pytest.fail("a thread was started")
    )
    monkeypatch.setitem(sys.modules, "pynvml", None)
    DeviceNotes(ME, CUDA, pytest.fail)
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    DeviceNotes(ME, torch.device("cpu"), pytest.fail)
    assert nvml.asked == []


@pytest.mark.parametrize(
    ("uuid", "known", "asked"),
    [
        ("0b1c", "GPU-0b1c", ["GPU-0b1c"]),
        ("0b1c", "MIG-0b1c", ["GPU-0b1c", "MIG-0b1c"]),
        ("MIG-0b1c", "MIG-0b1c", ["MIG-0b1c"]),
        ("0b1c", "", ["GPU-0b1c", "MIG-0b1c"]),
    ],
)
def test_a_part_of_a_gpu_is_found_too(
    uuid: str, known: str, asked: list[str], nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(name: str) -> str:
        nvml.asked.append(name)
        if name != known:
            raise NotSupported("Not Found")
        return "handle"

    nvml.nvmlDeviceGetHandleByUUID = handle  # type: ignore[method-assign]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )
    notes = DeviceNotes(ME, CUDA, pytest.fail)
    notes.close()
    assert nvml.asked == ["nvmlInit", *asked]
    assert hasattr(notes, "_handle") == bool(known)


def test_a_library_that_cannot_begin_is_no_reason_to_stop(nvml: Nvml) -> None:
    def raises() -> None:
        raise NotSupported("Driver Not Loaded")

    nvml.nvmlInit = raises  # type: ignore[method-assign]
    DeviceNotes(ME, CUDA, pytest.fail)


def test_the_thread_looks_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(nvmlDeviceGetTemperature=95)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1")
    )
    told, said = threading.Event(), []

    def hear(event: Any) -> None:
        said.append(event)
        told.set()

    notes = DeviceNotes(ME, CUDA, hear, every_s=0.01)
    assert told.wait(60)
    notes.close()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "device-notes"] or [
        threading.Thread()
    ]
    if thread.ident is not None:
        thread.join(60)
        assert not thread.is_alive()
    assert said == [DeviceNoted(ME, "95 °C or more")]
