"""The token of an embedded cluster: whoever does not know it is refused at each of Ray's ports.

A random one for each cluster, in a file that only its user can read, in the cluster's folder, and
gone with it. Processes are told the file's name, not the token. All of Ray stands on loopback
besides.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FILE = "auth_token"
TOKEN_BYTES = 32
INSTEAD = "RAY_AUTH_TOKEN"  # Ray would take it before the file
# the second: 127.0.0.1 stays it
ON_THIS_MACHINE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def write(folder: str) -> None:
    """A new token."""
    file = os.open(Path(folder, FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(secrets.token_hex(TOKEN_BYTES))


def environment(folder: str) -> dict[str, str]:
    """Of every process that is to talk to the cluster in that folder."""
    return {
        **ON_THIS_MACHINE,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Path(folder, FILE)),
    }


@contextmanager
def replaced(values: Mapping[str, str]) -> Iterator[None]:
    """This process's environment has these values, and no other token; afterwards it is what it
    was."""
    before = {name: os.environ.get(name) for name in (*values, INSTEAD)}
    os.environ.pop(INSTEAD, None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
