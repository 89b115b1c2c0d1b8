"""Namespaces of their own (network, processes, mounts, IPC) in which commands run: Ray clusters
that see and harm no others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from support.cluster.autoscaled import INSIDE, NAMESPACES
from support.waiting import until

from elastic.cluster.ray import processes

RAY = (
    "import sys; sys.argv = ['ray', *{words!r}]\n"
    "from elastic.cluster.ray._ray_private import leave_agents_out; leave_agents_out()\n"
    "from ray.scripts.scripts import main; main()"
)


def ray_command(*words: str) -> tuple[str, ...]:
    """`ray` with these words, whose nodes have no agents."""
    return (sys.executable, "-c", RAY.format(words=words))


class Namespace:
    """`environment`: of all that runs inside. Folders but /tmp/ray and /dev/shm are those of this
    machine. A command is run `at` one of its named networks (`ip netns add`); '' = its own one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        self.environment = {
            **kept,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self._holder = subprocess.Popen(
            [*NAMESPACES, "sh", "-c", INSIDE, "sh", "sleep", "infinity"]
        )
        until(
            lambda: self._inside() and processes.command(self._inside())[0] == "sleep",
            "the namespaces stand",
        )
        self._name = os.readlink(f"/proc/{self._inside()}/ns/ipc")

    def _inside(self) -> int:
        return next(iter(processes.descendants(self._holder.pid)), 0)

    def _words(self, words: tuple[str, ...], at: str) -> list[str]:
        network = ("nsenter", f"--net=/run/netns/{at}") if at else ()
        return [
            "nsenter",
            "--target",
            str(self._inside()),
            "--net",
            "--pid",
            "--mount",
            "--ipc",
            "--wd=.",
            *network,
            *words,
        ]

    def start(self, *words: str, at: str = "", **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._words(words, at),
            env={**self.environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, at: str = "", within_s: float = 300.0, **more: str) -> str:
        """Its output; raises AssertionError where it fails."""
        done = subprocess.run(
            self._words(words, at),
            env={**self.environment, **more},
            text=True,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, (
            f"{words}: {done.returncode}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
        )
        return done.stdout

    def pids(self, *words: str) -> list[int]:
        """Processes inside whose command lines hold all the words, by their ids outside."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            line = " ".join(processes.command(int(name)))
            with suppress(OSError):
                if (
                    all(word in line for word in words)
                    and os.readlink(f"/proc/{name}/ns/ipc") == self._name
                ):
                    found.append(int(name))
        return [pid for pid in found if processes.started(pid) is not None]

    def close(self) -> None:
        """All that runs inside ends at once."""
        with self._holder:
            self._holder.kill()


def below(process: subprocess.Popen[str]) -> int:
    """The command that `Namespace.start` has started; 0 = it has ended."""
    until(lambda: processes.descendants(process.pid) or process.poll() is not None, "it runs")
    return next(iter(processes.descendants(process.pid)), 0)


__all__ = ["Namespace", "below", "ray_command"]
