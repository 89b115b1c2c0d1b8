"""Which network interface an address of this host belongs to (Linux). gloo left alone takes the one
that the host's own name resolves to, and on many machines that is loopback (127.0.1.1 in
/etc/hosts): peers on other hosts then reach nobody."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915
NAME_BYTES, AT = 256, slice(20, 24)  # struct ifreq: the name, then a sockaddr_in
IPV6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """None: no interface of this host has it as its first address."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        rows = [row.split() for row in IPV6.read_text().splitlines()] if IPV6.exists() else []
        return next((row[-1] for row in rows if int(row[0], 16) == int(wanted)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                told = fcntl.ioctl(
                    asked.fileno(), SIOCGIFADDR, struct.pack(f"{NAME_BYTES}s", name.encode())
                )
            except OSError:  # it has none
                continue
            if told[AT] == wanted.packed:
                return name
    return None
