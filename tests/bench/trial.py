"""A run of `elastic` in a process of its own, watched through its journal, and the promise that
nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic import api
from elastic.cluster.ray import processes
from elastic.ledger.journal import Line, read
from elastic.storage import open_storage
from elastic.worker.process.environment import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).resolve().parent / "job" / "program.py"
LOOK_S, GONE_S = 0.3, 20.0
RAY = ("raylet", "gcs_server", "dashboard", "runtime_env", "default_worker")
LEFT_OUT = ("RAY_ADDRESS", "ELASTIC_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR")


class Failed(Exception):
    """The bench could not be carried out; the message says what happened instead."""


@dataclass(frozen=True)
class Clock:
    """The bench's own bound, and the load that it ran under."""

    most_s: float
    began_s: float = field(default_factory=time.monotonic)
    loads: list[float] = field(default_factory=lambda: [round(os.getloadavg()[0], 2)])

    @property
    def spent(self) -> float:
        """Share of the time that is spent."""
        return (time.monotonic() - self.began_s) / self.most_s

    def look(self, what: str) -> None:
        if self.spent > 1:
            raise Failed(
                f"{what}: not within the bench's {self.most_s:.0f} s (load "
                f"{os.getloadavg()[0]:.1f})"
            )

    def plain(self) -> dict[str, Any]:
        self.loads.append(round(os.getloadavg()[0], 2))
        load = {
            "before": self.loads[0],
            "after": self.loads[-1],
            "most": max(self.loads),
            "cpus": os.cpu_count(),
        }
        return {"load": load, "bench_s": round(time.monotonic() - self.began_s, 1)}


def cpu_clock(pid: int) -> int:
    """The clock of what all threads of a process have computed, those that have ended included, as
    Linux makes its number (clock_getcpuclockid)."""
    return (~pid << 3) | 2


@dataclass
class Tree:
    """All processes below one that we started; a process is a pid with its start time."""

    root: int
    seen: dict[int, int] = field(default_factory=dict)

    def look(self) -> None:
        for pid in (self.root, *processes.descendants(self.root)):
            started = processes.started(pid)
            if started is not None:
                self.seen[pid] = started

    def left(self) -> list[int]:
        return [pid for pid, started in self.seen.items() if processes.started(pid) == started]

    def gone(self, within_s: float = GONE_S) -> list[int]:
        """Waits for the end of all; what is left then is killed and named."""
        deadline = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.send(left)
        return left

    def cpu_s(self, into: dict[int, tuple[str, float]]) -> dict[str, float]:
        """CPU seconds so far per kind of process, also of those that have ended since the last look
        (`into` keeps them)."""
        self.look()
        for pid in self.left():
            with suppress(OSError):
                into[pid] = (self._kind(pid), time.clock_gettime(cpu_clock(pid)))
        out: dict[str, float] = {}
        for kind, seconds in into.values():
            out[kind] = out.get(kind, 0.0) + seconds
        return out

    def _kind(self, pid: int) -> str:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        if pid == self.root:
            return "root"
        if words.startswith("ray::"):
            return "workers"
        if "tracker_process\0" in words:
            return words.split("tracker_process\0")[1].partition("\0")[0]
        if "elastic\0dashboard" in words:
            return "dashboard"
        return "ray" if any(name in words for name in RAY) else "other"


