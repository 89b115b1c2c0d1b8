"""On each Ray Train worker: starts the user's script in a process of its own, with torchrun's
environment, and watches it.

`supervise` is what Ray Train runs. It ends without an error when the script ended well, and with
`Restart` when the driver says that the group is to be started over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from elastic.cluster.ray_train.script_child import PARENT, QUESTIONS
from elastic.cluster.ray_train.script_messages import (
    Ended,
    Formed,
    Hello,
    ScriptMessage,
    ScriptOrder,
    ScriptOutput,
)
from elastic.cluster.ray_train.script_output import BAR
from elastic.cluster.workers.output import FILE_BYTES, make_folder, open_log, prune

BOARD_MOST_S = 120.0  # without an answer of the driver's board
LOG_AGAIN_S = 10.0  # after a log could not be opened
LOOK_S, WORLD_PER_LOOK = 0.2, 32  # each supervisor speaks so often; more slowly in larger groups
TAIL_LINES, MOST_LINES = 40, 2000  # of output that are kept; that wait to be told
ESTABLISHED = "01"
TORCHELASTIC = {
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


class Restart(Exception):
    """The group is over; Ray Train starts the next one."""


@dataclass(frozen=True)
class ScriptTask:
    """What to run, and where to say how it goes. `logs`: a folder for the whole output of each
    rank."""

    file: str
    args: tuple[str, ...]
    cwd: str
    run: str
    board: str
    namespace: str
    logs: str
    asks_ray: bool  # the script uses ray.train


@dataclass(frozen=True)
class RankPlace:
    """This rank, and where the group meets."""

    group: int
    address: str
    port: int
    rank: int
    world: int
    local_rank: int
    local_world: int
    node_rank: int

    def environment(self, run: str) -> dict[str, str]:
        """What torchrun sets."""
        n_nodes = max(1, self.world // max(1, self.local_world))
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank), "LOCAL_WORLD_SIZE": str(self.local_world),
            "GROUP_RANK": str(self.node_rank), "NODE_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(n_nodes), "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world), "ROLE_NAME": "default", "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port), "TORCHELASTIC_RUN_ID": run, **TORCHELASTIC,
        }  # fmt: skip


def supervise(settings: dict[str, Any]) -> None:
    """The training function: `settings["orders"]` are Orders. Raises Restart."""
    orders: ScriptTask = settings["orders"]
    me = ray.train.get_context()
    rank = me.get_world_rank()
    group, address, port = broadcast_from_rank_zero(_meeting_place() if rank == 0 else None)
    sizes = (
        rank,
        me.get_world_size(),
        me.get_local_rank(),
        me.get_local_world_size(),
        me.get_node_rank(),
    )
    board = ray.get_actor(orders.board, namespace=orders.namespace)
    Supervisor(orders, RankPlace(group, address, port, *sizes), board).to_the_end()


def _meeting_place() -> tuple[int, str, int]:
    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        return time.time_ns(), address, int(free.getsockname()[1])


@dataclass
class Supervisor:
    orders: ScriptTask
    place: RankPlace
    board: Any
    _words: deque[ScriptMessage] = field(default_factory=deque)
    _said: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _reader: threading.Thread | None = None
    _n_orders: int = 0
    _asked: bool = False
    _kill_at_s: float | None = None
    _formed: bool = False
    _told_end: bool = False

    def to_the_end(self) -> None:
        child = self._start()
        place = self.place
        me = (place.group, place.rank, time.time())
        self._words.append(
            Hello(
                *me,
                place.world,
                place.local_rank,
                ray.get_runtime_context().get_node_id(),
                os.getpid(),
            )
        )
        try:
            while not self._over(child):
                time.sleep(LOOK_S * max(1.0, place.world / WORLD_PER_LOOK))
        finally:
            child.kill()

    def _start(self) -> subprocess.Popen[str]:
        environment = (
            os.environ | self.place.environment(self.orders.run) | {PARENT: str(os.getpid())}
        )
        # into a pipe it would print by blocks, and its steps came late
        environment.setdefault("PYTHONUNBUFFERED", "1")
        theirs: list[int] = []
        if self.orders.asks_ray:
            mine, other = socket.socketpair()
            theirs.append(other.fileno())
            environment[QUESTIONS] = str(other.fileno())
            threading.Thread(target=answer, args=(mine,), name="questions", daemon=True).start()
        file, cwd = here(self.orders.file, self.orders.cwd)
        child = subprocess.Popen(
            [sys.executable, "-m", "elastic.cluster.ray_train.script_child", file,
            *self.orders.args], cwd=cwd, env=environment, pass_fds=theirs, stdin=subprocess.DEVNULL,
            # one pipe: what a line says may follow from the one before on the other stream
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if theirs:
            other.close()
        log = ScriptLog(
            Path(self.orders.logs, f"{self.place.group // 10**6}-rank{self.place.rank}.log")
        )
        assert child.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(child.stdout, log), daemon=True)
        self._reader.start()
        return child

    def _read(self, stream: IO[str], log: ScriptLog) -> None:
        for line in stream:
            log.write(line)
            if line.strip() and not BAR.search(line):
                self._tail.append(line.rstrip("\n"))
            if self.place.rank == 0:
                self._said.append(line.rstrip("\n"))

    def _over(self, child: subprocess.Popen[str]) -> bool:
        """One look. Raises Restart."""
        code = child.poll()
        if code is None:
            self._watch(child)
        self._tell(code)
        orders: list[ScriptOrder] = self._exchange()
        for order in orders:
            if order.kind == "go":
                raise Restart("the nodes have changed; the script is started over")
            if order.kind == "leave":
                return True
            if code is None:
                self._end(child, order)
        return code == 0 and not self._asked

    def _tell(self, code: int | None) -> None:
        ended = code is not None and not self._told_end
        if ended and self._reader is not None:
            self._reader.join(1.0)  # a process that the script left behind may hold the pipe
        me = (self.place.group, self.place.rank, time.time())
        lines = [self._said.popleft() for _ in range(len(self._said))]
        if lines:
            self._words.append(ScriptOutput(*me, tuple(lines)))
        if ended and code is not None:
            self._words.append(Ended(*me, code, self._asked, "\n".join(self._tail)))
            self._told_end = True

    def _exchange(self) -> list[ScriptOrder]:
        words = list(self._words)
        answer = self.board.exchange.remote(
            self.place.group, self.place.rank, words, n_seen=self._n_orders
        )
        # without a driver this rank ends
        orders: list[ScriptOrder] = ray.get(answer, timeout=BOARD_MOST_S)
        self._words.clear()
        self._n_orders += len(orders)
        return orders

    def _watch(self, child: subprocess.Popen[str]) -> None:
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            child.kill()
        if (
            self.place.rank == 0
            and not self._formed
            and (self.place.world == 1 or n_guests(self.place.port) >= self.place.world)
        ):
            self._formed = True
            self._words.append(Formed(self.place.group, 0, time.time()))

    def _end(self, child: subprocess.Popen[str], order: ScriptOrder) -> None:
        if order.listeners and not listens(child.pid, signal.SIGTERM):
            return
        self._asked = True
        self._kill_at_s = time.monotonic() + order.grace_s
        child.send_signal(signal.SIGTERM)


class ScriptLog:
    """What a rank prints, up to FILE_BYTES and the file before it (`.1`). What cannot be written is
    left out: nobody waits for a full disk, least of all the script, whose pipe is read here."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._again_s = path, -1, 0.0
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        with self._lock, suppress(OSError):
            if self._file < 0 and time.monotonic() >= self._again_s:
                self._again_s = time.monotonic() + LOG_AGAIN_S
                make_folder(self._path.parent)
                prune(self._path.parent)
                self._file = open_log(self._path)
            if self._file >= 0:
                os.write(self._file, line.encode(errors="replace"))
                self._renew(os.fstat(self._file))

    def _renew(self, state: os.stat_result) -> None:
        if state.st_size > FILE_BYTES or not state.st_nlink:
            os.close(self._file)
            self._file, self._again_s = -1, 0.0
            if state.st_nlink:
                os.replace(self._path, f"{self._path}.1")


def here(file: str, cwd: str) -> tuple[str, str]:
    """The script and the folder to run it in, on this node: as on the driver's, or else in a
    submitted job's working directory, which lies elsewhere on each node and is where a Ray worker
    runs."""
    if os.path.isfile(file):
        return file, cwd if os.path.isdir(cwd) else os.getcwd()
    return os.path.join(os.getcwd(), os.path.relpath(file, cwd)), os.getcwd()


def answer(script: socket.socket) -> None:
    """Passes the script's questions on to Ray Train, one at a time, until the script ends."""
    with script, script.makefile("r") as questions:
        for _ in questions:
            info = ray.train.get_preemption_info()
            plain = (
                None
                if info is None
                else {"deadline_ms": info.deadline_ms, "ranks": info.preempted_node_to_ranks}
            )
            try:
                script.sendall(json.dumps(plain).encode() + b"\n")
            except OSError:  # it has ended meanwhile
                return


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
