"""`python -m elastic.cluster.ray_train.script_child SCRIPT ARGS`: becomes the user's script, and
ends when its supervisor ends.

A script that uses `ray.train` is run in this process, where that is answered with its supervisor, a
worker of the run; any other one replaces this process (exec).
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
import traceback
from collections.abc import Callable
from typing import Any

from elastic.cluster.ray_train.script_questions import ERROR

PARENT, QUESTIONS = (
    "ELASTIC_SUPERVISOR",
    "ELASTIC_RAY_TRAIN",
)  # its pid; what the script has to know
PR_SET_PDEATHSIG = 1
IN_HANDLER = (
    "ray.train: '{what}' is asked by a signal's handler in the middle of such a call; let the "
    "handler set a flag, and ask where the script reads it"
)
UNREACHED = os.EX_TEMPFAIL  # exit code of a script that storage's failure has ended


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # outlives exec
    if os.getppid() != int(os.environ.pop(PARENT)):
        os._exit(1)  # the supervisor has ended meanwhile
    script, *arguments = sys.argv[1:]
    text = os.environ.pop(QUESTIONS, None)
    if text is None:
        os.execv(sys.executable, [sys.executable, "-u", script, *arguments])
    from elastic.cluster.ray._ray_private import become_train_worker
    from elastic.cluster.ray_train.script_worker import ScriptTrainWorker
    from elastic.errors import StorageFailed

    told = json.loads(text)
    ask = asker(socket.socket(fileno=told["socket"]))
    become_train_worker(ScriptTrainWorker(ask, told))
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except StorageFailed as error:
        if error.exit_code != StorageFailed.exit_code:  # somebody has to do something first
            raise
        traceback.print_exc()
        sys.exit(UNREACHED)


def asker(supervisor: socket.socket) -> Callable[..., Any]:
    """A function that asks the supervisor, as `Questions` reads it; it waits, as Ray Train's own
    does, until every rank has asked. None: nobody answers any more. It raises RuntimeError in a
    signal's handler that has come while its thread waits: it would wait for itself."""
    lock, answers = threading.Lock(), supervisor.makefile("r")
    waiting: set[int] = set()  # threads

    def exchange(question: dict[str, Any]) -> Any:
        with lock:
            try:
                supervisor.sendall(json.dumps(question).encode() + b"\n")
                found = json.loads(answers.readline() or "null")
            except OSError:
                return None
        if isinstance(found, dict) and ERROR in found:
            raise RuntimeError(found[ERROR])
        return found

    def ask(**question: Any) -> Any:
        me = threading.get_ident()
        if me in waiting:
            raise RuntimeError(IN_HANDLER.format(what=question["ask"]))
        waiting.add(me)
        try:
            return exchange(question)
        finally:
            waiting.discard(me)

    return ask


if __name__ == "__main__":
    main()
