"""Ranks find each other: whoever does not know the secret stays outside, who does not come is
named."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import LostContact, SpecError
from elastic.types import Node, StopAsked, WorkerId
from elastic.worker.hosting.served_session import Said
from elastic.worker.process_groups.rendezvous import listening, proof
from elastic.worker.standalone import meeting
from elastic.worker.standalone.meeting import Meeting, RankHello, Started, gpu_here

SECRET = "5e" * 32


def joining(rank: int, port: int, joined: list[Any]) -> threading.Thread:
    """A rank of three that comes, and hears who it is."""

    def join() -> None:
        there = meeting._Address(port, 0, SECRET)
        with suppress(LostContact):  # rank 0 has given up
            joined.append(meeting._joined(Started(rank, 0, 3), there, time.monotonic() + 20.0))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def test_a_rank_0_that_accepts_and_says_nothing_is_not_waited_for_without_end() -> None:
    with listening("127.0.0.1") as listener:
        there = meeting._Address(listener.getsockname()[1], 0, SECRET)
        began_s = time.monotonic()
        with pytest.raises(LostContact, match="rank 0 does not answer at .*it does not answer"):
            meeting._joined(Started(1, 0, 2), there, began_s + 0.1)
        with contextlib.closing(meeting._connection(listener.accept()[0])) as made:
            same = socket.socket(fileno=os.dup(made.fileno()))
            with same:
                idle_s = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    assert idle_s == 30, "a host that is gone without a word is found"


def test_all_ranks_come_in_their_order_and_are_told_who_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever comes first."""
    joined: list[Any] = []
    threads: list[threading.Thread] = []
    welcomed = meeting._welcomed
    with listening("127.0.0.1") as listener:
        port = listener.getsockname()[1]

        def welcomes(*known: Any) -> RankHello | None:
            if len(threads) < 2:
                threads.append(joining(1, port, joined))
            return welcomed(*known)

        monkeypatch.setattr(meeting, "_welcomed", welcomes)
        threads.append(joining(2, port, joined))
        found = meeting._gathered(listener, SECRET, 3, until_s=time.monotonic() + 20.0)
    for i, (hello, link) in enumerate(found, 1):
        assert hello.rank == i
        link.send(Said(0, WorkerId("node-0", i)))
    for thread in threads:
        thread.join(20.0)
    links = {worker: link for link, worker in joined}
    found[1][1].send(Said(0, StopAsked("an order")))
    assert links[WorkerId("node-0", 2)].recv() == Said(0, StopAsked("an order"))
    assert not links[WorkerId("node-0", 1)].poll(0)


def test_the_address_of_a_rank_0_that_is_gone_is_asked_for_again() -> None:
    """A launcher that starts all ranks anew may keep its store."""
    with listening("127.0.0.1") as gone:
        stale = meeting._Address(gone.getsockname()[1], 0, SECRET)
    joined: list[Any] = []
    with listening("127.0.0.1") as listener:
        answers = [stale, stale, meeting._Address(listener.getsockname()[1], 0, SECRET)]
        until_s = time.monotonic() + 20.0
        thread = threading.Thread(
            target=lambda: joined.append(
                meeting._found(Started(1, 0, 2), lambda: answers.pop(0), until_s)
            ),
            daemon=True,
        )
        thread.start()
        ((hello, link),) = meeting._gathered(listener, SECRET, 2, until_s=until_s)
    link.send(Said(0, WorkerId("node-0", 1)))
    thread.join(20.0)
    assert (hello.rank, joined[0][1], answers) == (1, WorkerId("node-0", 1), [])


def test_a_rank_that_does_not_come_is_named() -> None:
    with listening("127.0.0.1") as listener:
        joining(1, listener.getsockname()[1], [])
        with pytest.raises(LostContact, match=r"of 3 ranks 1 did not come .* rank 2\)"):
            meeting._gathered(listener, SECRET, 3, until_s=time.monotonic() + 0.5)


