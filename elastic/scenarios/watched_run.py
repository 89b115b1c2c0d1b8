"""A run in a process of its own, watched through its journal, and what is left of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic.cluster.ray import processes
from elastic.ledger import lease
from elastic.ledger.run_folder import RunFolder
from elastic.scenarios.limit import Failed, Limit
from elastic.storage import Storage, open_storage
from elastic.version import COMPILED, own_folder, python_path

CALM_STEPS = 8  # of a generation: a peer replica comes every 4, up to 3 more while it is on its way
LOOK_S, GONE_S, TAIL = 0.1, 20.0, 1500
LEFT_OUT = ("RAY_ADDRESS", "ELASTIC_STORAGE", "RAY_JOB_CONFIG_JSON_ENV_VAR")
ALWAYS = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def environment_of(more: Mapping[str, str]) -> dict[str, str]:
    """Of a process that is tried: this one's, without what says where runs take place."""
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**inherited, "PYTHONPATH": python_path(), **ALWAYS, **more}


def in_short(text: str) -> str:
    """The end of what a process wrote, in one line."""
    return " ".join(text[-TAIL:].split())


def last_json(text: str, instead: str = "") -> dict[str, Any]:
    """The last line that is a JSON object. Raises Failed, with what was written `instead`."""
    found = [line for line in text.splitlines() if line.startswith("{")]
    if not found:
        raise Failed(f"it printed no result: {instead or in_short(text)}")
    return dict(json.loads(found[-1]))


@dataclass(frozen=True)
class Stage:
    """What a run trains and where: keys of its `job`, its `storage` ('' = in its folder), and on a
    Ray cluster that was there its `address`. `world`: how many ranks all nodes have.

    `connected`: this process is, too, and can look whether an actor is left. `environment`: of the
    driver, over this one's.
    """

    folder: Path
    job: Mapping[str, Any]
    world: int
    name: str = "scenario"
    storage: str = ""
    address: str = ""
    connected: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Storage:
        return open_storage(f"{self.storage or self.folder / 'runs'}/{self.name}")


