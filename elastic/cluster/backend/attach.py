"""What the driver before has left: the workers that outlived it, and the plans that these may still
run."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.workers.worker_actor import WorkerInfo
from elastic.cluster.workers.worker_group import WorkerGroup
from elastic.types import DigestChecked, Event, Plan, StepDone, WorkerFailed, WorkerId


@dataclass
class Attached:
    """`plans`: those that are written down, then `found`: those that only the workers tell of,
    since they were ordered while storage was away; the newest last."""

    run: RayRun
    worker_group: WorkerGroup
    outlives: bool
    plans: tuple[Plan, ...] = field(init=False)
    found: tuple[Plan, ...] = field(init=False)
    _worker_infos: list[WorkerInfo] = field(init=False)
    _written: int = field(init=False)  # the newest generation that is

    def __post_init__(self) -> None:
        self._worker_infos = self.worker_group.adopt(self.run.attach) if self.outlives else []
        self._written = max((plan.generation for plan in self.run.plans), default=0)
        self.found = self.worker_group.plans_after(self._written)
        self.plans = (*self.run.plans, *self.found)

    @property
    def places(self) -> dict[str, str]:
        """Ray id -> pool of the nodes on which workers were found."""
        return {info.ray_id: info.pool for info in self._worker_infos if info.ray_id}

    def take(self, node_id: str) -> list[WorkerInfo]:
        """Of the workers on a node that has arrived."""
        found = [info for info in self._worker_infos if info.me.node_id == node_id]
        self._worker_infos = [info for info in self._worker_infos if info not in found]
        return found

    def elsewhere(self, nodes: dict[str, object]) -> list[WorkerId]:
        """Workers on nodes that are not among these."""
        return [info.me for info in self._worker_infos if info.me.node_id not in nodes]

    def is_known(self, message: Event) -> bool:
        """Workers tell a new driver their newest steps again, and what was found of their content;
        most of it its predecessor has written down, and bad news may come twice."""
        if isinstance(message, DigestChecked):
            return message.ok and message.generation <= self._written
        return (
            isinstance(message, StepDone)
            and message.generation <= self._written
            and message.step <= self.run.step
        )

    def missed(self, node_id: str) -> list[Event]:
        """Workers that the last plan names on this node and that did not outlive its driver."""
        if not self.plans:
            return []
        there, outdated = self.worker_group.workers(node_id), self.worker_group.outdated
        known = dict.fromkeys((*self.plans[-1].ranks, *outdated))
        gone = [worker for worker in known if worker.node_id == node_id and worker not in there]
        why = {
            worker: f"it was replaced when the driver came back: it ran {text}"
            for worker, text in outdated.items()
        }
        lost = "it was gone when the driver came back"
        return [WorkerFailed(worker, 0, "process", why.get(worker, lost)) for worker in gone]
