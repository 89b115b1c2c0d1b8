"""Does anything answer where the Ray cluster is said to be? Ray itself tries for minutes."""

from __future__ import annotations

import socket

from elastic.errors import SpecError

REACHED_MOST_S = 5.0


def unreachable(address: str, error: Exception) -> SpecError:
    why = " ".join(str(error).split())[:300]
    return SpecError(
        f"the Ray cluster at {address} cannot be reached ({why}); set RAY_ADDRESS right, or unset "
        "it"
    )


def check_reachable(address: str) -> None:
    """Of an address as HOST:PORT; others (`auto`, `ray://...`) are left to Ray. Raises
    SpecError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "//" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_MOST_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise unreachable(address, error) from error
