"""Keys of a job that have two names: the documented one, and the one under which runs have stored
them since the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.errors import SpecError

STORED: dict[str, str] = {
    "checkpoint_every": "durable_every",
    "replica_every": "peer_every",
    "peer_replicas": "peer_copies",
}
DOCUMENTED: dict[str, str] = {stored: documented for documented, stored in STORED.items()}


def stored_keys(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same values, each under its stored name. Raises SpecError where a key is given under
    both."""
    for documented, stored in STORED.items():
        if documented in data and stored in data:
            raise SpecError(
                f"{where}: '{documented}' and '{stored}' are two names of one key; keep "
                f"'{documented}'"
            )
    return {STORED.get(key, key): value for key, value in data.items()}


def shown_key(key: str) -> str:
    """A key as a message names it: under both names, since either may have been written."""
    return f"'{DOCUMENTED[key]}' (also '{key}')" if key in DOCUMENTED else f"'{key}'"
