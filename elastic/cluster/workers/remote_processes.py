"""Processes on the nodes of an existing Ray cluster, for checks: an object in each, called in
order, whose messages come back through a pipe; and commands that run there. Nodes and raylets are
left alone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.nodes.providers import RayNode, living
from elastic.cluster.ray import _ray_private, processes
from elastic.cluster.ray.address import check_reachable, unreachable
from elastic.worker.hosting.served_session import imported
from elastic.worker.process.environment import die_with_parent, settle

NAMESPACE = "elastic-remote-processes"
POLL_S = 0.5
PORT_MOST_S = 60.0  # until a node has said which port is free
GONE_MOST_S = 10.0


@dataclass(frozen=True)
class Seat:
    """Where one process stands: a node as Ray knows it, its name and address; `on_gpu`: it takes a
    GPU, else a CPU."""

    ray_id: str
    node: str
    host: str
    on_gpu: bool


@dataclass(frozen=True)
class ProcessOrder:
    """What a process hosts: `made_by` (module:name) is called with a function that takes messages,
    then `arguments`."""

    made_by: str
    arguments: tuple[Any, ...] = ()
    environment: Mapping[str, str] | None = None


def connect(address: str) -> list[RayNode]:
    """Connects this process to the cluster; its living nodes. Raises SpecError."""
    check_reachable(address)
    try:
        if not ray.is_initialized():
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
            _ray_private.mute_errors()
        return living()
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise unreachable(address, error) from error


def disconnect() -> None:
    ray.shutdown()


def own_address() -> str:
    """Of this host, as the nodes reach it."""
    return str(ray.util.get_node_ip_address())


# ------------------------------------------------------------------------------------------ there


class _Hosted:
    """The actor around one object."""

    def __init__(self, order: ProcessOrder) -> None:
        os.environ.update(order.environment or {})
        settle()
        self.news: list[tuple[int, Any]] = []
        self.n = 0
        self.lock = threading.Condition()
        self.it = imported(order.made_by)(self._put, *order.arguments)

    def _put(self, message: Any) -> None:
        with self.lock:
            self.n += 1
            self.news.append((self.n, message))
            self.lock.notify_all()

    @ray.method(concurrency_group="orders")
    def call(self, word: Any) -> None:
        """One after the other. An error ends the process, as it would end one without Ray."""
        try:
            self.it(word)
        except Exception:  # noqa: BLE001 - the boundary of the process
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    @ray.method(concurrency_group="polls")
    def poll(self, ack: int, wait_s: float) -> list[tuple[int, Any]]:
        """Messages after `ack`, as soon as there are any."""
        with self.lock:
            self.news = [(n, message) for n, message in self.news if n > ack]
            if not self.news:
                self.lock.wait(wait_s)
            return list(self.news)

    @ray.method(concurrency_group="polls")
    def pid(self) -> int:
        return os.getpid()


class _NodeSignals:
    """On a node, always ready: signals to processes there."""

    def signal(self, pid: int, number: int) -> bool:
        return bool(processes.send([pid], number))


def _command(
    words: Sequence[str], environment: Mapping[str, str], most_s: float
) -> tuple[int, str]:
    """Exit code and output of `python WORDS`; -9 where it was ended after `most_s`."""
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment},
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=most_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
    finally:
        process.kill()
    return int(process.returncode), out


# ------------------------------------------------------------------------------------------ here


def _on(seat: Seat, takes_place: bool = True) -> dict[str, Any]:
    """Ray's options for something that runs at a seat."""
    where = NodeAffinitySchedulingStrategy(seat.ray_id, soft=False)
    need = {"num_gpus": 1} if seat.on_gpu else {"num_cpus": 1}
    return {"num_cpus": 0, **(need if takes_place else {}), "scheduling_strategy": where}


