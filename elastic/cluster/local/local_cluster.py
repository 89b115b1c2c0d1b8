"""The embedded cluster: several real Ray nodes on this machine, gone with the driver.

`LocalCluster` is the driver's side. It starts the keeper (supervisor.py), which starts this module
as the cluster process; the two speak JSON lines. Nodes stand on loopback, in a folder of their own,
with a token of their own, and know nothing of other Ray clusters here.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastic.cluster.local import cluster_token, fork_client, fork_server
from elastic.cluster.ray import processes
from elastic.errors import InternalError
from elastic.version import python_path
from elastic.worker.process.environment import AT_START

# by this very name Ray listens on loopback only; for any other address on all interfaces
HOST = "127.0.0.1"
START_MOST_S = 120.0
CLOSE_MOST_S = 15.0
STORE_BYTES = 80 << 20  # Ray's object store: state never travels through it
LOOK_S = 0.2
# a raylet whose port refuses is dead after about 2 s; one that a busy machine holds up has 30 s
SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 3,
}  # fmt: skip
WORKER_ENVIRONMENT = {  # all of its ranks are on this machine
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **AT_START,
}  # fmt: skip
REAPED_MOST_S, REAP_LOOK_S = 0.5, 0.01  # until a process that is gone is known to be
LOG_TAIL = 2000  # bytes of the cluster process's log that go into an error


@dataclass(frozen=True)
class NodeOrder:
    """A node to start: `cpus` workers fit on it; `gpus`: by CUDA_VISIBLE_DEVICES' names;
    `environment`: of its processes."""

    name: str
    cpus: int
    labels: dict[str, str] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def visible_gpus(machine: Path = Path("/")) -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: indices, or
    UUIDs of GPUs and of their MIG parts. As CUDA does it, what comes behind a name that is none is
    not seen either."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        named = (part.strip() for part in chosen.split(","))
        return tuple(
            takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), named)
        )
    known = machine / "proc/driver/nvidia/gpus"
    devices = known.iterdir() if known.is_dir() else (machine / "dev").glob("nvidia[0-9]*")
    return tuple(str(k) for k in range(len(list(devices))))


class LocalCluster:
    """The driver's side. The constructor returns at once; `address` waits until the head is up.

    `python_path`: folders that the workers can import from, besides this package's and this
    process's own PYTHONPATH.
    """

    def __init__(self, python_path: Sequence[str] = ()) -> None:
        self._answers: dict[int, Future[dict[str, Any]]] = {0: Future()}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended = False
        self._connected: ExitStack | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.cluster.local.supervisor"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True,
            env=_environment(python_path),
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="embedded-cluster", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the keeper."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """The keeper or the cluster process is gone, and all nodes with them."""
        return self._ended

    @property
    def address(self) -> str:
        """Of the head, as ray.init takes it."""
        return str(self._hello()["address"])

    @property
    def folder(self) -> str:
        """Where sockets and logs lie while the cluster stands."""
        return str(self._hello()["folder"])

    @property
    def environment(self) -> dict[str, str]:
        """Of other processes that are to connect to it: where its token is."""
        return cluster_token.environment(self.folder)

    @contextmanager
    def introduced(self) -> Iterator[None]:
        """Meanwhile this process, whose environment is then `environment`, may connect to the
        cluster by its address."""
        from elastic.cluster.ray._ray_private import read_environment_again

        with ExitStack() as stack:
            stack.callback(read_environment_again)
            stack.enter_context(cluster_token.replaced(self.environment))
            read_environment_again()
            yield

    def connect(self, namespace: str) -> None:
        """ray.init; this process is introduced until `disconnect`."""
        from elastic.cluster.ray import _ray_private

        with ExitStack() as stack:
            stack.enter_context(self.introduced())
            _ray_private.connect(self.address, namespace, HOST)
            self._connected = stack.pop_all()

    def disconnect(self) -> None:
        """ray.shutdown; this process may then connect to another cluster."""
        import ray

        ray.shutdown()
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.close()

    def _hello(self) -> dict[str, Any]:
        return self._answers[0].result(START_MOST_S)

    def add(self, order: NodeOrder) -> Future[dict[str, Any]]:
        """Starts a node; the answer has its Ray id as "ray_id" and "pid" of its raylet."""
        return self._ask("add", **asdict(order))

    def kill(self, name: str) -> Future[dict[str, Any]]:
        """SIGKILL for all processes of the node at once; the answer lists them as "pids"."""
        return self._ask("kill", name=name)

    def pids(self) -> list[int]:
        """Every process of the cluster, the keeper first."""
        return [self.pid, *processes.descendants(self.pid)]

    def errors_of(self, pid: int) -> str:
        """What a worker process has written to its standard error, before that was taken over."""
        files = Path(self.folder).glob(f"ray/session_latest/logs/worker-*-{pid}.err")
        return "\n".join(file.read_text(errors="replace") for file in files)

    def killed_by(self, pid: int) -> int:
        """The number of the signal that has ended a worker process; 0 = none, or not known: it was
        no fork. Ray may tell of its end before who has forked it does."""
        until_s = time.monotonic() + REAPED_MOST_S
        while True:
            awaited = fork_server.is_fork(self.folder, pid) and time.monotonic() < until_s
            if (number := fork_server.killed_by(self.folder, pid)) or not awaited:
                return number
            time.sleep(REAP_LOOK_S)

    def close(self) -> None:
        """Ends every process of the cluster and removes its folder."""
        if self._connected is not None:
            self.disconnect()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(CLOSE_MOST_S)
        except subprocess.TimeoutExpired:
            processes.end_tree(self.pid)
            self._process.wait()
        self._reader.join(CLOSE_MOST_S)
        # whoever holds its other end keeps the reader, and with it this one
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, do: str, **values: Any) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._ended:
                answer.set_exception(InternalError("the embedded cluster has ended"))
                return answer
            self._answers[number] = answer
            try:
                assert self._process.stdin is not None
                text = json.dumps({"number": number, "do": do, **values})
                print(text, file=self._process.stdin, flush=True)
            except (OSError, ValueError) as error:
                said = f"the embedded cluster does not listen: {error}"
                answer.set_exception(InternalError(said))
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            answer = self._answers.get(message["number"])
            if answer is None or answer.done():
                continue
            if "error" in message:
                answer.set_exception(InternalError(f"embedded cluster: {message['error']}"))
            else:
                answer.set_result(message)
        with self._lock:
            self._ended = True
            text = "the embedded cluster has ended before it answered"
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(InternalError(text))


def _environment(folders: Sequence[str]) -> dict[str, str]:
    """Of the keeper, and so of all nodes and workers."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_ADDRESS", cluster_token.INSTEAD)
    }
    return {**WORKER_ENVIRONMENT, **inherited, "PYTHONPATH": python_path(*folders)}


