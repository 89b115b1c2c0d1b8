"""Processes of this machine, read from /proc: who descends from whom, who lives, how to end a whole
tree; and a port for one."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from elastic.ledger.holder import started as started
from elastic.ledger.holder import stat

PR_SET_CHILD_SUBREAPER = 36
WATCH_S = 1.0  # between looks at a process that another one ends with
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS = range(20_000, 30_000)  # above those of Ray's workers, below those of Kubernetes' services
STAND_BACK = 4  # nice value of what prepares beside others that train on the same cores


def command(pid: int) -> list[str]:
    """The words of its command line; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def descendants(root: int) -> list[int]:
    """Living processes below `root`, parents before children; `root` itself is not among them."""
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = stat(int(name)) if name.isdigit() else None
        if fields is not None:
            below.setdefault(int(fields[1]), []).append(int(name))
    found, queue = [], [root]
    while queue:
        children = below.get(queue.pop(0), [])
        found += children
        queue += children
    return [pid for pid in found if started(pid) is not None]


def send(pids: Iterable[int], number: int = signal.SIGKILL) -> list[int]:
    """Signals each process; returns those that were there."""
    reached = []
    for pid in pids:
        try:
            os.kill(pid, number)
            reached.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return reached


def end_tree(root: int, with_root: bool = True) -> list[int]:
    """SIGKILL for everything below `root` (whose children start nothing any more); returns the
    pids. Does not wait for them."""
    ended: list[int] = []
    if with_root:
        send([root], signal.SIGSTOP)  # so that it starts nothing between the look and its end
        below = descendants(root)
        ended += send([root])
        ended += send(below)
        return ended
    deadline = time.monotonic() + 5.0
    while (below := descendants(root)) and time.monotonic() < deadline:
        ended += send(below)
        reap()
        time.sleep(0.005)
    return ended


def reap() -> list[int]:
    """Takes note of children that have ended, also of adopted ones; returns their pids."""
    ended: list[int] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append(pid)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become this one's children (and not those of
    process 1)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raylet() -> int:
    """The raylet of the node that this Ray worker belongs to: by Ray's own word, since its parent
    may be a fork server."""
    return int(os.environ.get("RAY_RAYLET_PID") or os.getppid())


def end_with(pid: int) -> None:
    """Ends this process when that one is gone: Ray may leave an actor behind whose raylet alone was
    killed. (Not PR_SET_PDEATHSIG: that fires when the thread that started this process ends, and
    knows only the parent.)"""
    since = started(pid)

    def watch() -> None:
        while since is not None and started(pid) == since:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="end-with", daemon=True).start()


def stand_back() -> bool:
    """Lets others on this machine go first, until `step_forward`. False: it could not be undone, so
    nothing is changed."""
    # the lowest nice value that an ordinary user may ask for
    allowed = 20 - resource.getrlimit(resource.RLIMIT_NICE)[0]
    if os.geteuid() != 0 and allowed > os.getpriority(os.PRIO_PROCESS, 0):
        return False
    _set_nice(STAND_BACK)
    return True


def step_forward() -> None:
    """The inverse of `stand_back`."""
    _set_nice(0)


def _set_nice(value: int) -> None:
    """For every thread of this process: each has its own, which the threads that it starts
    inherit."""
    for name in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(name), value)
        except ProcessLookupError:  # it has just ended
            continue


def free_port(address: str = "") -> int:
    """A port for a process that listens on it some seconds later. Outside of those that the system
    gives connections to others, one of which could have it by then."""
    with suppress(OSError, ValueError, IndexError):
        low = int(GIVEN_OUT.read_text().split()[0])
        for port in random.sample(PORTS, 20) if low >= PORTS.stop else ():
            with socket.socket() as tried, suppress(OSError):
                tried.bind((address, port))
                return port
    with socket.socket() as free:
        free.bind((address, 0))
        return int(free.getsockname()[1])
