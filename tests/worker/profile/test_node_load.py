"""What a node tells of its load: /proc files and an NVML that are made up, and this machine's own
ones."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.types import Event, NodeLoadSeen
from elastic.worker.process.free_memory import resident_bytes
from elastic.worker.profile import node_load
from elastic.worker.profile.node_load import LoadReports


class Nvml:
    """Two GPUs, of which the second one tells no power and is hotter."""

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> int:
        return i

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:
        return SimpleNamespace(gpu=(40, 90)[gpu])

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return SimpleNamespace(used=10 + gpu, total=100)

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        if gpu == 1:
            raise RuntimeError("not supported")
        return 350_000

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        assert sensor == 0
        return (50, 71)[gpu]


def first(*, on_gpu: bool = False) -> NodeLoadSeen:
    told: SimpleQueue[Event] = SimpleQueue()
    reports = LoadReports("a", told.put, on_gpu=on_gpu, every_s=0.01)
    try:
        event = told.get(timeout=120)
    finally:
        reports.close()
    assert isinstance(event, NodeLoadSeen) and event.node_id == "a"
    return event


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> LoadReports:
    """Its thread does not run: the test looks itself."""
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    return LoadReports("a", lambda _: None, on_gpu=False)


def test_the_share_of_the_cores_is_that_since_the_report_before(
    still: LoadReports, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """user nice system idle iowait irq softirq steal guest: waiting for a disk is not busy, and a
    guest's time is the user's."""
    (tmp_path / "stat").write_text("cpu 100 0 0 900 0 0 0 0 50 0\ncpu0 1 1 1 1\n")
    (tmp_path / "meminfo").write_text("MemTotal:  16 kB\nMemFree: 1 kB\n")
    monkeypatch.setattr(node_load, "PROC", tmp_path)
    monkeypatch.setattr(node_load, "free_host_bytes", lambda: 4096)
    still.look()
    (tmp_path / "stat").write_text("cpu 120 5 5 950 15 3 1 1 60 0\n")
    seen = still.look()
    assert seen.cpu_share == pytest.approx(35 / 100)
    assert (seen.memory_free_bytes, seen.memory_size_bytes) == (4096, 16 * 1024)
    assert still.look().cpu_share == 0.0, "no tick has passed"


def test_gpus_are_told_together_and_what_is_not_known_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    seen = first(on_gpu=True)
    assert (seen.n_gpus, seen.gpu_share, seen.gpu_power_w) == (2, 0.65, 350.0)
    assert (seen.gpu_memory_bytes, seen.gpu_memory_size_bytes) == (21, 200)
    assert seen.gpu_celsius == 71.0
    without = first()
    assert without.n_gpus == 0 and without.gpu_share is without.gpu_power_w is None


def test_this_machine_tells_what_is_possible() -> None:
    seen = first()
    assert 0 <= seen.cpu_share <= 1
    assert 0 < seen.memory_free_bytes <= seen.memory_size_bytes
    assert 2**20 < seen.worker_bytes < 20 * resident_bytes()


def test_a_look_takes_a_ten_thousandth_of_a_core(still: LoadReports) -> None:
    still.look()
    began_s = time.thread_time()
    for _ in range(50):
        still.look()
    each_s = (time.thread_time() - began_s) / 50
    assert each_s / node_load.EVERY_S < 1e-4, f"{each_s} s each"


def test_many_nodes_tell_the_more_seldom_and_a_hidden_proc_ends_it_quietly(
    still: LoadReports,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(still._end, "wait", lambda s: waits.append(s) or True)
    for still.n_nodes in (1, 30, 512):
        still._watch()
    assert waits == [15.0, 15.0, 256.0]
    monkeypatch.setattr(node_load, "PROC", tmp_path / "hidden")
    still._watch()
    assert "the load of this node is not told" in caplog.text and len(waits) == 3