# ------------------------------------------------------------------------------ the cluster process


class _Nodes:
    """ray.cluster_utils.Cluster behind JSON lines. Nodes start in threads, several at once."""

    def __init__(self, folder: str, out: Any) -> None:
        # the file that `address="auto"` reads is then not the one of other clusters here
        os.environ["RAY_TMPDIR"] = folder
        Path(folder, "ray").mkdir()
        from ray.cluster_utils import Cluster

        from elastic.cluster.ray._ray_private import leave_agents_out

        self.folder, self.out = folder, out
        leave_agents_out()
        self.worker = self._fork_server()
        self.cluster = Cluster(shutdown_at_exit=False)
        self.raylets: dict[str, int] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(max_workers=16)
        self._start(
            next(self.numbers),
            {
                "num_cpus": 0, "include_dashboard": False, "no_monitor": True,
                "_system_config": SYSTEM_CONFIG,
            },
        )  # fmt: skip
        self.answer(0, address=self.cluster.address, folder=folder)

    def _fork_server(self) -> dict[str, Any]:
        """Starts it; what a node gets to know of it. Nothing where there are GPUs: a fork beside
        CUDA was never tried."""
        if visible_gpus():
            return {}
        subprocess.Popen(
            [sys.executable, "-P", "-m", fork_server.__name__, self.folder, str(os.getpid())]
        )
        return {"worker_path": fork_client.__file__}

    def _start(self, n: int, values: Mapping[str, Any]) -> Any:
        """Sockets lie below Ray's own folder: it opens the folder of a socket to everyone (chmod
        0777)."""
        return self.cluster.add_node(
            node_ip_address=HOST, temp_dir=f"{self.folder}/ray", include_log_monitor=False,
            object_store_memory=STORE_BYTES, plasma_store_socket_name=f"{self.folder}/ray/s{n}",
            raylet_socket_name=f"{self.folder}/ray/r{n}", **self.worker, **values,
        )  # fmt: skip

    def answer(self, number: int, **values: Any) -> None:
        with self.lock:
            print(json.dumps({"number": number, **values}), file=self.out, flush=True)

    def obey(self, order: dict[str, Any]) -> None:
        number = order.pop("number")
        if order.pop("do") == "add":
            self.pool.submit(self._add, number, NodeOrder(**order))
        else:
            raylet = self.raylets.pop(order["name"], None)
            ended = processes.end_tree(raylet) if raylet is not None else []
            ended += processes.send(fork_server.forks_of(self.folder, ended))
            self.answer(number, pids=ended)

    def _add(self, number: int, order: NodeOrder) -> None:
        devices = ",".join(map(str, order.gpus))
        n = next(self.numbers)
        try:
            node = self._start(
                n,
                {
                    "num_cpus": order.cpus, "num_gpus": len(order.gpus), "labels": order.labels,
                    "env_vars": {**order.environment, "CUDA_VISIBLE_DEVICES": devices},
                },
            )  # fmt: skip
            raylet = node.all_processes["raylet"][0].process.pid
        except Exception as error:  # noqa: BLE001 - a boundary: the driver hears of it
            # a raylet that came too late must not join
            for pid in processes.descendants(os.getpid()):
                if f"--raylet_socket_name={self.folder}/ray/r{n}" in processes.command(pid):
                    processes.end_tree(pid)
            text = f"node {order.name} did not start: {type(error).__name__}: {error}"
            self.answer(number, error=text)
            return
        self.raylets[order.name] = raylet
        self.answer(number, ray_id=node.node_id, pid=raylet)


def main(folder: str, supervisor: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w")
    log = open(f"{folder}/cluster.log", "wb", buffering=0)  # noqa: SIM115 - until the end
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        nodes = _Nodes(folder, out)
        for order in _orders(supervisor):
            nodes.obey(order)
    except Exception as error:  # noqa: BLE001 - a boundary: the driver hears of it
        tail = Path(log.name).read_text(errors="replace")[-LOG_TAIL:]
        text = f"{type(error).__name__}: {error}; its log ends with: {tail}"
        print(json.dumps({"number": 0, "error": text}), file=out, flush=True)
    finally:
        if os.getppid() != supervisor:  # nobody else is left to do it
            processes.end_tree(os.getpid(), with_root=False)
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _orders(supervisor: int) -> Any:
    """Orders from the driver until the end of input or of the keeper."""
    rest = b""
    while os.getppid() == supervisor:
        if not select.select([0], [], [], LOOK_S)[0]:
            continue
        found = os.read(0, 1 << 16)
        if not found:
            return
        *lines, rest = (rest + found).split(b"\n")
        yield from (json.loads(line) for line in lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
