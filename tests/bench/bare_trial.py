"""Runs bare.py in processes of its own and watches what they take."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO

from figures import Changes
from trial import LEFT_OUT, LOOK_S, PROGRAM, ROOT, Clock, Failed

from elastic.cluster.ray.processes import free_port

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

    def changes(self) -> Changes:
        shrink, grow = [], []
        for before, after in zip(self.groups, self.groups[1:]):
            if after.change_s is not None:
                (shrink if after.world < before.world else grow).append(after.change_s)
        return Changes(tuple(shrink), tuple(grow))


def start(
    out: IO[str], worlds: Sequence[int], n_steps: int, batch: int, program: Path = PROGRAM
) -> list[Popen[bytes]]:
    """The processes of the script, which print into `out`; the caller ends them."""
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [
        sys.executable,
        str(SCRIPT),
        str(program),
        ",".join(map(str, worlds)),
        str(n_steps),
        str(batch),
    ]
    return [
        Popen(
            words, stdin=DEVNULL, stdout=out, stderr=STDOUT, env={**environment, "RANK": str(rank)}
        )
        for rank in range(max(worlds))
    ]


def end(ranks: Sequence[Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
        process.wait()


def run_bare(worlds: Sequence[int], n_steps: int, batch: int, clock: Clock) -> Bare:
    with tempfile.TemporaryFile("w+") as out:
        ranks = start(out, worlds, n_steps, batch)
        try:
            while any(process.poll() is None for process in ranks) and not any(
                process.returncode for process in ranks
            ):
                clock.look("the bare script")
                time.sleep(LOOK_S)
        finally:
            end(ranks)
        out.seek(0)
        text = out.read()
    if any(process.returncode for process in ranks):
        raise Failed(f"the bare script failed: {text[-1500:]}")
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"world"')]
    return Bare(
        tuple(Group(g["world"], g["change_s"], tuple(map(tuple, g["steps"]))) for g in found)
    )