@pytest.mark.parametrize("most", [64, 2])
def test_who_says_half_a_word_keeps_no_rank_and_no_limit_waiting(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also where as many are being heard as may be at once."""
    monkeypatch.setattr(meeting, "VISITORS_MOST", most)
    monkeypatch.setattr(meeting, "HELLO_MOST_S", 10.0 if most > 2 else 0.3)
    joined: list[Any] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1"))
        half, _ = (
            stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(2)
        )
        half.sendall(b"\0")
        began_s = time.monotonic()
        thread = joining(1, listener.getsockname()[1], joined)
        ((hello, link),) = meeting._gathered(listener, SECRET, 2, until_s=began_s + 20.0)
        assert hello.rank == 1 and time.monotonic() - began_s < 2.0
        link.send(Said(0, WorkerId("node-0", 1)))
        thread.join(20.0)
        assert joined[0][1] == WorkerId("node-0", 1)
        again = stack.enter_context(socket.create_connection(listener.getsockname()))
        again.sendall(b"\0")
        began_s = time.monotonic()
        with pytest.raises(LostContact, match=r"of 2 ranks 1 did not come .* rank 1\)"):
            meeting._gathered(listener, SECRET, 2, until_s=began_s + 0.5)
        assert time.monotonic() - began_s < 2.0


@pytest.mark.parametrize("said", [b"", b"x" * 40, b"x" * 5000])
def test_a_stranger_is_not_let_in(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep the others out."""
    monkeypatch.setattr(meeting, "HELLO_MOST_S", 0.2)
    listener = listening("127.0.0.1")
    with listener, socket.create_connection(listener.getsockname()) as stranger:
        link = meeting._connection(stranger)
        if said:
            link.send_bytes(said)
        mine = meeting._connection(listener.accept()[0])
        assert meeting._welcomed(mine, SECRET) is None


@pytest.mark.parametrize(
    "said", ["[]", "[" * 2000, '{"rank": 1}', '{"rank": 0, "node": "n", "host_bytes": 1}']
)
def test_a_rank_of_another_version_is_sent_away_in_words(
    said: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = Pipe()
    theirs.send_bytes(proof(SECRET, said) + said.encode())
    assert meeting._welcomed(mine, SECRET) is None
    assert "all ranks need the same version of elastic" in caplog.text


def test_nodes_are_the_launchers_and_ranks_are_counted_on_each() -> None:
    hellos = [RankHello(0, "b", 8), RankHello(1, "a", 7), RankHello(2, "b", 6)]
    nodes, workers = meeting._nodes(hellos)
    assert nodes == (
        Node("node-0", "ranks", 2, host_memory_bytes=6),
        Node("node-1", "ranks", 1, host_memory_bytes=7),
    )
    assert [str(worker) for worker in workers] == ["node-0/0", "node-1/0", "node-0/1"]
    many, _ = meeting._nodes([RankHello(i, str(i), 1) for i in range(11)])
    assert [node.node_id for node in many] == sorted(node.node_id for node in many)


def test_the_launchers_node_counts_before_the_hosts_name() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert Started.of({**given, "GROUP_RANK": "3"}).node == "3"
    assert Started.of({**given, "NODE_RANK": "4"}).node == "4"
    assert RankHello.of(Started.of(given)).node == socket.gethostname()


def gpu(monkeypatch: pytest.MonkeyPatch, uuid: str, **environment: str) -> str:
    made_up = SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: made_up)
    return gpu_here(torch.device("cuda", 0), environment)


def test_ranks_that_have_one_gpu_together_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL tells GPUs apart: by their id on one host, which NCCL_HOSTID may name."""
    host = socket.gethostname()
    first, second = gpu(monkeypatch, "1a"), gpu(monkeypatch, "2b")
    Meeting(Started(), WorkerId("node-0", 0), gpus=(first, second)).check_gpus()
    Meeting(Started(), WorkerId("node-0", 0), gpus=("", "")).check_gpus()
    apart = [gpu(monkeypatch, "1a", NCCL_HOSTID=name) for name in ("x", "y")]
    Meeting(Started(), WorkerId("node-0", 0), gpus=tuple(apart)).check_gpus()
    assert gpu(monkeypatch, "1a", NCCL_MULTI_RANK_GPU_ENABLE="1") == ""
    assert gpu_here(None, {}) == ""
    shared = (first, second, first, second, *apart, *apart)
    with pytest.raises(SpecError) as refused:
        Meeting(Started(), WorkerId("node-0", 0), gpus=shared).check_gpus()
    said = str(refused.value)
    assert said.startswith(
        f"ranks 0, 2 have GPU-1a of {host}; ranks 1, 3 have GPU-2b of {host}; 2 more GPUs likewise: "
        "NCCL takes one rank for each GPU; start as many ranks as a host has GPUs"
    )
    assert "\n" not in said


def test_rank_0_hears_which_gpu_each_rank_has() -> None:
    joined: list[Any] = []
    with listening("127.0.0.1") as listener:
        there = meeting._Address(listener.getsockname()[1], 0, SECRET)
        until_s = time.monotonic() + 20.0
        thread = threading.Thread(
            target=lambda: joined.append(
                meeting._found(Started(1, 0, 2), lambda: there, until_s, gpu="GPU-1a of h")
            ),
            daemon=True,
        )
        thread.start()
        ((hello, link),) = meeting._gathered(listener, SECRET, 2, until_s=until_s)
    link.send(Said(0, WorkerId("node-0", 1)))
    thread.join(20.0)
    assert (hello.gpu, joined[0][1]) == ("GPU-1a of h", WorkerId("node-0", 1))
