"""Threads beside the training thread use their own GPU, and sleep while they wait for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.worker.made_up_cuda import current, make_up

from elastic.types import Box, WorkerId
from elastic.worker.host_copy import Hands, HostCopies, HostMemory
from elastic.worker.side_stream import SideStream, run_on
from elastic.worker.workplace import Workplace

CUDA_1 = torch.device("cuda", 1)


def test_a_host_copy_is_made_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is cuda:0; the stream, and the event that stands for the copy, are on cuda:1."""
    cuda = make_up(monkeypatch)
    tensors = {"w": (Box("w", (0,), (4,), "float32"), torch.arange(4.0))}
    host = HostCopies(HostMemory(), tensors, frozenset(), device=CUDA_1)
    seen: list[tuple[int, int]] = []
    whole = host._copy

    def copy(*arguments: Any, **named: Any) -> None:
        seen.append((current(), torch.cuda.current_stream().device))  # type: ignore[arg-type]
        whole(*arguments, **named)

    monkeypatch.setattr(host, "_copy", copy)
    taken = host.take(3)
    assert taken is not None
    assert taken.wait()["w"][1].tolist() == [0, 1, 2, 3]
    host.settle()
    assert seen == [(1, 1)], "copied on another device"
    assert cuda.of("stream") == [(1, "host-copy", 0)]
    (first_device, first_thread, boundary), (device, thread, done) = cuda.of("record")
    assert (first_device, first_thread) == (1, threading.current_thread().name)
    assert (device, thread, done.blocking) == (1, "host-copy", True), "who waits for it would keep a core busy"
    waited = cuda.of("stream waits")
    assert [(d, event) for d, _, event in waited] == [(1, boundary), (1, done)], "behind the boundary; the optimizer behind it"
    assert cuda.of("host waits") == [(1, threading.current_thread().name, done)]


def test_threads_that_wait_for_work_have_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    seen, done = [], threading.Event()
    hands = Hands(1, "hand", CUDA_1)
    hands.do(lambda: seen.append(current()))
    hands.do(done.set)
    assert done.wait(60)
    hands.close()
    assert seen == [1]


def test_a_side_stream_is_on_its_device_whatever_the_threads_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = make_up(monkeypatch)
    side = SideStream(CUDA_1)
    for _ in range(2):
        with side.behind(None):
            assert current() == 1
    assert current() == 0 and [device for device, _, _ in cuda.of("stream")] == [1], "one stream, made once"


def test_work_behind_the_steps_runs_on_the_workers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        program: Any = SimpleNamespace(extra_state={})
        nothing: Any = None
        place = Workplace(
            WorkerId("n", 0), program, nothing, {}, nothing, nothing, nothing, CUDA_1, print, print, pool.submit
        )  # fmt: skip
        assert place.background(current).result() == 1
        assert pool.submit(current).result() == 0, "the thread is as it was"
    assert run_on(torch.device("cpu"), current) is current
