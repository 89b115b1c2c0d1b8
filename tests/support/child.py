"""Processes that a test starts: however it ends, each is killed, waited for, and its pipes closed.

One that is not would be found in whatever test that process of pytest runs next, as a warning.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def child(words: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """As `subprocess.Popen`; nothing of it outlives the block."""
    process = subprocess.Popen(words, **options)
    try:
        yield process
    finally:
        end(process)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of this host that nobody else is given, and that a server which may reuse addresses
    can listen at."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def end(process: subprocess.Popen[Any]) -> None:
    """SIGKILL, where it has not ended by itself."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
