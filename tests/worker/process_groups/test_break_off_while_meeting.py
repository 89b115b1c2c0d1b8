"""A generation that is aborted while its participants meet: whenever the order comes, nobody waits
for one that is gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.child import child
from support.waiting import until
from support.worker.ranks import meeting

from elastic.types import Layout
from elastic.worker.process_groups import groups, rendezvous
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import Transport, is_collective_error

# what a rank would wait for a peer that does not come; longer than the test may take
NEVER_S = 900.0
WITHIN_S = 120.0


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def met(of: Groups, store: dist.TCPStore, found: list[BaseException | None]) -> threading.Thread:
    """Joins as rank 0 of two, of which the other never comes."""

    def join() -> None:
        try:
            of.join(meeting(2, store.port, NEVER_S), 0)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    return thread


def left(thread: threading.Thread, found: list[BaseException | None], of: Groups) -> None:
    thread.join(WITHIN_S)
    assert not thread.is_alive(), "it still waits for the other one"
    of.close()
    assert len(found) == 1
    assert found[0] is not None
    assert is_collective_error(found[0]), found


@pytest.mark.parametrize(("place", "name"), [(rendezvous, "TCPStore"), (groups, "PrefixStore")])
def test_the_order_comes_between_two_connections(
    place: Any, name: str, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked at the sockets that there were; the wait begins on one that comes after."""
    of = Groups(1, Layout(dp_shard=2), torch.device("cpu"))
    real: Any = getattr(place, name)

    def first_the_order(*words: Any, **more: Any) -> Any:
        of.abort()
        return real(*words, **more)

    monkeypatch.setattr(place, name, first_the_order)
    found: list[BaseException | None] = []
    left(met(of, store, found), found, of)


def test_a_store_that_goes_while_it_is_connected_to_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does when a generation is aborted just then. torch asks on for twice its timeout and
    more: a worker that is still at it after 5 s is taken for dead."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        real: Any = rendezvous.TCPStore

        def first_it_goes(*words: Any, **more: Any) -> Any:
            server.close()
            return real(*words, **more)

        monkeypatch.setattr(rendezvous, "TCPStore", first_it_goes)
        monkeypatch.setattr(rendezvous, "TRY_S", rendezvous.TRY_S / 5)
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            rendezvous.connect_store(*server.getsockname(), lambda: False)
        assert time.monotonic() - began_s < 5.0


class Connecting(Transport):
    """Waits for a peer in the set-up of its messages until that is broken."""

    def __init__(self) -> None:
        self.waits, self.broken = threading.Event(), threading.Event()

    def warm_up(self, groups: Any) -> None:
        self.waits.set()
        assert self.broken.wait(WITHIN_S)
        raise dist.DistBackendError("NCCL communicator was not set up")

    def break_set_up(self, before: Any) -> None:
        self.broken.set()


@pytest.mark.parametrize("first", [False, True])
def test_the_order_comes_while_the_first_messages_are_connected(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or before that."""
    transport = Connecting()
    of = Groups(1, Layout(), torch.device("cpu"), transport=transport)
    monkeypatch.setattr(groups, "_forming", [1])
    found: list[BaseException | None] = []

    def connect() -> None:
        try:
            of.first_messages()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found.append(error)

    if first:
        of.abort()
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    if not first:
        assert transport.waits.wait(WITHIN_S)
        of.abort()
    left(thread, found, of)
    assert transport.waits.is_set() is not first


def test_the_order_comes_before_the_group_is_made(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Groups(1, Layout(dp_shard=2), torch.device("cpu"))
    real = of.transport.make
    shut_once = threading.Event()

    def first_the_order(*words: Any, **more: Any) -> Any:
        if not shut_once.is_set():
            shut_once.set()
            monkeypatch.setattr(of, "_shut_own", lambda: None)
            of.abort()
            # the look has found nothing, as one does that comes a moment before the connection
            monkeypatch.undo()
        return real(*words, **more)

    monkeypatch.setattr(of.transport, "make", first_the_order)
    found: list[BaseException | None] = []
    left(met(of, store, found), found, of)
    assert shut_once.is_set()


def test_the_order_comes_first_of_all(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What listens already is another generation's: nobody knocks there."""
    of = Groups(1, Layout(dp_shard=2), torch.device("cpu"))
    knocked: list[Any] = []
    monkeypatch.setattr(groups, "knock", lambda family, address, n: knocked.append(address))
    set_joining = of._joining.set

    def then_the_order() -> None:
        set_joining()
        of.abort()
        until(
            lambda: any(thread.name == "abort-join" for thread in threading.enumerate()), "its look"
        )
        time.sleep(5 * groups.LOOK_S)  # sleeps: it looks again and again

    monkeypatch.setattr(of._joining, "set", then_the_order)
    with socket.create_server(("127.0.0.1", 0)):
        found: list[BaseException | None] = []
        left(met(of, store, found), found, of)
    assert not knocked


def test_the_order_comes_while_it_waits(store: dist.TCPStore) -> None:
    of = Groups(1, Layout(dp_shard=2), torch.device("cpu"))
    found: list[BaseException | None] = []
    thread = met(of, store, found)
    until(of._joining.is_set, "its way to the meeting")
    of.abort()
    left(thread, found, of)


# Rank 1 of two, in a fork per line of standard input: it dies when it has said where it listens,
# before it comes to anyone.
DIES = """
import os, sys
from datetime import timedelta
import torch.distributed as dist

class Last(dist.Store):
    def __init__(self, tcp):
        super().__init__()
        self.tcp = tcp
    def set(self, key, value):
        self.tcp.set(key, value)
        if "cpu//" in key:
            os._exit(0)
    def get(self, key):
        return self.tcp.get(key)
    def wait(self, keys, timeout=None):
        self.tcp.wait(keys)
    def add(self, key, n):
        return self.tcp.add(key, n)

print("ready", flush=True)
for line in sys.stdin:
    fork = os.fork()
    if fork == 0:
        tcp = dist.TCPStore("127.0.0.1", int(line), is_master=False, wait_for_workers=False)
        last = Last(dist.PrefixStore("generation-1", tcp))
        dist.init_process_group("gloo", store=last, rank=1, world_size=2, timeout=timedelta(seconds=60))
        os._exit(1)  # it has met the other one
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
"""


@pytest.fixture
def dies() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DIES]
    with child(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


@pytest.mark.e2e
def test_a_peer_dies_between_its_address_and_its_connection(dies: subprocess.Popen[str]) -> None:
    """Which of two comes to the other follows from their addresses: in several trials both do."""
    assert dies.stdin is not None and dies.stdout is not None
    for _ in range(8):
        server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        of = Groups(1, Layout(dp_shard=2), torch.device("cpu"))
        found: list[BaseException | None] = []
        thread = met(of, server, found)
        dies.stdin.write(f"{server.port}\n")
        assert dies.stdout.readline() == "0\n"
        of.abort()
        left(thread, found, of)
