"""The named actors of a run: which there are, and their end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError


def actor_names(namespace: str) -> list[str]:
    """Of the living ones."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in found if entry["namespace"] == namespace]


def named_actors(namespace: str) -> list[Any]:
    found = []
    for name in actor_names(namespace):
        with suppress(ValueError):  # it has just ended
            found.append(ray.get_actor(name, namespace))
    return found


def kill(actor: Any) -> None:
    """For good; it may be gone already."""
    with suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)


def end_actors(namespace: str) -> None:
    for actor in named_actors(namespace):
        kill(actor)
