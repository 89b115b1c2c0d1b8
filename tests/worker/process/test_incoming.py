"""Batches reach a GPU ahead of their step, on a stream beside the training's, and their memory is
released behind it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.waiting import until
from support.worker.made_up_cuda import Cuda, make_up
from support.worker.worker_pool import WAIT_S

from elastic.data.budget import Microbatch
from elastic.data.loader import Loader
from elastic.worker.process.readback import Incoming

CUDA_1 = torch.device("cuda", 1)
CPU = torch.device("cpu")


@dataclass
class Tensor:
    """Of a batch: who did what with it, in the record of the made-up GPU."""

    cuda: Cuda
    name: str
    device: torch.device = CPU
    is_pinned: bool = False

    def pin_memory(self) -> Tensor:
        if not self.is_pinned:
            self.cuda.note("pin", -1, self.name)
        return Tensor(self.cuda, self.name, self.device, True)

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor:
        assert self.is_pinned and non_blocking, "the host would wait for the copy"
        self.cuda.note("copy", torch.cuda.current_stream(device).number, self.name)  # type: ignore[attr-defined]
        return Tensor(self.cuda, self.name, device)

    def record_stream(self, stream: Any) -> None:
        self.cuda.note("in use", stream.number, self.name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Streams are told by number: 0 is the training's, others count from 1."""
    cuda = make_up(monkeypatch)
    made = torch.cuda.Stream

    class Numbered(made):  # type: ignore[misc, valid-type]
        number, n = 0, 0

        def __init__(self, device: Any = None, priority: int = 0) -> None:
            super().__init__(device, priority)
            Numbered.n += 1
            self.number = Numbered.n

        def wait_event(self, event: Any) -> None:
            cuda.note("waits", self.number, event)

    current = torch.cuda.current_stream

    def current_stream(which: Any = None) -> Any:
        there = current(which)
        return there if isinstance(there, Numbered) else Numbered.__new__(Numbered)

    monkeypatch.setattr(torch.cuda, "Stream", Numbered)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return cuda


def batch(cuda: Cuda, name: str, is_pinned: bool = True) -> Any:
    return {"input": Tensor(cuda, name, is_pinned=is_pinned)}


def told(cuda: Cuda) -> list[tuple[str, int, Any]]:
    found = [
        (what, at, more)
        for what, at, _, more in cuda.seen
        if what in ("copy", "waits", "in use", "pin", "host waits")
    ]
    cuda.seen.clear()
    return found


def test_the_next_batch_is_copied_beside_the_step_and_waited_for_by_the_stream_that_uses_it(
    cuda: Cuda,
) -> None:
    incoming, first, second = Incoming(CUDA_1), batch(cuda, "first"), batch(cuda, "second")
    incoming.take(first)
    assert told(cuda) == [("copy", 0, "first")], "nobody has sent it ahead"
    incoming.send([second])
    copied = cuda.of("record")[0][2]
    assert told(cuda) == [("copy", 1, "second")], (
        "on the training's stream it would wait for the step"
    )
    there = incoming.take(second)
    assert told(cuda) == [("waits", 0, copied), ("in use", 0, "second")]
    assert there["input"].device == CUDA_1
    incoming.take(second)
    assert told(cuda) == [("copy", 0, "second")], (
        "what was sent is taken once: its memory is the step's"
    )


def test_batches_that_were_sent_for_nothing_are_let_go(cuda: Cuda) -> None:
    """Other shares begin: the loader has read the step anew."""
    incoming = Incoming(CUDA_1)
    incoming.send([batch(cuda, "old"), batch(cuda, "old")])
    again = batch(cuda, "again")
    told(cuda)
    incoming.take(again)
    incoming.send([])
    assert told(cuda) == [("copy", 0, "again")] and not incoming._sent


def test_micro_batches_find_their_own_copies(cuda: Cuda) -> None:
    incoming, parts = Incoming(CUDA_1), [batch(cuda, f"part {i}") for i in range(3)]
    incoming.send(parts)
    told(cuda)
    assert [incoming.take(part)["input"].name for part in parts] == ["part 0", "part 1", "part 2"]  # type: ignore[attr-defined]
    assert [what for what, *_ in told(cuda)] == ["waits", "in use"] * 3


def test_on_a_cpu_a_batch_is_used_as_it_is() -> None:
    incoming, one = Incoming(CPU), {"input": torch.arange(3)}
    incoming.send([one])
    assert not incoming._sent and incoming.take(one)["input"] is one["input"]


def test_batches_are_pinned_by_the_thread_that_reads_them() -> None:
    threads: list[str] = []

    def finish(read: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        threads.append(threading.current_thread().name)
        return {"pinned": read["x"]}

    loader = Loader(
        [{"x": i} for i in range(8)],
        lambda step: [Microbatch([2 * step, 2 * step + 1])],
        0,
        finish=finish,
    )
    until(lambda: bool(loader.ready(1)), "the next step", WAIT_S)
    assert loader.ready(1)[0]["pinned"].tolist() == [2, 3] and loader.ready(5) == []
    ahead = loader.ready(1)[0]
    loader.take(0)
    assert loader.take(1)[0][0] is ahead, "what was sent ahead is not found again"
    loader.close()
    assert set(threads) == {"elastic-loader"}
