"""Names of processes that are never reused: who holds something, and does it still live?"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on (index 0 = state, 1 = parent, 19 = start time);
    None = no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text.rpartition(")")[2].split()


def started(pid: int) -> int | None:
    """Ticks from boot to the start of the process: with the pid, a name that is never reused. None
    = gone or a zombie."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


@dataclass(frozen=True)
class Machine:
    """Where a process id means something: one boot of one machine, one pid namespace."""

    host: str
    boot: str

    @classmethod
    def here(cls) -> Machine:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(socket.gethostname(), f"{boot}/{os.readlink('/proc/self/ns/pid')}")
