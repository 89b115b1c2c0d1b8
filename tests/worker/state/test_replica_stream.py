"""A rank's boxes on their way: paced, summed, given up cleanly."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
import torch
from support.waiting import is_waiting, until
from support.worker.wires import Gone, Lines, QueueWire

from elastic.worker.state.replica_stream import (
    CHUNK_BYTES,
    UNPACED_BYTES,
    RateLimit,
    receive_boxes,
    send_boxes,
)

N_BYTES = 3 * CHUNK_BYTES + 8


def source() -> torch.Tensor:
    return torch.arange(N_BYTES // 8, dtype=torch.int64).view(torch.uint8)


def receiving(
    lines: Lines, rank: int, into: torch.Tensor, answers: dict[int, str]
) -> threading.Thread:
    def run() -> None:
        answers[rank] = receive_boxes(into, QueueWire(lines, rank), 0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_every_byte_arrives_at_every_keeper() -> None:
    lines, answers, into = Lines(), {}, {r: torch.zeros(N_BYTES, dtype=torch.uint8) for r in (1, 2)}
    threads = [receiving(lines, r, into[r], answers) for r in into]
    assert send_boxes(
        source(), QueueWire(lines, 0), (1, 2), pace=RateLimit(), quit_now=threading.Event()
    )
    for thread in threads:
        thread.join(120)
    assert answers == {1: "", 2: ""}
    assert all(torch.equal(got, source()) for got in into.values())


def test_one_altered_byte_is_told_and_the_stream_still_ends() -> None:
    seen = []

    def alter(_: int, to: int, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.uint8:
            seen.append(to)
            if len(seen) == 2:
                tensor[17] ^= 1

    lines, answers = Lines(alter=alter), {}
    thread = receiving(lines, 1, torch.zeros(N_BYTES, dtype=torch.uint8), answers)
    assert send_boxes(
        source(), QueueWire(lines, 0), (1,), pace=RateLimit(), quit_now=threading.Event()
    )
    thread.join(120)
    assert (
        answers[1]
        == f"chunk 1 ({CHUNK_BYTES} bytes) from rank 0 arrived altered: its 64-bit sum differs"
    )
    assert lines.between(0, 1).empty()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_stream_that_is_given_up_ends_at_both_ends_after_the_same_chunk(after: int) -> None:
    quit_now, sent = threading.Event(), []

    def alter(_: int, __: int, tensor: torch.Tensor) -> None:
        sent.append(tensor.dtype == torch.uint8)
        if sum(sent) == after:
            quit_now.set()

    if not after:
        quit_now.set()
    lines, answers = Lines(alter=alter), {}
    thread = receiving(lines, 1, torch.zeros(N_BYTES, dtype=torch.uint8), answers)
    assert not send_boxes(source(), QueueWire(lines, 0), (1,), pace=RateLimit(), quit_now=quit_now)
    thread.join(120)
    assert answers == {1: f"rank 0 gave up after {after} chunks"}
    assert lines.between(0, 1).empty(), "nothing is left to be mistaken for the next copy"


def test_a_peer_that_is_gone_raises_at_both_ends() -> None:
    lines = Lines()
    lines.broken.set()
    with pytest.raises(Gone):
        send_boxes(
            source(), QueueWire(lines, 0), (1,), pace=RateLimit(), quit_now=threading.Event()
        )
    with pytest.raises(Gone):
        receive_boxes(torch.zeros(8, dtype=torch.uint8), QueueWire(lines, 1), 0)


class Clock(threading.Event):
    """Time passes while it is waited for, and at no other time."""

    now_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now_s += timeout
        return False


def paced_s(bytes_per_s: float, n_bytes: int) -> float:
    clock = Clock()
    pace = RateLimit(bytes_per_s, clock, lambda: clock.now_s)
    for _ in range(n_bytes // CHUNK_BYTES):
        pace.wait(CHUNK_BYTES)
    return clock.now_s


def test_pace_keeps_to_the_rate_after_a_first_burst() -> None:
    n_bytes = UNPACED_BYTES + 10 * CHUNK_BYTES
    assert paced_s(CHUNK_BYTES * 25, n_bytes) == pytest.approx(0.4)
    assert paced_s(CHUNK_BYTES * 25, UNPACED_BYTES) == 0.0, "a small state goes at once"
    assert paced_s(0.0, n_bytes) == 0.0


def test_an_idle_time_gives_no_more_than_the_first_burst() -> None:
    clock, slept = [0.0], []
    pace = RateLimit(1e6, clock=lambda: clock[0])
    pace.hurry = SimpleNamespace(wait=slept.append)  # type: ignore[assignment]
    pace.wait(CHUNK_BYTES)
    clock[0] += 3600.0
    for _ in range(UNPACED_BYTES // CHUNK_BYTES):
        pace.wait(CHUNK_BYTES)
    assert slept == []
    pace.wait(CHUNK_BYTES)
    assert slept == [pytest.approx(CHUNK_BYTES / 1e6)]


def test_no_pace_while_somebody_waits() -> None:
    pace = RateLimit(1.0)  # months
    sender = threading.Thread(
        target=lambda: [pace.wait(CHUNK_BYTES) for _ in range(20)], daemon=True
    )
    sender.start()
    until(lambda: is_waiting(sender) or not sender.is_alive(), "its wait")
    assert sender.is_alive()
    pace.hurry.set()
    sender.join(120)
    assert not sender.is_alive()


def test_what_is_sent_while_the_other_end_comes_into_being_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the wires that these tests run over: sender and receiver ask for their queue at once."""
    lines, plain, got = Lines(), queue.Queue._init, torch.zeros(1)

    def init(mine: queue.Queue[torch.Tensor], maxsize: int) -> None:
        plain(mine, maxsize)
        monkeypatch.setattr(queue.Queue, "_init", plain)
        QueueWire(lines, 0).send([torch.ones(1)], 1)

    monkeypatch.setattr(queue.Queue, "_init", init)
    lines.between(0, 1)
    assert not lines.between(0, 1).empty(), "it waits in a queue that nobody reads"
    QueueWire(lines, 1).receive(got, 0)
    assert got == 1
