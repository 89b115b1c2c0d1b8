"""Does anything answer where the Ray cluster is said to be, and can a driver run here? Ray itself
tries for minutes."""

from __future__ import annotations

import socket

from elastic.cluster.ray import _ray_private
from elastic.errors import SpecError

REACHED_MOST_S = 5.0
NO_NODE = "No node info found matching attributes"  # of Ray, where this host is none of its nodes
RIGHT = "the driver runs on a node of the cluster: `ray job submit --address http://HEAD:8265 ...`"


def unreachable(address: str, error: Exception) -> SpecError:
    if NO_NODE in str(error):
        return SpecError(
            f"this host is no node of the Ray cluster at {address}: {RIGHT}, or make it one with "
            f"`ray start --address={address}`"
        )
    why = " ".join(str(error).split())[:300]
    return SpecError(
        f"the Ray cluster at {address} cannot be reached ({why}); set RAY_ADDRESS right, or unset "
        "it"
    )


def check_reachable(address: str) -> None:
    """Of an address as HOST:PORT; other words (`auto`) are left to Ray. Raises SpecError."""
    if "://" in address:
        raise SpecError(
            f"RAY_ADDRESS={address}: {RIGHT}; there it is HOST:PORT or auto, or unset it here"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHED_MOST_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise unreachable(address, error) from error


def check_no_client() -> None:
    """Raises SpecError where this process is connected to its cluster from outside."""
    if _ray_private.is_client():
        raise SpecError(f"ray.init: this process is a Ray client (ray://...), but {RIGHT}")
