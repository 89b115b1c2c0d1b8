"""Runs bare.py in processes of its own and watches what they take."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import Changes, Cpu, Window, window
from trial import LEFT_OUT, LOOK_S, PROGRAM, ROOT, Clock, Failed, Tree

SCRIPT = Path(__file__).resolve().parent / "bare.py"


@dataclass(frozen=True)
class Group:
    """One process group of a bare run."""

    world: int
    change_s: float | None
    steps: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Bare:
    groups: tuple[Group, ...]
    cpu: Cpu

    def changes(self) -> Changes:
        shrink, grow = [], []
        for before, after in zip(self.groups, self.groups[1:]):
            if after.change_s is not None:
                (shrink if after.world < before.world else grow).append(after.change_s)
        return Changes(tuple(shrink), tuple(grow))

    def window(self, first: int, last: int) -> Window:
        return window(self.groups[0].steps, self.cpu, first, last)


def run_bare(worlds: Sequence[int], n_steps: int, batch: int, clock: Clock) -> Bare:
    with socket.socket() as free, tempfile.TemporaryFile("w+") as out:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [sys.executable, str(SCRIPT), str(PROGRAM), ",".join(map(str, worlds)), str(n_steps), str(batch)]
        ranks = []
        try:
            for rank in range(max(worlds)):
                environment["RANK"] = str(rank)
                ranks.append(
                    subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment)
                )
            cpu = _watch(ranks, clock)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        out.seek(0)
        text = out.read()
    if any(process.returncode for process in ranks):
        raise Failed(f"the bare script failed: {text[-1500:]}")
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"world"')]
    return Bare(tuple(Group(g["world"], g["change_s"], tuple(map(tuple, g["steps"]))) for g in found), cpu)


def _watch(ranks: Sequence[subprocess.Popen[bytes]], clock: Clock) -> Cpu:
    """CPU seconds over time, until all have ended or one has failed."""
    trees = [Tree(process.pid) for process in ranks]
    kept: dict[int, tuple[str, float]] = {}
    cpu = []
    while any(process.poll() is None for process in ranks) and not any(process.returncode for process in ranks):
        clock.look("the bare script")
        clock.loads.append(round(os.getloadavg()[0], 2))
        for tree in trees:
            tree.cpu_s(kept)
        cpu.append((time.time(), {"workers": sum(seconds for _, seconds in kept.values())}))
        time.sleep(LOOK_S)
    return cpu
