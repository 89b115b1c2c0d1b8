"""The link between two workers of different nodes: one listens for one connection, the other
connects, sends, and is told what arrived. Nothing listens but for these seconds, and only to who
knows the token.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass

PAYLOAD_BYTES = 4 << 20
OPEN_S = 15.0  # for which a door is open
CONNECT_S, MOST_S = 5.0, 10.0
TOKEN_MOST_S = 3.0  # for a visitor's next word, until it has said its token
LOOK_S = 0.2
VISITORS_MOST = 64  # at once
TOKEN_BYTES = 16
PIECE_BYTES = 1 << 18
_ANSWER = struct.Struct("<QI")  # bytes that arrived, their crc32


@dataclass(frozen=True)
class Door:
    """Where a neighbor listens, once. `name`: of its node."""

    name: str
    host: str
    port: int
    token: bytes


@dataclass(frozen=True)
class Link:
    """`problem`: '' = it carries. `failed`: all that were tried in vain."""

    name: str
    bytes_per_s: float = 0.0
    problem: str = ""
    failed: tuple[str, ...] = ()


def listen(name: str, host: str) -> Door:
    """Opens a door at this address of this machine, for one visitor within OPEN_S."""
    server = socket.create_server((host, 0), backlog=VISITORS_MOST)
    server.settimeout(OPEN_S)
    token = secrets.token_bytes(TOKEN_BYTES)
    threading.Thread(
        target=_serve, args=(server, token), name="admission-door", daemon=True
    ).start()
    return Door(name, host, int(server.getsockname()[1]), token)


def _serve(server: socket.socket, token: bytes) -> None:
    """Each visitor is heard in a thread of its own: one that says nothing keeps nobody else
    waiting. Who does not know the token is sent away, and the door stays open for the one who
    does."""
    end_s = time.monotonic() + OPEN_S
    served, room = threading.Event(), threading.Semaphore(VISITORS_MOST)
    with server:
        while not served.is_set() and (left_s := end_s - time.monotonic()) > 0:
            server.settimeout(min(left_s, LOOK_S))
            try:
                visitor, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not room.acquire(blocking=False):
                visitor.close()
                continue
            threading.Thread(
                target=_hear,
                args=(visitor, token, served, room),
                name="admission-visitor",
                daemon=True,
            ).start()


def _hear(
    visitor: socket.socket, token: bytes, served: threading.Event, room: threading.Semaphore
) -> None:
    with visitor, suppress(OSError):
        visitor.settimeout(TOKEN_MOST_S)
        if secrets.compare_digest(_read(visitor, TOKEN_BYTES), token) and not served.is_set():
            served.set()
            visitor.settimeout(MOST_S)
            _answer(visitor)
    room.release()


def _answer(visitor: socket.socket) -> None:
    n_bytes, crc = 0, 0
    while n_bytes < PAYLOAD_BYTES and (piece := visitor.recv(PIECE_BYTES)):
        n_bytes += len(piece)
        crc = zlib.crc32(piece, crc)
    visitor.sendall(_ANSWER.pack(n_bytes, crc))


def measure(door: Door) -> Link:
    """Sends PAYLOAD_BYTES through the door. Never raises for what the network does."""
    payload = bytes(range(251)) * (PAYLOAD_BYTES // 251) + bytes(PAYLOAD_BYTES % 251)
    try:
        with socket.create_connection((door.host, door.port), CONNECT_S) as visitor:
            visitor.settimeout(MOST_S)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            began_s = time.monotonic()
            visitor.sendall(door.token)
            visitor.sendall(payload)
            n_bytes, crc = _ANSWER.unpack(_read(visitor, _ANSWER.size))
            took_s = time.monotonic() - began_s
    except OSError as error:
        return Link(
            door.name,
            problem=f"{door.name} cannot be reached at {door.host}:{door.port} "
            f"({error.strerror or error})",
        )
    if (n_bytes, crc) != (len(payload), zlib.crc32(payload)):
        return Link(door.name, problem=f"what it sends to {door.name} arrives altered")
    return Link(door.name, len(payload) / max(took_s, 1e-6))


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    """Raises ConnectionError when it ends before."""
    found = bytearray()
    while len(found) < n_bytes:
        piece = connection.recv(n_bytes - len(found))
        if not piece:
            raise ConnectionError("the connection ended")
        found += piece
    return bytes(found)
