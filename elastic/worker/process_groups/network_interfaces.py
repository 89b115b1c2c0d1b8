"""Which network interface an address of this host belongs to (Linux). gloo left alone takes the one
that the host's own name resolves to, and on many machines that is loopback (127.0.1.1 in
/etc/hosts): peers on other hosts then reach nobody."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from elastic.types.orders import Rendezvous

log = logging.getLogger(__name__)

GLOO = "GLOO_SOCKET_IFNAME"
SIOCGIFCONF = 0x8912
# struct ifreq of 64 bits: the name, or label, then a sockaddr_in
REQUEST_BYTES, NAME, AT = 40, slice(0, 16), slice(20, 24)
ADDRESSES_MOST = 4096
ANYWHERE = ("192.0.2.1", 9)  # of RFC 5737; nothing is sent
IPV6 = Path("/proc/net/if_inet6")


def outward(here: str, at: Rendezvous) -> str:
    """This host's address on the way to the store of a meeting: `here`, or where that is loopback,
    though other hosts take part, one that they can reach. The store's name is then this host's own,
    which it looks up in its /etc/hosts."""
    nodes = {worker.node_id for worker in at.participants}
    if len(nodes) == 1 or not _is_loopback(here) or _is_loopback(at.store[0]):
        return here
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        with suppress(OSError):  # no route leads out
            asked.connect(ANYWHERE)
            return str(asked.getsockname()[0])
    own = (socket.inet_ntoa(packed) for _, packed in _each_ipv4())
    return next((address for address in own if not _is_loopback(address)), here)


def _is_loopback(host: str) -> bool:
    """A name is not, but for localhost."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def choose_for_gloo(address: str) -> None:
    """The interface of `address`, unless the user has chosen one."""
    if GLOO in os.environ:
        return
    if (name := interface_of(address)) is not None:
        os.environ[GLOO] = name
    elif not _is_loopback(address):
        log.warning(
            "no network interface of this host has %s, from which it reaches the others: gloo "
            "takes the one that the host's name resolves to; where peers do not meet, set %s",
            address,
            GLOO,
        )


def interface_of(address: str) -> str | None:
    """None: no interface of this host has it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        rows = [row.split() for row in IPV6.read_text().splitlines()] if IPV6.exists() else []
        return next((row[-1] for row in rows if int(row[0], 16) == int(wanted)), None)
    return next((name for name, packed in _each_ipv4() if packed == wanted.packed), None)


def _each_ipv4() -> Iterator[tuple[str, bytes]]:
    """Interfaces, by the names that getifaddrs has for them, and their addresses: one may have
    several."""
    found = array("B", bytes(REQUEST_BYTES * ADDRESSES_MOST))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        wish = struct.pack("iP", len(found), found.buffer_info()[0])
        n_bytes, _ = struct.unpack("iP", fcntl.ioctl(asked.fileno(), SIOCGIFCONF, wish))
    for first in range(0, n_bytes, REQUEST_BYTES):
        request = found[first : first + REQUEST_BYTES].tobytes()
        yield request[NAME].partition(b"\0")[0].decode(), request[AT]
