"""What there is to run on: GPUs or processes, and the environment of each rank."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING, Any, Literal

from elastic import __version__
from elastic.certify.tasks import HERE
from elastic.errors import SpecError

if TYPE_CHECKING:
    from elastic.cluster.nodes.providers import RayNode
    from elastic.cluster.workers.remote_processes import Seat

Kind = Literal["cpu-gloo", "one-gpu", "several-gpus"]
CPU_RANKS, SHARED_RANKS = 4, 4
MOST_RANKS = 64
NO_RAY = "not used"
# lets NCCL put several ranks on one GPU: each claims to be a host of its own, and they talk through
# sockets
SHARED = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Place:
    """`ranks`: how many processes the checks use. `gpus`: indices of the GPUs; with one, all ranks
    share it.

    On a user's own Ray cluster: its `address`, its `nodes` that are used, and a seat for each rank;
    the indices mean nothing.
    """

    kind: Kind
    ranks: int
    gpus: tuple[str, ...] = ()
    gpu_names: tuple[str, ...] = ()
    ray: bool = False
    address: str = ""
    nodes: tuple[RayNode, ...] = ()
    seats: tuple[Seat, ...] = ()

    @property
    def shared(self) -> bool:
        """Do several ranks share the only GPU?"""
        return self.kind == "one-gpu" and self.ranks > 1

    @property
    def where(self) -> str:
        """What the checks with worker processes run on."""
        n = len({seat.ray_id for seat in self.seats})
        return f"{n} node{'s' * (n > 1)} of the cluster" if self.address else HERE

    def environments(self) -> list[dict[str, str]]:
        """Of each rank, over what it inherits."""
        if self.address:
            return [{} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""} for _ in range(self.ranks)]
        if not self.gpus:
            return [dict(NO_GPU) for _ in range(self.ranks)]
        if self.shared:
            own = {"CUDA_VISIBLE_DEVICES": self.gpus[0], "GLOO_SOCKET_IFNAME": "lo"}
            return [
                {**own, **SHARED, "NCCL_HOSTID": f"certify-rank-{i}"} for i in range(self.ranks)
            ]
        return [
            {"CUDA_VISIBLE_DEVICES": self.gpus[i], "GLOO_SOCKET_IFNAME": "lo"}
            for i in range(self.ranks)
        ]

    def plain(self, storage: str) -> dict[str, Any]:
        """For the result, which may be published: of the storage only its kind, of nodes no
        address."""
        ray, at = (
            _version("ray") if self.ray else NO_RAY,
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
        kind = storage.partition("://")[0] if "://" in storage else "a local folder"
        return {
            "kind": self.kind, "on": self._on(), "ranks": self.ranks, "gpus": list(self.gpu_names),
            "ray": ray, "storage": kind, "torch": _version("torch"),
            "python": platform.python_version(), "elastic": __version__, "cpus": _cpus(),
            "load_1min": round(os.getloadavg()[0], 2), "at": at,
        }  # fmt: skip

    def _on(self) -> str:
        """This host, or the nodes of the cluster and how many ranks each has."""
        if not self.address:
            return HERE
        hosts = list(dict.fromkeys(seat.host for seat in self.seats))
        names = dict.fromkeys((seat.node, hosts.index(seat.host)) for seat in self.seats)
        each = [
            f"{node} ({sum(s.node == node for s in self.seats)} ranks, host {i + 1})"
            for node, i in names
        ]
        return f"a Ray cluster that was there: {', '.join(each)}"


def find(gpus: int | None, no_ray: bool) -> Place:
    """This host. `gpus`: how many to use (0 = none, CPU); on a machine without any: how many
    processes. Raises SpecError."""
    seen = _visible()
    names = tuple(name for _, name in seen)
    ray = (
        not no_ray and util.find_spec("ray") is not None and util.find_spec("pydantic") is not None
    )
    if not seen or gpus == 0:
        ranks = gpus or CPU_RANKS
        if ranks > MOST_RANKS:
            raise SpecError(f"--gpus {gpus}: at most {MOST_RANKS} ranks on one host")
        return Place("cpu-gloo", ranks, ray=ray)
    n = len(seen) if gpus is None else gpus
    if n > len(seen):
        raise SpecError(
            f"--gpus {n}: this machine has {len(seen)} ({', '.join(names)}); give at most that "
            "many, or 0 for the CPU"
        )
    chosen = tuple(index for index, _ in seen[:n])
    if n == 1:
        return Place("one-gpu", SHARED_RANKS, chosen, names[:1], ray)
    return Place("several-gpus", n, chosen, names[:n], ray)


def _visible() -> list[tuple[str, str]]:
    """(index as CUDA_VISIBLE_DEVICES takes it, name) of the GPUs that torch sees. Raises SpecError
    where torch is missing."""
    if util.find_spec("torch") is None:
        raise SpecError(
            f"torch is not installed for {sys.executable}; certify checks what it does on this "
            "machine"
        )
    import torch

    if not torch.cuda.is_available():
        return []
    given = [
        part.strip()
        for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if part.strip()
    ]
    n = torch.cuda.device_count()
    indices = given[:n] if len(given) >= n else [str(i) for i in range(n)]
    return [(indices[i], torch.cuda.get_device_name(i)) for i in range(n)]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
