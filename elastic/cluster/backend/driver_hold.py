"""The driver's hold on its run and on the cluster: how it connects, how it learns that one of them
is lost, and how it lets go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import ray

from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.local.local_cluster import LocalCluster
from elastic.cluster.nodes.providers import described, living
from elastic.cluster.ray import _ray_private
from elastic.cluster.ray.address import NO_NODE, check_no_client, unreachable
from elastic.cluster.workers.worker_group import WorkerGroup
from elastic.errors import LostContact, SpecError
from elastic.worker.hosting.hosting_backend import HostingBackend


def connect(run: RayRun, cluster: LocalCluster | None) -> bool:
    """True = ray.init was ours. Raises LostContact where nobody answers for the cluster, SpecError
    where this process is on none of its nodes, or its GPUs would be left idle."""
    check_no_client()
    ours = not ray.is_initialized()
    if ours and cluster is not None:
        cluster.connect(run.namespace)
    elif ours:
        try:
            _ray_private.connect(run.address, run.namespace)
        except (OSError, RuntimeError) as error:
            if NO_NODE in str(error):
                raise unreachable(run.address, error) from error
            raise LostContact(
                f"run '{run.name}': the Ray cluster at {run.address} does not answer "
                f"({type(error).__name__}: {error}); run it again when its head does"
            ) from error
    if ours:
        _ray_private.mute_errors()
    idle = [node for node in living() if node.gpus] if run.default_pools and not cluster else []
    if idle:
        if ours:
            ray.shutdown()
        raise SpecError(
            f"run '{run.name}': its job names no pools, so that it would train on CPUs, and the "
            f"Ray cluster has GPUs, as {described(idle[0])}; give --cluster FILE, or pools with "
            "their accelerator_type (CPU where CPUs are meant)"
        )
    return ours


@dataclass
class DriverHold:
    """`cluster`: the embedded one, ended by `close`. `holder`: has the lease, which `close`
    releases. `connected`: what `connect` said. `let_go`: another driver has the run, or is to
    attach to it."""

    run: RayRun
    cluster: LocalCluster | None
    holder: HostingBackend
    worker_group: WorkerGroup
    connected: bool
    let_go: bool = False

    def check(self, head_lost: str) -> None:
        """This driver still holds the run, and its cluster stands. Raises LostContact.
        `head_lost`: why the head is taken for lost."""
        if self.holder.lease is not None and self.holder.lease.lost:
            self.replaced(self.successor())
        if self.cluster is not None and self.cluster.ended:
            self._lost("the process that keeps it was killed")
        if head_lost:
            self._lost(head_lost)

    def _lost(self, why: str) -> NoReturn:
        """The workers of a cluster that others keep are left alone: they may outlive its head."""
        self.let_go = self.cluster is None
        which = f"Ray cluster at {self.run.address}" if self.let_go else "embedded Ray cluster"
        raise LostContact(
            f"run '{self.run.name}': the {which} is lost: {why}; run it again with this "
            "--run-name to resume"
        )

    def successor(self) -> str:
        """Whether another driver has the run, and who says so; '' = nobody does. Where storage
        cannot tell, the workers are asked: a driver that takes over attaches to them first. The
        embedded cluster's are this driver's alone."""
        if self.holder.lease is not None and self.holder.lease.lost:
            return f"its lease (epoch {self.holder.lease.epoch}) was taken over"
        asked = self.cluster is None and not self.holder.certain and not self.let_go
        return self.worker_group.replaced() if asked else ""

    def replaced(self, why: str) -> NoReturn:
        """Another driver has the run. Raises LostContact."""
        self.let_go = True
        if self.holder.lease is not None:
            self.holder.lease.give_up()
        raise LostContact(
            f"run '{self.run.name}': this driver ends, another one drives the run: {why}"
        )

    def close(self) -> None:
        """Disconnects, ends the embedded cluster, and releases the lease where the run is still
        this driver's."""
        if self.connected and self.cluster is not None:
            self.cluster.disconnect()
        elif self.connected:
            ray.shutdown()
        if self.cluster is not None:
            self.cluster.close()
        if self.holder.lease is not None and not self.let_go:
            self.holder.lease.release()
