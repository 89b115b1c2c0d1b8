"""Connections that are shut while the other side still sends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import until

from elastic.worker.process_groups import sockets

PIECE = b"x" * 65536


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a TCP connection: that of a process which aborts, and that of its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
    ):
        mine, _ = server.accept()
        with mine:
            yield mine, peer


def as_gloo(mine: socket.socket) -> threading.Thread:
    """Lets go of the connection when it has read its end."""

    def read() -> None:
        fd = mine.detach()
        while os.read(fd, 1 << 20):
            pass
        os.close(fd)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_what_a_peer_sends_is_taken_until_it_was_told(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several times what the kernel holds. A reset would refuse the peer's sends before it has read
    of the end."""
    monkeypatch.setattr(sockets, "LINGER_S", 0.1)
    mine, peer = ends
    lets_go = as_gloo(mine)
    sockets.shut(set(), [peer.getpeername()], 0, at_once=False)
    lets_go.join(5.0)
    assert not lets_go.is_alive()
    peer.settimeout(5.0)
    until_s = time.monotonic() + sockets.HOLD_S / 2
    while time.monotonic() < until_s:
        peer.sendall(PIECE)
    assert peer.recv(1) == b""
    for thread in threading.enumerate():
        if thread.name == "abort-linger":
            thread.join(5.0)


def test_new_connections_are_shut_with_whoever_waits_to_be_connected_to(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """As NCCL's set-up waits: for a connection, and for what comes through one. Older ones stay."""
    before = sockets.inodes()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_connection(silent.getsockname()) as waits,
    ):
        found: list[object] = []

        def note(wait: Callable[[], object]) -> None:
            try:
                found.append(wait())
            except OSError as error:
                found.append(error)

        threads = [
            threading.Thread(target=note, args=(wait,), daemon=True)
            for wait in (server.accept, lambda: waits.recv(1))
        ]
        for thread in threads:
            thread.start()
        until(lambda: all(_sleeps(t) for t in threads), "both wait")
        sockets.shut_new(before)
        for thread in threads:
            thread.join(5.0)
        assert len(found) == 2 and all(x == b"" or isinstance(x, OSError) for x in found), found
    mine, peer = ends
    mine.sendall(b"x")
    assert peer.recv(1) == b"x"


def _sleeps(thread: threading.Thread) -> bool:
    """In a call of the kernel's."""
    words = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return words[0] == "S"
