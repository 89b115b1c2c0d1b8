"""One process of a script that is restarted: started with what torchrun would give it, watched,
and ended.

Ranks meet twice: their sessions at the generation's store, to learn where rank 0 will listen, and
the processes of the script at that port.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from elastic.cluster.local.local_cluster import visible_gpus
from elastic.cluster.ray.processes import free_port
from elastic.cluster.ray_train.script_checkpoints import (
    ReportedCheckpoints,
    copies_of,
    remove_copies,
    remove_left,
)
from elastic.cluster.ray_train.script_child import PARENT, QUESTIONS, UNREACHED
from elastic.cluster.ray_train.script_output import BAR, StepReader, error_part
from elastic.cluster.ray_train.script_questions import Questions, naps
from elastic.storage import open_storage
from elastic.types import (
    Evaluated,
    Event,
    GroupRan,
    Job,
    Plan,
    PlanEntered,
    Progress,
    Quiesce,
    Quiesced,
    ScriptEnded,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.types.orders import Rendezvous
from elastic.version import python_path
from elastic.worker.process.environment import RESTARTED

LOOK_S = 0.1
TAIL_LINES = 40  # of output that are kept
RAN_EVERY_S = 5.0
FIRST_STEP_S = 60.0  # a group whose script printed steps before, and none now
ESTABLISHED = "01"
RAY_TRAIN = re.compile(r"\bray\.train\b|from\s+ray\s+import\s+.*\btrain\b")
TORCHELASTIC = {
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
GPUS = "CUDA_VISIBLE_DEVICES"
# accelerate, and so a Trainer of transformers, makes one group of ranks without GPUs only where it
# is told that it runs on CPUs; otherwise each rank trains all of it, alone
ON_CPUS = ("ACCELERATE_USE_CPU", "true")


@dataclass(frozen=True)
class RankPlace:
    """This rank, and where the group meets."""

    address: str
    port: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int
    n_nodes: int

    @classmethod
    def of(cls, plan: Plan, me: WorkerId, *, address: str, port: int) -> RankPlace:
        rank = plan.ranks.index(me)
        mates = [worker for worker in plan.ranks if worker.node_id == me.node_id]
        return cls(
            address, port, rank, len(plan.ranks), mates.index(me), len(mates),
            plan.nodes.index(me.node_id), len(plan.nodes),
        )  # fmt: skip

    def environment(self, run: str) -> dict[str, str]:
        """What torchrun sets."""
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node_rank), "NODE_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.n_nodes), "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world), "ROLE_NAME": "default", "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port), "TORCHELASTIC_RUN_ID": run, **TORCHELASTIC,
        }  # fmt: skip


class Left(Exception):
    """The group is ended before its ranks have met."""


@dataclass
class RankProcess:
    """`run` returns when the process has ended; other threads may end it. `gap`: steps between two
    lines that name one, as far as known; `epochs`: the steps before each one, likewise."""

    me: WorkerId
    job: Job
    run_uri: str
    plan: Plan
    rendezvous: Rendezvous
    put: Callable[[Event], None]
    gap: int = 1
    epochs: list[int] = field(default_factory=lambda: [0])
    step: int = 0
    over: bool = False
    _asked: bool = False  # to end
    _noticed_until_s: float = 0.0  # it gets SIGTERM as soon as it has a handler for it
    _kill_at_s: float | None = None
    _child: subprocess.Popen[str] | None = None
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _met_s: float | None = None
    _entered_s: float | None = None
    _told_s: float = 0.0  # the last step or GroupRan
    _has_steps: bool = False
    _notice: dict[str, Any] | None = None
    _questions: Questions | None = None  # of a script that uses ray.train
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def rank(self) -> int:
        return self.plan.ranks.index(self.me)

    @cached_property
    def store(self) -> Any:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from elastic.worker.process_groups.rendezvous import place

        timeout = timedelta(seconds=self.rendezvous.timeout_s)
        store = TCPStore(*self.rendezvous.store, is_master=False, timeout=timeout)
        return PrefixStore(place(self.plan.generation, self.rendezvous.secret), store)

    # ------------------------------------------------------------------------- from other threads

    def quiesce(self, asked: Quiesce, grace_s: float) -> None:
        """Of a notice only a process hears that listens, as soon as it does; a script may ask for
        it."""
        if asked.leaving:
            ranks: dict[str, list[int]] = {}
            for rank, worker in enumerate(self.plan.ranks):
                if worker.node_id in asked.leaving:
                    ranks.setdefault(worker.node_id, []).append(rank)
            deadline_ms = int((time.time() + grace_s) * 1000)
            self._notice = {"deadline_ms": deadline_ms, "ranks": ranks}
            self._noticed_until_s = time.monotonic() + grace_s
        with self._lock:
            runs = self._child is not None and not self.over
        if not (asked.leaving and runs):
            self.end(grace_s)

    def end(self, grace_s: float) -> None:
        """SIGTERM, once; SIGKILL after the shortest time that was asked for."""
        with self._lock:
            if self.over:  # meanwhile, by itself
                self.put(Quiesced(self.me, self.plan.generation, self.step))
                return
            first, self._asked = not self._asked, True
            at_s = time.monotonic() + grace_s
            self._kill_at_s = at_s if self._kill_at_s is None else min(self._kill_at_s, at_s)
            if first and self._child is not None:
                self._child.send_signal(signal.SIGTERM)

    def join(self, most_s: float | None = None) -> None:
        self._done.wait(most_s)

    def resident_bytes(self) -> int:
        """Of the script's process; 0 = it does not run."""
        from elastic.worker.process.free_memory import resident_bytes  # and with it torch

        child = self._child
        try:
            return resident_bytes(child.pid) if child is not None else 0
        except OSError:
            return 0

    # ------------------------------------------------------------------------------ its own thread

    def run(self) -> None:
        """To the end of the process; says how that was."""
        try:
            self._to_the_end()
        except Left:
            self._leave([Quiesced(self.me, self.plan.generation, self.step)])
        except (OSError, RuntimeError) as error:  # the store is gone, or no process can be started
            self._leave([self._failed("infrastructure", f"{type(error).__name__}: {error}")])
        finally:
            self._done.set()

    def _leave(self, events: list[Event]) -> None:
        """The word that it is over, and that, are one."""
        with self._lock:
            noticed = self._questions is not None and self._questions.noticed
            asked, self.over = self._asked or noticed, True
        for event in events:
            if not (asked and isinstance(event, WorkerFailed | ScriptEnded)):
                self.put(event)
                if isinstance(event, ScriptEnded) and self._questions is not None:
                    self._questions.ended()
        if asked and not any(isinstance(event, Quiesced) for event in events):
            self.put(Quiesced(self.me, self.plan.generation, self.step))

    def _to_the_end(self) -> None:
        place, gpus = self._meet()
        child = self._start(place, gpus)
        assert child.stdout is not None
        reader = threading.Thread(target=self._read, args=(child.stdout,), daemon=True)
        reader.start()
        try:
            while (code := child.poll()) is None:
                self._look(child, place)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_S)
        finally:
            child.kill()
            self._remove_copies(place)
        reader.join(1.0)  # a process that the script left behind may hold the pipe
        self._leave(self._ended(code))

    def _meet(self) -> tuple[RankPlace, str]:
        """Where rank 0's process is going to listen, and the GPUs of this node's ranks: each of
        them sees all, as under torchrun, and LOCAL_RANK chooses."""
        if self.rank == 0:
            with socket.create_connection(self.rendezvous.store) as line:
                address = line.getsockname()[0]
            self.store.set("place", f"{address} {free_port(address)}")
        own = os.environ.get(GPUS, "")
        ranks = [k for k, other in enumerate(self.plan.ranks) if other.node_id == self.me.node_id]
        if own and len(ranks) > 1:
            self.store.set(f"gpus/{self.rank}", own)
            own = ",".join(self._get(f"gpus/{rank}") for rank in ranks)
        address, port = self._get("place").split()
        return RankPlace.of(self.plan, self.me, address=address, port=int(port)), own

    def _get(self, key: str) -> str:
        """Waits until another rank has said it. Raises Left, RuntimeError."""
        until_s = time.monotonic() + self.rendezvous.timeout_s
        for _ in naps(self.store, key):  # a wait that ends in vain is reported in the output
            if self._asked:
                raise Left
            if time.monotonic() > until_s:
                raise TimeoutError(f"rank {self.rank} has waited in vain for the others")
        return str(self.store.get(key).decode())

    def _start(self, place: RankPlace, gpus: str) -> subprocess.Popen[str]:
        run = self.run_uri.rpartition("/")[2]
        environment = os.environ | place.environment(run) | {PARENT: str(os.getpid())}
        # into a pipe it would print by blocks, and its steps came late
        environment.setdefault("PYTHONUNBUFFERED", "1")
        environment["PYTHONPATH"] = python_path()
        if gpus:
            environment[GPUS] = gpus
        elif not visible_gpus():
            environment.setdefault(*ON_CPUS)
        file, cwd = here(self.job.script or "", self.job.cwd)
        environment[RESTARTED] = file
        theirs: list[socket.socket] = []
        text = ""
        with suppress(OSError):  # the child says so
            text = Path(file).read_text(errors="replace")
        if RAY_TRAIN.search(text):
            line, told = self._begin_questions(place)
            theirs.append(line)
            environment[QUESTIONS] = json.dumps(told)
        with self._lock:
            if self._asked:
                raise Left
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "elastic.cluster.ray_train.script_child", file,
                *self.job.args], cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                pass_fds=[one.fileno() for one in theirs], stdout=subprocess.PIPE,
                # one pipe: what a line says may follow from the one before on the other stream
                stderr=subprocess.STDOUT, text=True, errors="replace",
            )  # fmt: skip
        for one in theirs:
            one.close()
        return self._child

    def _begin_questions(self, place: RankPlace) -> tuple[socket.socket, dict[str, Any]]:
        """The script's end of a line to this process, and what goes to it with that. Raises Left,
        OSError, RuntimeError."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from elastic.worker.process_groups import rendezvous

        checkpoint, store = "", None
        if self.rank == 0:
            checkpoint = ReportedCheckpoints(open_storage(self.run_uri)).newest()
        if place.world > 1:
            if self.rank == 0:
                tcp = rendezvous.host_store(place.address)
                self.store.set("questions", json.dumps([tcp.port, checkpoint]))
            else:
                port, checkpoint = json.loads(self._get("questions"))
                tcp, _ = rendezvous.connect_store(place.address, port, lambda: self._asked)
                tcp.set_timeout(timedelta(seconds=rendezvous.STORE_S))
            prefix = rendezvous.place(self.plan.generation, self.rendezvous.secret)
            store = PrefixStore(prefix, tcp)
        self._questions = Questions(
            self.rank, place.world, store, notice=lambda: self._notice, over=lambda: self.over
        )
        mine, theirs = socket.socketpair()
        threading.Thread(
            target=self._questions.answer, args=(mine,), name="questions", daemon=True
        ).start()
        self._remove_copies(place, older=True)
        return theirs, {
            "socket": theirs.fileno(), "run_uri": self.run_uri, "checkpoint": checkpoint,
            "generation": self.plan.generation, "resumed": bool(self.plan.resume.step),
            "copies": str(self._copies),
        }  # fmt: skip

    @property
    def _copies(self) -> Path:
        """Where the ranks of this node keep a checkpoint that they have fetched."""
        return copies_of(self.run_uri, self.me.node_id) / str(self.plan.generation)

    def _remove_copies(self, place: RankPlace, older: bool = False) -> None:
        """The first rank of a node does it for all."""
        if place.local_rank == 0 and self._questions is not None:
            remove_copies(self._copies.parent, but=self._copies.name if older else "")
            if older:
                remove_left(self._copies.parent)

    def _look(self, child: subprocess.Popen[str], place: RankPlace) -> None:
        now_s = time.monotonic()
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            child.kill()
        left_s = self._noticed_until_s - now_s
        if left_s > 0 and not self._asked and listens(child.pid, signal.SIGTERM):
            self.end(left_s)
        if self.rank:
            return
        with self._lock:
            if self._met_s is None and (place.world == 1 or n_guests(place.port) >= place.world):
                # where steps were printed before, the first one that is printed now shows from
                # where the script continues
                self._met_s = now_s
                self.put(Progress(self.me, self.plan.generation, "supervising"))
                if not self.plan.resume.step:
                    self._enter(0, now_s)
            if (
                self._met_s is not None
                and self._entered_s is None
                and now_s - self._met_s > FIRST_STEP_S
            ):
                self._enter(self.plan.resume.step, now_s)
            if self._entered_s is not None and now_s - self._told_s >= RAN_EVERY_S:
                self._ran(now_s)

    # ------------------------------------------------------------------------------- what it tells

    def _enter(self, step: int, now_s: float) -> None:
        if not self._asked:
            self._entered_s = self._told_s = now_s
            self.step = step
            self.put(PlanEntered(self.plan.generation, step))

    def _ran(self, now_s: float) -> None:
        """Of a script that prints no steps; while it saves because it was asked to end, it does not
        train."""
        if self._entered_s is not None and not self._has_steps and not self._asked:
            self._told_s = now_s
            self.put(GroupRan(self.plan.generation))

    def _read(self, stream: IO[str]) -> None:
        """All that the process prints is printed by this one, whose output is kept."""
        steps = StepReader(self.epochs, self.plan.resume.step + self.gap)
        with stream:
            for line in stream:
                with suppress(OSError):  # a full disk
                    os.write(1, line.encode(errors="replace"))
                if line.strip() and not BAR.search(line):
                    self._tail.append(line.rstrip("\n"))
                if self.rank == 0 and (found := steps.read(line.rstrip("\n"))) is not None:
                    with self._lock:
                        self._stepped(*found, time.monotonic(), logged=steps.taken())
                if self.rank == 0 and steps.note:
                    with suppress(OSError):
                        os.write(1, f"{steps.note}\n".encode())
                    steps.note = ""
                while self.rank == 0 and steps.evaluations:
                    at, loss = steps.evaluations.pop(0)
                    with self._lock:
                        if self._entered_s is not None:
                            told = {"validation_loss": loss}
                            self.put(Evaluated(self.plan.generation, at, told))

    def _stepped(
        self, step: int, train_loss: float, now_s: float, *, logged: dict[str, float]
    ) -> None:
        if self._has_steps and step <= self.step:
            return
        if self._has_steps:
            self.gap = step - self.step
        if self._entered_s is None:
            self._met_s = self._met_s or now_s
            self._enter(max(0, min(step - self.gap, self.plan.resume.step)), now_s)
        if self._entered_s is None:
            return
        took_s = max(0.0, now_s - self._told_s)
        done = StepDone(self.plan.generation, step, train_loss, 0, took_s, logged=logged)
        self.put(done)
        self.step, self._told_s, self._has_steps = step, now_s, True

    def _ended(self, code: int) -> list[Event]:
        """What is to be said of its end, unless it was asked for."""
        with self._lock:
            if self.rank == 0 and not self._asked:
                if self._entered_s is None and code == 0:
                    self._enter(self.plan.resume.step, time.monotonic())
                if code == 0 and self._entered_s is not None:
                    self.put(GroupRan(self.plan.generation))
                self._ran(time.monotonic())
        if code == 0:
            return [ScriptEnded(self.me, self.plan.generation)]
        if code == -signal.SIGKILL:
            why = f"the process of rank {self.rank} was killed from outside (signal 9)"
            return [self._failed("infrastructure", why)]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = error_part("\n".join(self._tail)).strip().splitlines()[-1:] or ["it wrote nothing"]
        unreached = code == UNREACHED and self._questions is not None
        kind = "infrastructure" if unreached else "program"
        return [self._failed(kind, f"rank {self.rank} ({how}): {last[0].strip()}")]

    def _failed(self, kind: Any, why: str) -> WorkerFailed:
        return WorkerFailed(self.me, self.plan.generation, kind, why)


def here(file: str, cwd: str) -> tuple[str, str]:
    """The script and the folder to run it in, on this node: as on the driver's, or else in a
    submitted job's working directory, which lies elsewhere on each node and is where a Ray worker
    runs."""
    if os.path.isfile(file):
        return file, cwd if os.path.isdir(cwd) else os.getcwd()
    return os.path.join(os.getcwd(), os.path.relpath(file, cwd)), os.getcwd()


def n_guests(port: int) -> int:
    """Connections that the listener on a port of this machine has now."""
    found = 0
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net", name)
        rows = path.read_text().splitlines()[1:] if path.is_file() else []
        cells = [row.split() for row in rows]
        found += sum(
            row[3] == ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port for row in cells
        )
    return found


def listens(pid: int, number: int) -> bool:
    """Has the process a handler for the signal?"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
