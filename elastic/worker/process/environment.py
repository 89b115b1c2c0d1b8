"""The environment of every process that trains: the one table of what torch, NCCL and the C library
read when they are loaded.

Imports nothing of torch's, so that it can be applied before that is loaded.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
RESTARTED = "ELASTIC_RESTARTED_SCRIPT"  # in processes of a script that is restarted: its file

# Without these a survivor ends or hangs with the one that died; a user's other value is overridden.
REQUIRED = {
    # else the watchdog ends the process when a peer is gone
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # else a monitor ends the process when the watchdog is slow
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # else a CUDA error ends the process before it is reported
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # after an error the watchdog sleeps four times this with its lock held (60 s)
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    # else a communicator cannot be aborted while it is set up
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    # seconds that set-up holds the lock which abort needs; 30 minutes by default
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
}
# what torchrun gives to all that it starts: no wish of the user's, and overridden without a word
OF_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
# Read when Python starts: without it each process has other hashes of texts, and sets of them in
# another order, a resumed run too. The user's own value stays.
AT_START = {"PYTHONHASHSEED": "0"}
# The user's own value stays.
DEFAULTS = AT_START | {
    "OMP_NUM_THREADS": "1",
    # torch's TCPStore asks the DNS for the name of each peer, for its log. Unanswered, the resolver
    # asks again after 5 s.
    "RES_OPTIONS": "timeout:1 attempts:3",
}
ENVIRONMENT = REQUIRED | DEFAULTS


def settle(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Applies the table. Returns the values that it has overridden, by name; the log has them
    too."""
    overridden = {
        name: environment[name]
        for name, value in REQUIRED.items()
        if environment.get(name, value) not in (value, OF_TORCHRUN.get(name))
    }
    for name, value in overridden.items():
        log.warning("%s=%s is not what recovery needs, and is overridden", name, value)
    environment.update(REQUIRED)
    for name, value in DEFAULTS.items():
        environment.setdefault(name, value)
    return overridden


def start_again_with_hashes() -> None:
    """This process as a new Python with the hashes that all workers have, where nobody has said
    which: before anything is done, in a process that something else has started."""
    if any(name not in os.environ for name in AT_START):
        os.environ.update(AT_START)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def die_with_parent() -> None:
    """Linux ends this process when the thread that has started it is gone, also one that is
    stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tell_launcher(text: str) -> None:
    """torchrun ends with a block about the rank that failed first: this becomes its last line, by
    itself, in the form of its own `record` (of another it says so, in two lines more)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        line = " ".join(text.split())
        shown = {"py_callstack": f"\n{line}", "timestamp": str(int(time.time()))}
        with suppress(OSError):
            told = {"message": {"message": line, "errorCode": 1, "extraInfo": shown}}
            Path(file).write_text(json.dumps(told))
