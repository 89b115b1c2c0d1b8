"""`python -m elastic.cluster.ray_train.script_child SCRIPT ARGS`: becomes the user's script, and
ends when its supervisor ends.

A script that asks `ray.train.get_preemption_info()` is run in this process, where that question
goes to its supervisor, a worker of Ray Train; any other one replaces this process (exec).
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

PARENT, QUESTIONS = "ELASTIC_SUPERVISOR", "ELASTIC_PREEMPTION_FD"  # its pid; a socket to it
PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # outlives exec
    if os.getppid() != int(os.environ.pop(PARENT)):
        os._exit(1)  # the supervisor has ended meanwhile
    script, *arguments = sys.argv[1:]
    descriptor = os.environ.pop(QUESTIONS, None)
    if descriptor is None:
        os.execv(sys.executable, [sys.executable, "-u", script, *arguments])
    from elastic.cluster.ray._ray_private import answer_preemption_info

    answer_preemption_info(asker(socket.socket(fileno=int(descriptor))))
    sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


def asker(supervisor: socket.socket) -> Callable[[], dict[str, Any] | None]:
    """A function that asks the supervisor; it waits, as Ray Train's own does, until every rank has
    asked."""
    lock, answers = threading.Lock(), supervisor.makefile("r")

    def ask() -> dict[str, Any] | None:
        with lock:
            supervisor.sendall(b"?\n")
            found: dict[str, Any] | None = json.loads(answers.readline() or "null")
            return found

    return ask


if __name__ == "__main__":
    main()
