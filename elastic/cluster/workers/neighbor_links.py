"""A worker's half of admission: the neighbors that it measures its link to, and where it listens
for others."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from elastic.worker.profile.link_probe import Door, listen

log = logging.getLogger(__name__)

HEAR_MOST_S = 5.0  # of a neighbor, which trains meanwhile


def doors(neighbors: Iterable[Any]) -> list[Door]:
    """Where these actors listen; one that does not answer is left out: it may be ending, and says
    nothing of this node."""
    found = []
    for ref in [actor.hear.remote() for actor in neighbors]:
        try:
            found.append(ray.get(ref, timeout=HEAR_MOST_S))
        except (RayError, GetTimeoutError, OSError) as error:
            log.info("a neighbor does not answer: %s", error)
    return found


def open_door(node_id: str) -> Door:
    """At the address by which the others know this node."""
    return listen(node_id, ray.util.get_node_ip_address())
