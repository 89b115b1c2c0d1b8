"""This process's TCP connections, as the kernel knows them: gloo has no call that frees a
collective that waits, so the connections of a generation are found and shut.

How they are shut matters. gloo (transport/tcp/pair.cc) frees whoever waits for a connection when it
reads its end, but for two: a send that the kernel refused (EPIPE) or has not taken yet, and a
message of which a part has come. Those wait for the group's timeout. So reading is shut first,
which no send notices. When gloo has let go of the connection, the kernel continues to take what the
peer sends, and it is read and thrown away: a socket that had said its end would answer with a
reset, and the peer's next send would be refused before its gloo has read of the end. Who is told to
abort as well shuts its own side in that time; who is not hears of the end afterwards. What is left:
a part of a large message of a peer that was killed. A worker that is not freed is replaced.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

KNOCK_S = 0.2
SYN_SENT = 2  # of the states of a TCP connection in the kernel (netinet/tcp.h)
LOOK_S = 0.001
LET_GO_MOST_S = 0.25  # gloo's thread needs microseconds, on a busy machine milliseconds
HOLD_S = 0.5  # for which what a peer sends is taken before it learns of the end
TAKE_S, PIECE_BYTES = 0.01, 1 << 20
LINGER_S = 2.0  # for which a peer that lives may take to read the end


def own_sockets() -> Iterator[int]:
    """File descriptors of this process's sockets."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def inodes() -> set[int]:
    """Of this process's sockets; others may close theirs meanwhile."""
    found = set()
    for fd in own_sockets():
        with suppress(OSError):
            found.add(inode(fd))
    return found


def _duplicate(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))


def listening(skip: Collection[int]) -> list[tuple[int, Any]]:
    """Family and address of each listening socket but those inodes."""
    found: list[tuple[int, Any]] = []
    for fd in list(own_sockets()):
        with suppress(OSError):
            if inode(fd) in skip:
                continue
            with _duplicate(fd) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    found.append((sock.family, sock.getsockname()))
    return found


def knock(family: int, address: Any, n: int) -> None:
    """Comes to gloo's listener as each of the connections that may be waited for, and goes again:
    whoever waits for a peer that died before it could connect hears that its connection was closed.
    (gloo/transport/tcp/listener.cc: a peer says the number of its connection, eight bytes, and the
    listener keeps what comes before it is asked for.)"""
    for number in range(n):
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(KNOCK_S)
            sock.connect(address)
            sock.sendall(number.to_bytes(8, "little"))


def address_of(name: Any) -> tuple[str, int]:
    """Host and port of a socket's name. Host '' = every address of this machine; an IPv4 address is
    never written as IPv6."""
    host = str(name[0]).removeprefix("::ffff:").split("%")[0]
    return "" if host in ("0.0.0.0", "::") else host, int(name[1])


def shut(
    skip: Collection[int], addresses: Collection[tuple[str, int]], store_port: int, *, at_once: bool
) -> None:
    """Ends the connections but those inodes that go to the store, or have one of the addresses at
    either end. `at_once`: nothing is sent over them yet."""
    found: dict[int, socket.socket] = {}
    for fd in list(own_sockets()):
        with suppress(OSError):
            if inode(fd) in skip:
                continue
            sock = _duplicate(fd)
            if at_once and _connecting(sock):
                with sock:
                    sock.shutdown(socket.SHUT_RDWR)
            elif not _is_of(sock, addresses, store_port):
                sock.close()
            elif at_once or sock.getpeername()[1] == store_port:
                with sock:
                    sock.shutdown(socket.SHUT_RDWR)
            else:
                found[fd] = sock
    _shut(found, socket.SHUT_RD)
    ends_s = time.monotonic() + LET_GO_MOST_S
    while any(_is_same(fd, sock) for fd, sock in found.items()) and time.monotonic() < ends_s:
        time.sleep(LOOK_S)
    if found:
        threading.Thread(
            target=_say_the_end, args=(found,), name="abort-linger", daemon=True
        ).start()


def shut_new(skip: Collection[int]) -> None:
    """Ends every TCP connection but those inodes, and whoever waits in `accept` of a listening
    socket. For what NCCL sets up over its own sockets: it has no call that ends that, and asks
    anew for nothing that it was refused. What other threads have connected meanwhile is ended with
    it, and asks again."""
    for fd in list(own_sockets()):
        with suppress(OSError):  # it is gone, or nobody has connected to it yet
            if inode(fd) not in skip:
                with _duplicate(fd) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        sock.shutdown(socket.SHUT_RDWR)


def _connecting(sock: socket.socket) -> bool:
    """Is it a TCP connection that the other end has not answered yet?"""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == SYN_SENT


def _is_of(sock: socket.socket, addresses: Collection[tuple[str, int]], store_port: int) -> bool:
    """Not a listening socket: shutting gloo's listener would end the process."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        ends = address_of(sock.getpeername()), address_of(sock.getsockname())
    except OSError:
        return False
    return ends[0][1] == store_port or any(
        end in addresses or ("", end[1]) in addresses for end in ends
    )


def _is_same(fd: int, sock: socket.socket) -> bool:
    """Is the file descriptor still that socket, of which `sock` is a duplicate?"""
    try:
        return inode(fd) == inode(sock.fileno())
    except OSError:
        return False


def _shut(found: Mapping[int, socket.socket], how: int) -> None:
    for sock in found.values():
        with suppress(OSError):  # the peer was faster
            sock.shutdown(how)


def _say_the_end(found: Mapping[int, socket.socket]) -> None:
    """Takes what still comes, tells the peers, and gives them time to read it."""
    ends_s = time.monotonic() + HOLD_S
    while time.monotonic() < ends_s:
        for sock in found.values():
            with suppress(OSError):  # the peer has gone
                while sock.recv(PIECE_BYTES, socket.MSG_DONTWAIT):
                    pass
        time.sleep(TAKE_S)
    _shut(found, socket.SHUT_WR)
    time.sleep(LINGER_S)
    for sock in found.values():
        sock.close()
