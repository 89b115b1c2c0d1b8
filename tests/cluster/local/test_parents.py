"""Actors end with their raylet, also where that alone is killed: Ray itself leaves a watcher
behind, for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.child import child
from support.cluster.stage import wait_gone

CHILD = """
import os, sys, time
from elastic.cluster.ray import processes
if sys.argv[1:]: os.environ["RAY_RAYLET_PID"] = sys.argv[1]  # not its parent, as for the fork of a fork server
processes.end_with(processes.raylet())
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_process_ends_when_its_raylet_is_killed() -> None:
    words = [sys.executable, "-c", PARENT, CHILD]
    with child(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        wait_gone([pid], within_s=60.0)


def test_a_process_ends_when_its_raylet_is_killed_that_is_not_its_parent() -> None:
    with child([sys.executable, "-c", "import time; time.sleep(600)"]) as raylet:
        command = [sys.executable, "-c", CHILD, str(raylet.pid)]
        with child(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "up\n"
            raylet.kill()
            assert worker.wait(60) == 1
