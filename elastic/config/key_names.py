"""Keys of a job as messages name them: where each was written, and those that have two names, the
documented one and the one under which runs have stored them since the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic.errors import SpecError

STORED: dict[str, str] = {
    "checkpoint_every": "durable_every",
    "replica_every": "peer_every",
    "peer_replicas": "peer_copies",
}
DOCUMENTED: dict[str, str] = {stored: documented for documented, stored in STORED.items()}

LEAST = {"steps": 1, "global_batch": 1_000_000}  # what a job must have; a script may say it later
OF_A_SCRIPT = "epochs"  # is no key of a job's own


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


class KeysFrom(str):
    """Where keys were written, as an error begins: a file. `over`: those that --set gave instead
    of it."""

    over: frozenset[str] = frozenset()

    @classmethod
    def of(cls, file: str, over: Iterable[str]) -> KeysFrom:
        made = cls(file)
        made.over = frozenset(over)
        return made


def place_of(where: str, path: Sequence[str | int]) -> str:
    """Where the key at `path` was written; what several keys say together (no path) was written in
    the file and by --set."""
    over = where.over if isinstance(where, KeysFrom) else frozenset[str]()
    if path:
        return f"--set {DOCUMENTED.get(str(path[0]), path[0])}" if path[0] in over else where
    named = ", ".join(DOCUMENTED.get(key, key) for key in sorted(over))
    return f"{where} (with --set {named})" if named else where