class ProcessSignals:
    """One on each node, started once."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        hand: Any = ray.remote(_NodeSignals)
        nodes = {seat.ray_id: seat for seat in seats}
        self._hands = {
            ray_id: hand.options(**_on(seat, False)).remote() for ray_id, seat in nodes.items()
        }

    def signal(self, seat: Seat, pid: int, number: int) -> None:
        """Returns when it is sent."""
        try:
            ray.get(self._hands[seat.ray_id].signal.remote(pid, number), timeout=GONE_MOST_S)
        except RayError:  # the node is gone, and the process with it
            return

    def close(self) -> None:
        for hand in self._hands.values():
            ray.kill(hand)


class RemoteProcess:
    """One process at a seat. `pipe` gives its messages, and ends with it."""

    def __init__(self, seat: Seat, hands: ProcessSignals, order: ProcessOrder) -> None:
        self.seat, self.hands = seat, hands
        remote: Any = ray.remote  # its types do not know of groups
        hosted = remote(concurrency_groups={"orders": 1, "polls": 2})(_Hosted)
        self._actor = hosted.options(**_on(seat)).remote(order)
        self._pid = 0
        self._known, self._gone = threading.Event(), threading.Event()
        self._why = ""
        self.pipe, self._into = Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._relay, name="elastic-remote-process", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self._gone.is_set()

    def ready(self, timeout_s: float) -> str:
        """Waits until the process is there; why it is not, '' = it is."""
        if self._known.wait(timeout_s):
            return self._why
        kind = "GPU" if self.seat.on_gpu else "CPU"
        return (
            f"node {self.seat.node} gave no process with a free {kind} within {timeout_s:.0f} s: "
            "is the cluster in use?"
        )

    def send(self, word: Any) -> None:
        self._actor.call.remote(word)

    def signal(self, number: int) -> None:
        self._known.wait(GONE_MOST_S)
        if self._pid:
            self.hands.signal(self.seat, self._pid, number)

    def end(self) -> None:
        """SIGKILL, also where it is stopped; and Ray forgets it."""
        if self._pid and not self.ended:
            self.signal(signal.SIGKILL)
        ray.kill(self._actor)

    def join(self) -> None:
        self._thread.join(GONE_MOST_S)

    def _relay(self) -> None:
        ack = 0
        try:
            self._pid = int(ray.get(self._actor.pid.remote()))
            self._known.set()
            while True:
                for number, message in ray.get(self._actor.poll.remote(ack, POLL_S)):
                    ack = number
                    self._into.send(message)
        except (RayError, OSError) as error:  # the process is gone, or nobody reads any more
            if not self._known.is_set():
                self._why = (
                    f"node {self.seat.node}: no process: {' '.join(str(error).split())[:300]}"
                )
        self._gone.set()
        self._known.set()
        self._into.close()


@dataclass(frozen=True)
class RemoteCommand:
    """`python WORDS` at each seat at once, with its environment."""

    words: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]
    most_s: float


def free_port(seat: Seat) -> int:
    """On the node, a moment ago."""
    task: Any = ray.remote(processes.free_port)
    return int(ray.get(task.options(**_on(seat, False)).remote(), timeout=PORT_MOST_S))


def run(
    seats: Sequence[Seat], remote_command: RemoteCommand, look: Callable[[], None]
) -> list[tuple[int, str]]:
    """Exit code and output of each; `look` is called while it waits and may raise, which ends them.
    Where one has failed, those that wait for it are ended and left out. Raises TimeoutError."""
    task: Any = ray.remote(_command)
    refs = [
        task.options(**_on(seat, seat.on_gpu), max_retries=0).remote(
            remote_command.words, dict(environment), remote_command.most_s
        )
        for seat, environment in zip(seats, remote_command.environments, strict=True)
    ]
    try:
        end_s = time.monotonic() + remote_command.most_s + GONE_MOST_S
        done: dict[Any, tuple[int, str]] = {}
        while len(done) < len(refs):
            ready, _ = ray.wait([ref for ref in refs if ref not in done], timeout=0.2)
            done |= {ref: ray.get(ref) for ref in ready}
            if not ready and any(code for code, _ in done.values()):
                break
            look()
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"{' '.join(remote_command.words)} did not end within "
                    f"{remote_command.most_s:.0f} s"
                )
        return list(done.values())
    finally:
        for ref in refs:
            ray.cancel(ref, force=True)
