"""The Backend on Ray: carries out actions on actors and nodes, and turns what they say into events.

Everything happens in `poll` and `execute`, in the driver's thread. Beside it run only: the survey
of the nodes, the lease, the start of actors, and signals to other hosts.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from elastic.cluster.backend import drills
from elastic.cluster.backend.attach import Attached
from elastic.cluster.backend.cloud_feed import CloudFeed
from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.cluster.backend.driver_hold import DriverHold, connect
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.local.local_cluster import LocalCluster
from elastic.cluster.nodes.autoscaler import provider_for
from elastic.cluster.nodes.demand import DemandReport, left_paid
from elastic.cluster.nodes.providers import EmbeddedNodes, NodeProvider
from elastic.cluster.nodes.survey import AWAY_MOST_S, Survey
from elastic.cluster.notices.notice_watchers import drain_in_ray
from elastic.cluster.workers.admission_links import Entrance
from elastic.cluster.workers.output import CALLS, LastWords, file_of, last_words
from elastic.cluster.workers.worker_actor import WorkerSetup
from elastic.cluster.workers.worker_group import (
    UNTOLD,
    BrokenWorker,
    Placement,
    PollAnswer,
    WorkerGroup,
)
from elastic.errors import SpecError
from elastic.ledger.lease import Lease
from elastic.policy.state.newest_steps import digested
from elastic.storage import open_storage
from elastic.text import memory_size
from elastic.types import (
    DrainNode,
    DropGroups,
    Event,
    FormGroups,
    GroupsFormed,
    Job,
    Node,
    NodeLoadSeen,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    PlansFound,
    Pool,
    Prepare,
    Quarantine,
    ReleaseNode,
    RequestNodes,
    StepDone,
    Stop,
    StopAsked,
    WorkerFailed,
    WorkerId,
)  # fmt: skip
from elastic.worker.hosting.checkpoint_orders import CheckpointCommitter, Commit, write_late_parts
from elastic.worker.hosting.hosting_backend import HostingBackend
from elastic.worker.process.call_log import MISMATCH, calls_in, difference

log = logging.getLogger(__name__)


@dataclass
class RayBackend(HostingBackend):
    """`cluster`: the embedded one, ended by `close`; None = an existing cluster. `lease`: released
    by `close`.

    `commit`: makes the stored parts of a checkpoint a checkpoint and returns its uri. `show`: takes
    what rank 0 prints.
    """

    run: RayRun
    cluster: LocalCluster | None = None
    lease: Lease | None = None
    commit: Commit | None = None
    show: Callable[[str], None] | None = None
    nodes: dict[str, Node] = field(init=False, default_factory=dict)
    provider: NodeProvider = field(init=False)
    _loads: dict[str, NodeLoadSeen] = field(init=False, default_factory=dict)  # of each the newest
    _stopped: bool = field(init=False, default=False)  # a Stop is carried out
    _group_broke: bool = field(init=False, default=False)  # as ranks say in this round

    def __post_init__(self) -> None:
        threading.Thread(
            target=importlib.import_module, args=("torch.distributed",), daemon=True
        ).start()
        run, job = self.run, Job.from_plain(self.run.job)
        connected = connect(run, self.cluster)
        self.storage = open_storage(run.uri)
        outlives = self.cluster is None
        nobody = WorkerId("", 0)
        setup = WorkerSetup(
            nobody, 0, "", dict(run.job), self.storage.uri, run.epoch, run.session, run.python_path,
            job.orphan_lease_s, outlives, run.logs, run.train_function,
        )  # fmt: skip
        self.worker_group = WorkerGroup(setup, run.namespace, local=self.cluster is not None)
        self.hold = DriverHold(run, self.cluster, self, self.worker_group, connected)
        # embedded nodes are on this host
        there = self.storage if outlives else None
        self.entrance = Entrance(
            self.worker_group, storage=there, attached=run.attach, lengths=run.lengths,
            may_change=run.may_change,
        )  # fmt: skip
        verify = self.commit is None and job.verify_copies
        self.copies = CheckpointCommitter(
            self.storage,
            run.epoch,
            run.meta,
            write=self.commit,
            verify=verify,
            digests=run.digests,
            known=run.known,
        )
        self._host(self.worker_group, job, run.begun_at_s)
        self.cloud_feed = CloudFeed.of(run.pools, embedded=self.cluster is not None)
        # so long workers wait for a driver that does not speak to them
        self.survey = Survey(AWAY_MOST_S if outlives else 0.0, job.orphan_lease_s)
        self.before = Attached(run, self.worker_group, outlives)
        demand = DemandReport(
            run.namespace, run.epoch, run.pools, job.orphan_lease_s, adopted=self.before.places
        )
        self.provider = (
            EmbeddedNodes(self.cluster, run.pools)
            if self.cluster
            else provider_for(demand, run.attach, run.spared)
        )
        schedule = drills.Schedule(job.drill, self.storage.hasty(drills.MARK_MOST_S))
        self.drilling = DrillRunner(
            schedule, self.provider, self.worker_group, self.nodes, run.pools,
            own_code=not job.restarted
        )  # fmt: skip
        for plan in self.before.plans:
            self.gather.expect(plan)
            self._plan = plan
        if not run.attach:
            self.copies.clean()
        self._early = [
            *([PlansFound(found)] if (found := self.before.found) else []),
            *self._arrivals(),
        ]
        self._end(self.before.elsewhere(dict(self.nodes)))

    # -------------------------------------------------------------------------------------- Backend

    def poll(self, until_s: float | None) -> list[Event]:
        if self.drilling.die:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().poll(until_s)

    def _check(self) -> None:
        self.hold.check(self.survey.head_lost)
        hold_s = self.worker_group.hold_s
        for worker in self.worker_group.open_polls():
            self.liveness.called(worker, hold_s)

    def _check_successor(self) -> None:
        if why := self.hold.successor():
            self.hold.replaced(why)

    def close(self) -> None:
        """Takes everything down after a Stop, and the embedded cluster always. Else it only lets
        go: workers and nodes are the next driver's, and without one they end by themselves."""
        if self._closed:
            return
        self._closed = True
        replaced = bool(self.hold.successor())
        self.hold.let_go = self.hold.let_go or replaced
        ends = self._stopped and not self.hold.let_go
        left = left_paid(
            self.nodes.values(), self.run.pools, self.worker_group.setup.orphan_lease_s
        )
        if left and self.cluster is None and not ends and not replaced:
            log.warning("%s", left)
        self.survey.close()
        self.cloud_feed.close()
        self.inbox.close()
        self.entrance.close()
        self.copies.close()
        self.worker_group.close(
            end=self.cluster is None and ends,
            wait=not self.survey.head_lost,
            own=not self.hold.let_go,
        )
        self.provider.close(end=ends)
        self.stores.clear()
        self.hold.close()

    # --------------------------------------------------------------------------------------- orders

    def _request(self, action: RequestNodes) -> None:
        self.provider.request(action.pool, action.count, action.request_id)

    def _release(self, action: ReleaseNode) -> None:
        if action.node_id in self.nodes:
            self._end_workers(action.node_id)
            until_s = self.cloud_feed.notices.announced_s(action.node_id)
            taken_in_s = None if until_s is None else until_s - self.now_s()
            self.provider.release(action.node_id, taken_in_s)
            self._forget(action.node_id)
        self._early.append(NodeLost(action.node_id, "released"))

    def _drain(self, action: DrainNode) -> None:
        node, ray_id = self.nodes.get(action.node_id), self.provider.ray_id(action.node_id)
        if node is None or ray_id is None:
            return
        announced_s = self.cloud_feed.notices.announced_s(node.node_id)
        if announced_s is None and not self.provider.autoscaled:
            return  # it stays in the cluster: for others, or for the day when it is asked for again
        self.cloud_feed.notices.left(node.node_id)
        until_s = announced_s or self.now_s() + self._pool(node.pool).notice_s
        drain_in_ray(ray_id, until_s, "elastic leaves the node")

    def _quarantine(self, action: Quarantine) -> None:
        self._end_workers(action.node_id)
        self.provider.quarantine(action.node_id, action.out_s)

    def _prepare(self, action: Prepare) -> None:
        node, ray_id = self.nodes.get(action.node_id), self.provider.ray_id(action.node_id)
        if node is None or ray_id is None:
            self._early.append(NodeLost(action.node_id, "it is not there"))
            return
        self.gather.forget(node.node_id)
        on_gpu = self._pool(node.pool).accelerator_type != "CPU"
        preparation = self.entrance.preparation(action, self._plan, on_gpu=on_gpu)
        self._end(
            [w for w in self.worker_group.workers(node.node_id) if self.liveness.is_silent(w)]
        )
        there = self.worker_group.workers(node.node_id)
        for k in range(node.gpus):
            me = WorkerId(node.node_id, k)
            if me in there:
                self.worker_group.order(me, preparation)
            else:
                place = Placement(ray_id, node.pool, on_gpu)
                self.worker_group.start(me, place, preparation)

    def _form(self, action: FormGroups) -> None:
        self._early += self.stores.form(action)

    def _drop_groups(self, action: DropGroups) -> None:
        self.stores.drop_formed(action)
        self.worker_group.order_all(action)

    def _stop(self, action: Stop) -> None:
        self._stopped = True
        self.close()

    _orders: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        **HostingBackend._orders, RequestNodes: _request, ReleaseNode: _release, DrainNode: _drain,
        Quarantine: _quarantine, Prepare: _prepare, FormGroups: _form, DropGroups: _drop_groups,
        Stop: _stop,
    }  # fmt: skip

    # -------------------------------------------------------------------------------- what comes in

    def _round(self, until_s: float | None) -> list[Event]:
        events, self._early = self._early, []
        expected = self.survey.suspects or self.copies.committing
        for answer in self.worker_group.collect(
            0.0 if events else self._pacing.wait_s(self.now_s(), until_s, expected)
        ):
            events += self._heard(answer) if isinstance(answer, PollAnswer) else self._broke(answer)
        if self._group_broke and self._plan is not None:
            self._suspect(self._plan.nodes)
        self._group_broke = False
        events += self._arrivals()
        events += self._losses()
        events += self.copies.news()
        if self._pacing.looks(self.now_s()):
            events += self._look()
        return events

    def _heard(self, answer: PollAnswer) -> list[Event]:
        self.liveness.answered(answer.worker, answer.beat)
        if self.show is not None:
            for line in answer.beat.said:
                self.show(f"[rank 0] {line}")
        events: list[Event] = []
        for message in answer.messages:
            if self.before.is_known(message) or (
                isinstance(message, NodePrepared) and answer.worker.node_id not in self.nodes
            ):
                continue  # written down already; or its node was lost in this very round
            for event in self.gather.add(answer.worker, message, time.monotonic()):
                if self.before.is_known(event):
                    continue
                try:
                    event = self.entrance.passed(event, self.nodes)
                except SpecError:
                    # nothing was trained: no next driver has any use for these workers and nodes
                    self._stopped = True
                    raise
                if neighbors := self.entrance.doubts(event, time.monotonic()):
                    self._suspect(neighbors)
                    continue
                events += [event, *self._follow(event)]
        return events

    def _follow(self, event: Event) -> list[Event]:
        """What the backend itself does about a worker's message."""
        self._noted(event)
        if isinstance(event, StepDone):
            self.copies.digests = digested(self.copies.digests, event)
            return self._drilled(self.drilling.at_step(event.step, self._plan, self.now_s()))
        if isinstance(event, NodeLoadSeen):
            self._loads[event.node_id] = event
        if isinstance(event, GroupsFormed) and event.error:
            self.stores.not_formed()
        if isinstance(event, WorkerFailed):
            # each rank of a group says so, at the same time
            self._group_broke |= event.kind in ("collective", "mismatch", "program")
            if event.do == "retry":  # another process does; this one cannot use its GPU
                self._end([event.worker])
        return []

    def _suspect(self, nodes: Iterable[str]) -> None:
        ids = {self.provider.ray_id(node_id) for node_id in nodes}
        self.survey.suspect(ray_id for ray_id in ids if ray_id)

    def _broke(self, broken: BrokenWorker) -> list[Event]:
        worker = broken.worker
        if broken.kind == "replaced":
            self.hold.replaced(broken.error)
        if broken.kind == "infrastructure":
            generation = self.worker_group.generation(worker)
            return [WorkerFailed(worker, generation, "infrastructure", broken.error)]
        words = self._last_words(worker, broken.pid)
        unlike = MISMATCH in words.crash
        found = self._mismatch(worker, broken.pid, words.crash) if unlike else []
        known = self._killed(worker, broken.pid) or broken.error
        if UNTOLD in known and not words.crash:
            known += self._like(worker.node_id)
        self._end([worker])
        ray_id = self.provider.ray_id(worker.node_id)
        why = self.survey.check(ray_id) if ray_id else ""
        failed = [*found, WorkerFailed(worker, 0, "process", f"{known}{words}")]
        if why:
            return [*failed, *self._lose(worker.node_id, why)]
        self._suspect([worker.node_id])
        return [*failed]

    def _mismatch(self, dead: WorkerId, pid: int, words: str) -> list[WorkerFailed]:
        """Of a process that was sent other bytes than it waited for: what the script of one rank
        calls and those of others do not, where their files can be read here and differ."""
        plan = self._plan
        if plan is None or dead not in plan.ranks:
            return []
        said = re.sub(r"\[enforce fail at \S+\] ", "", words)  # a place in gloo's source
        unlike = WorkerFailed(
            dead, plan.generation, "mismatch", f"its process has died; it wrote: {said}"
        )
        if not self.run.logs:
            return [unlike]
        pids = [pid if one == dead else self.worker_group.pid(one) for one in plan.ranks]
        of = zip(plan.ranks, pids, strict=True)
        files = [file_of(self.run.logs, str(one), number, end=CALLS) for one, number in of]
        ranks = {n: calls_in(file, plan.generation) for n, file in enumerate(files)}
        told = difference(ranks) if all(ranks.values()) else ""
        if told:
            return [replace(unlike, kind="program", error=told)]
        last = next(
            (part.places[-1] for part in reversed(ranks[plan.ranks.index(dead)]) if part.places), ""
        )
        behind = f"; its script had come to {last}" if last else ""
        return [replace(unlike, error=unlike.error + behind)]

    def _last_words(self, worker: WorkerId, pid: int) -> LastWords:
        """Of a process; none where it wrote nothing, or not where this driver can read."""
        logs = self.run.logs
        words = last_words(logs, str(worker), pid) if logs and pid else LastWords()
        if not words and self.cluster is not None and pid:
            words = LastWords.of(self.cluster.errors_of(pid))
        return words

    def _killed(self, worker: WorkerId, pid: int) -> str:
        """By which signal, where that is known; Ray does not tell it."""
        number = self.cluster.killed_by(pid) if self.cluster is not None and pid else 0
        if not number:
            return ""
        ranks = self._plan.ranks if self._plan is not None else ()
        rank = f" (rank {ranks.index(worker)})" if worker in ranks else ""
        name = next((f" ({one.name})" for one in signal.Signals if one == number), "")
        return f"its process{rank} was killed by signal {number}{name}"

    def _like(self, node_id: str) -> str:
        """What ends a process so that nobody is told of it."""
        text = (
            ", as after SIGKILL by somebody or by the kernel's out-of-memory killer (dmesg on "
            f"{node_id} names it), or after a crash"
        )
        load = self._loads.get(node_id)
        if load is None:
            return text
        free, whole = memory_size(load.memory_free_bytes), memory_size(load.memory_size_bytes)
        return f"{text}; its host had {free} of {whole} free when it was last looked at"

    def _arrivals(self) -> list[Event]:
        news = self.provider.news(self.survey.alive)
        return [event for one in news for event in self._arrived(one)]

    def _workers_of(self, node_id: str) -> int:
        return self.nodes[node_id].gpus

    def _arrived(self, event: Event) -> list[Event]:
        if not isinstance(event, NodeReady):
            return [event]
        node = event.node
        self.nodes[node.node_id] = node
        events: list[Event] = [event]
        for worker_info in self.before.take(node.node_id):
            self.entrance.training = True
            if worker_info.prepared:
                found = NodePrepared(node.node_id, (worker_info.pid,))
                events += self.gather.add(worker_info.me, found)
        return events + self.before.missed(node.node_id)

    def _losses(self) -> list[Event]:
        gone = self.survey.gone
        nodes = [*self.nodes] if gone else []
        found = {node_id: gone.get(self.provider.ray_id(node_id) or "") for node_id in nodes}
        return [
            event for node_id, why in found.items() if why for event in self._lose(node_id, why)
        ]

    def _lose(self, node_id: str, why: str) -> list[Event]:
        """A node is gone, and every worker on it; what still lives of it is fenced."""
        if node_id not in self.nodes:
            return []
        workers = self.worker_group.workers(node_id)
        self._end(workers, gone=True)
        self.provider.lost(node_id)
        self._forget(node_id)
        failed = [
            WorkerFailed(worker, 0, "process", f"its node was lost: {why}") for worker in workers
        ]
        return [*failed, NodeLost(node_id, why)]

    def _look(self) -> list[Event]:
        known = self.survey.liveness_known
        events: list[Event] = [*self.survey.news(self.now_s())]
        events += self.liveness.look(time.monotonic()) if known else ()
        self._suspect(worker.node_id for worker in self.liveness.late())
        orders = self.inbox.take()
        now_s = self.now_s()
        for entry in orders.drills:
            events += self._drilled(self.drilling.carry_out(entry, self._plan, now_s))
        events += orders.profiles
        if orders.stop is not None:
            events.append(StopAsked(orders.stop))
        events += self.liveness.stalled(self._plan) if self._plan is not None and known else []
        again, refused = self.entrance.settled(self.nodes, time.monotonic())
        for order in again:
            self._prepare(order)
        events += refused
        if late := self.gather.late(time.monotonic()):
            group = self.worker_group
            write_late_parts(late, group.workers(), group.order)
        self.drilling.pass_deadlines(now_s)
        ray_ids = {
            node_id: ray_id for node_id in self.nodes if (ray_id := self.provider.ray_id(node_id))
        }
        draining = self.survey.draining
        return [*events, *self.cloud_feed.news(self.nodes, ray_ids, draining, now_s=now_s)]

    def _drilled(self, events: list[Event]) -> list[Event]:
        """A drill's notice is one among those of its node."""
        for event in events:
            if isinstance(event, Notice):
                self.cloud_feed.notices.also(event)
        return events

    # ------------------------------------------------------------------------------------- the rest

    def _pool(self, name: str) -> Pool:
        return next(pool for pool in self.run.pools if pool.name == name)

    def _forget(self, node_id: str) -> None:
        self.nodes.pop(node_id, None)
        self.drilling.forget(node_id)
        self.cloud_feed.forget(node_id)
        self.entrance.forget(node_id)
        self.gather.forget(node_id)

    def _end_workers(self, node_id: str) -> None:
        self._end(self.worker_group.workers(node_id))

    def _end(self, workers: Sequence[WorkerId], *, gone: bool = False) -> None:
        """Kills the processes and forgets them; no event comes of it. `gone`: with their node."""
        if workers:
            self._check_successor()  # no epoch holds a signal back
        self.worker_group.end(workers, gone=gone)
        for worker in workers:
            self.liveness.forget(worker)
            self.gather.forget(worker.node_id)