@dataclass
class Trial:
    """A job folder and its run, named `bench`. `job`: keys of job.yaml, None = without this one;
    `words`: more of the command line."""

    folder: Path
    job: Mapping[str, Any]
    clock: Clock
    words: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    trees: list[Tree] = field(default_factory=list)
    at_byte: int = 0
    worlds: dict[int, int] = field(default_factory=dict)  # generation -> ranks
    steps: list[tuple[int, int, float]] = field(default_factory=list)  # generation, step, at_s
    # of each: what the workers told of it
    times_s: list[dict[str, float]] = field(default_factory=list)
    n_durable: int = 0
    peer_every: int = 0  # of the newest plan, or as it was changed since

    @property
    def journal(self) -> Path:
        return self.folder / "runs" / "bench" / "journal.jsonl"

    def start(self) -> None:
        """`elastic run`, for the first time or again."""
        job = self.folder / "job"
        job.mkdir(parents=True, exist_ok=True)
        defaults = {"program": str(PROGRAM), "storage": str(self.folder / "runs")}
        data = {key: value for key, value in {**defaults, **self.job}.items() if value is not None}
        (job / "job.yaml").write_text(json.dumps(data))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        with (self.folder / "run.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic", "run", str(job), "--run-name", "bench", "--local",
                "--json", *self.words], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                preexec_fn=die_with_parent,  # a bench that is killed leaves no run behind
            )  # fmt: skip
        self.trees.append(Tree(self.process.pid))

    def drill(self, *words: str) -> None:
        api.drill(open_storage(self.journal.parent), words)

    def kill(self) -> float:
        """SIGKILL of the driver; everything else of the run ends with it by itself. Returns when
        (epoch seconds)."""
        assert self.process is not None
        self.trees[-1].look()
        at_s = time.time()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return at_s

    def end(self) -> list[int]:
        """Ends the run, whatever it does; returns the pids that did not end by themselves."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        return [pid for tree in self.trees for pid in tree.gone()]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        while not holds():
            self.clock.look(what)
            if self.process is not None and self.process.poll() is not None:
                self.look()
                if holds():
                    return
                tail = (self.folder / "run.log").read_text(errors="replace")[-1500:]
                raise Failed(
                    f"{what}: the run ended first (exit code {self.process.returncode}): {tail}"
                )
            time.sleep(LOOK_S)
            self.clock.loads.append(round(os.getloadavg()[0], 2))
            self.trees[-1].look()
            self.look()

    def look(self) -> None:
        """Reads what is new in the journal, in whole lines; plain JSON, so that the watcher costs
        little."""
        if not self.journal.is_file():
            return
        with self.journal.open("rb") as file:
            file.seek(self.at_byte)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at_byte += len(whole)
        for line in whole.splitlines():
            if line:
                self._line(json.loads(line))

    def _line(self, line: dict[str, Any]) -> None:
        for at_s, event in line["events"]:
            if event["kind"] == "StepDone":
                self.steps.append((event["generation"], event["step"], at_s))
                self.times_s.append(
                    {"step": event["step_time_s"], "data": event["data_s"], "copy": event["copy_s"]}
                )
            elif event["kind"] == "CopyStored":
                self.n_durable += event["copy"]["kind"] == "durable"
        for action in (line.get("decision") or {}).get("actions", ()):
            if action["kind"] == "EnterPlan":
                self.worlds[action["plan"]["generation"]] = len(action["plan"]["ranks"])
                self.peer_every = action["plan"]["peer_every"]
            elif action["kind"] == "SetCadence":
                self.peer_every = action["peer_every"]

    @property
    def generation(self) -> int:
        """Of the newest step."""
        return self.steps[-1][0] if self.steps else 0

    def settled(self, world: int, after: int, n_steps: int) -> bool:
        """A generation of `world` ranks, newer than `after`, has done `n_steps` steps and is the
        newest."""
        newest = self.generation
        done = sum(1 for generation, _, _ in self.steps[-n_steps:] if generation == newest)
        return (
            newest > after
            and newest == max(self.worlds, default=0)
            and self.worlds[newest] == world
            and done >= n_steps
        )

    def lines(self) -> list[Line]:
        return read(self.journal)


@contextmanager
def running(job: Mapping[str, Any], clock: Clock, words: Sequence[str] = ()) -> Iterator[Trial]:
    """A run in a folder of its own, from its start to its end. Raises Failed where a process of it
    did not end by itself."""
    with tempfile.TemporaryDirectory(prefix="elastic-bench-", ignore_cleanup_errors=True) as folder:
        trial = Trial(Path(folder), job, clock, words)
        try:
            trial.start()
            yield trial
        finally:
            left = trial.end()
    if left:
        raise Failed(f"{len(left)} processes did not end by themselves: {left}")