@dataclass
class Seen:
    """What the journal says so far."""

    at_byte: int = 0
    pids: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each node's workers, now
    plans: dict[int, dict[str, Any]] = field(default_factory=dict)
    # generation, step, loss, digest
    steps: list[tuple[int, int, float, str]] = field(default_factory=list)

    @property
    def generation(self) -> int:
        """The newest that was ordered."""
        return max(self.plans, default=0)

    @property
    def step(self) -> int:
        return max((step for _, step, _, _ in self.steps), default=0)

    def world(self, generation: int) -> int:
        return len(self.plans[generation]["ranks"]) if generation in self.plans else 0

    def n_steps(self, generation: int) -> int:
        return sum(1 for number, _, _, _ in self.steps if number == generation)

    def curve(self) -> dict[int, tuple[float, str]]:
        """Loss and sample digest of each step, as it was done last."""
        in_order = sorted(self.steps, key=lambda one: one[0])
        return {step: (loss, digest) for _, step, loss, digest in in_order}

    def read(self, journal: Path) -> list[dict[str, Any]]:
        """What is new, in whole lines; plain JSON, so that a look costs little. Returns the plans
        that are."""
        if not journal.is_file():
            return []
        with journal.open("rb") as file:
            file.seek(self.at_byte)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.at_byte += len(whole)
        return self.take(json.loads(line) for line in whole.splitlines() if line)

    def take(self, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        new = []
        for line in lines:
            for _, event in line["events"]:
                if event["kind"] == "NodePrepared":
                    self.pids[event["node_id"]] = tuple(event["pids"])
                if event["kind"] == "DrillAsked" and "error" in event["drill"]:
                    raise Failed(event["drill"]["error"])
                if event["kind"] == "StepDone":
                    self.steps.append(
                        (event["generation"], event["step"], event["train_loss"], event["digest"])
                    )
            for action in (line.get("decision") or {}).get("actions", ()):
                if action["kind"] == "EnterPlan":
                    self.plans[action["plan"]["generation"]] = action["plan"]
                    new.append(action["plan"])
        return new


@dataclass
class WatchedRun:
    """`told`: gets each plan as it is ordered."""

    stage: Stage
    limit: Limit
    told: Callable[[dict[str, Any]], None] | None = None
    look_s: float = LOOK_S
    process: subprocess.Popen[str] | None = None
    # pid -> start time of every process below it
    processes: dict[int, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    temporary: Path | None = None

    @property
    def journal(self) -> Path:
        """On this host, wherever the storage is."""
        return RunFolder.of(self.stage.run).journal

    def start(self) -> None:
        """For the first time, or again."""
        stage, job = self.stage, self.stage.folder / "job"
        job.mkdir(parents=True, exist_ok=True)
        keys = {**stage.job, "name": stage.name, "storage": stage.run.uri.rpartition("/")[0]}
        (job / "job.yaml").write_text(json.dumps(keys))  # JSON is YAML
        # short: Ray's sockets lie there, and a socket's path has at most 107 bytes
        self.temporary = self.temporary or Path(tempfile.mkdtemp(prefix="elastic-"))
        words = [str(job), stage.name, stage.address]
        out_log, err_log = stage.folder / "out.log", stage.folder / "err.log"
        with out_log.open("w") as out, err_log.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "elastic.scenarios.run_process", *words],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
                env=self._environment(), start_new_session=True,
            )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        own = environment_of({"TMPDIR": str(self.temporary), **self.stage.environment})
        if not own.get("TORCHINDUCTOR_CACHE_DIR"):  # that of all runs of a user: it is to stay
            own["TORCHINDUCTOR_CACHE_DIR"] = own_folder(COMPILED)
        return own

    def calm(self, world: int | None = None) -> None:
        """Waits until the newest generation has done some steps. `world`: and has that many
        ranks."""

        def holds() -> bool:
            newest = self.seen.generation
            fits = world is None or self.seen.world(newest) == world
            return fits and self.seen.n_steps(newest) >= CALM_STEPS

        self.until(holds, f"{world or 'the'} workers train")

    def drill(self, words: str) -> None:
        from elastic import api

        api.drill(self.stage.run, words.split())

    def stopped(self) -> dict[str, Any]:
        """Stops it; what it says at its end."""
        from elastic import api

        api.stop(self.stage.run, "all that was to happen has happened")
        self.until(
            lambda: self.process is not None and self.process.poll() is not None, "the run stopped"
        )
        return last_json((self.stage.folder / "out.log").read_text(), instead=self._tail())

    def driver_killed(self) -> float:
        """SIGKILL of the driver; the next one of the same run. Seconds from the kill to a new step
        in the journal."""
        assert self.process is not None
        killed_s = time.monotonic()
        self.process.kill()
        self.process.wait()
        self.look()  # what it had written since the last look
        last = self.seen.step
        self.start()
        self.until(lambda: self.seen.step > last, "the next driver hears of a new step")
        return time.monotonic() - killed_s

    def until(self, holds: Callable[[], bool], what: str) -> None:
        while not holds():
            self.limit.look(what)
            ended = self.process is not None and self.process.poll() is not None
            self.look()
            if ended and not holds():
                raise Failed(f"while waiting for '{what}': the run ended: {self._tail()}")
            time.sleep(self.look_s)

    def look(self) -> None:
        for plan in self.seen.read(self.journal):
            if self.told is not None:
                self.told(plan)
        self._look_at_processes()

    def _tail(self) -> str:
        return in_short((self.stage.folder / "err.log").read_text(errors="replace"))

    def _look_at_processes(self) -> None:
        if self.process is not None:
            for pid in (self.process.pid, *processes.descendants(self.process.pid)):
                started = processes.started(pid)
                if started is not None:
                    self.processes[pid] = started

    # ------------------------------------------------------------------------------------- its end

    def end(self) -> list[str]:
        """Ends the run, whatever it does; what did not end by itself or was left behind."""
        if self.process is None:
            return []
        self._look_at_processes()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end_s = time.monotonic() + GONE_S
        while (
            left := [pid for pid, at in self.processes.items() if processes.started(pid) == at]
        ) and time.monotonic() < end_s:
            time.sleep(0.1)
        said = [f"process {pid}: {' '.join(processes.command(pid))[:80].strip()}" for pid in left]
        processes.send(left)
        return [*said, *self._actors_left(end_s), *self._temporary_left()]

    def _actors_left(self, end_s: float) -> list[str]:
        if not self.stage.connected:
            return []
        from elastic.cluster.backend.ray_run import namespace_of
        from elastic.cluster.ray.actors import actor_names, end_actors

        namespace = namespace_of(self.stage.run.uri)
        while (left := actor_names(namespace)) and time.monotonic() < end_s:
            time.sleep(0.1)
        end_actors(namespace)
        return [f"actor {name}" for name in left]

    def _temporary_left(self) -> list[str]:
        if self.temporary is None:
            return []
        left = [f"temporary {path}" for path in self.temporary.iterdir()]
        shutil.rmtree(self.temporary, ignore_errors=True)
        return left

    def lease_left(self) -> list[str]:
        """Of a run that has ended: the next driver would have to wait."""
        sign = lease.newest(self.stage.run)
        return [f"lease of process {sign.pid}"] if sign is not None and not sign.released else []
