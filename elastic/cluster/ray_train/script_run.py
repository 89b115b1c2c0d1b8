"""The driver of a script that is restarted: nodes, Ray Train's elastic TorchTrainer, drills, and
the journal of it all.

Ray Train starts the groups. This driver tells it when: it gives noticed nodes back, has the nodes
counted anew, and only then lets the supervisors of the old group go, so that the next group has the
right size at the first try.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic.cluster.backend import drills
from elastic.cluster.backend.cloud_feed import CloudFeed
from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.cluster.local.local_cluster import LocalCluster
from elastic.cluster.nodes.autoscaler import provider_for
from elastic.cluster.nodes.demand import DemandReport
from elastic.cluster.nodes.providers import (
    AWAY_MOST_S,
    EmbeddedNodes,
    NodeProvider,
    Survey,
    signal_there,
)
from elastic.cluster.ray import _ray_private
from elastic.cluster.ray_train.script_bill import ORPHAN_LEASE_S, counted
from elastic.cluster.ray_train.script_fit import Fit
from elastic.cluster.ray_train.script_job import ScriptJob
from elastic.cluster.ray_train.script_messages import Board, Hello, ScriptMessage, ScriptOutput
from elastic.cluster.ray_train.script_output import StepReader
from elastic.cluster.ray_train.script_state import ScriptState, lines_of, some
from elastic.driver import LINE_EVERY_S, Recorder, stop_signals
from elastic.errors import LostContact
from elastic.ledger.lease import Lease
from elastic.policy.state.fold import State
from elastic.storage import open_storage
from elastic.types import (
    Decision,
    DriverStarted,
    Event,
    NodeLost,
    NodeReady,
    Notice,
    Pool,
    RequestFailed,
    RequestNodes,
    StopAsked,
    WorkerId,
)  # fmt: skip
from elastic.types.orders import WorkerOrder

LOOK_S = 0.2
COUNT_EVERY_S = 1.0  # while Ray Train is to start a group
DEAD_MOST_S = 4.0  # how long the next group waits for Ray to list a lost node as dead
FIRST_NODES_S = 60.0  # how long the first group waits for nodes that were asked for
BACKOFF_S, BACKOFF_MOST_S = 30.0, 600.0
END_S = 15.0  # for Ray Train to end
LEAVE_S = 3.0  # for the supervisors of a run that was stopped or has failed


@dataclass
class ScriptWorkers:
    """The workers of the script, for drills."""

    script: ScriptState
    ray_id: Callable[[str], str | None]

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        seats = self.script.group.seats.values() if self.script.group is not None else ()
        return [seat.worker for seat in seats if node_id in (None, seat.worker.node_id)]

    def pid(self, worker: WorkerId) -> int:
        seats = self.script.group.seats.values() if self.script.group is not None else ()
        return next((seat.pid for seat in seats if seat.worker == worker), 0)

    def signal(self, workers: Iterable[WorkerId], number: int) -> None:
        for worker in workers:
            ray_id = self.ray_id(worker.node_id)
            if ray_id is not None:
                signal_there(ray_id, [self.pid(worker)], number)

    def order(self, worker: WorkerId, order: WorkerOrder) -> bool:
        """A script's processes take no orders."""
        return False

    def cut(self, node_id: str, for_s: float) -> bool:
        """And are not asked how they are."""
        return False


@dataclass
class ScriptRun:
    """`cluster`: the embedded one; None = the cluster at `job.address`. `show`: takes lines for a
    person. `before`: what earlier drivers of the run have paid; None = there was none."""

    job: ScriptJob
    cluster: LocalCluster | None
    lease: Lease
    journal: Recorder
    show: Callable[[str], None]
    before: State | None = None
    script: ScriptState = field(init=False)
    provider: NodeProvider = field(init=False)
    fit: Fit = field(init=False)
    # id -> pool, since when
    _requests: dict[str, tuple[str, float]] = field(init=False, default_factory=dict)
    # pool -> until, wait
    _backoff: dict[str, tuple[float, float]] = field(init=False, default_factory=dict)
    _line_s: float = field(init=False, default=0.0)
    _counted_s: float = field(init=False, default=0.0)
    _restart_s: float | None = field(init=False, default=None)
    _dead: dict[str, str] = field(init=False, default_factory=dict)  # ray ids of lost nodes
    _n_requests: int = field(init=False, default=0)
    _reader: StepReader = field(init=False, default_factory=StepReader)  # for a person

    def to_the_end(self, start: DriverStarted) -> ScriptState:
        """Runs the script to its end; returns what is known then. Takes Ray down, not the embedded
        cluster."""
        self.script = ScriptState(
            self.job.needs, resumed=self.before is not None, bill=self.before or State()
        )
        self._connect()
        try:
            self._begin(start)
            with stop_signals() as asked:
                self._loop(asked)
            # Ray Train ends by itself once the supervisors have gone; what waits for nodes that
            # never come is ended
            self._exchange()
            self.fit.error(END_S if self.script.outcome == "succeeded" else LEAVE_S)
            self.fit.close()
        finally:
            try:
                self.journal.close()
            finally:
                self._close()
        return self.script

    # -------------------------------------------------------------------------------- begin and end

    def _connect(self) -> None:
        self._anchor_s = time.time() - time.monotonic()
        if self.cluster is not None:
            self.cluster.connect(self.job.namespace)
        else:
            ray.init(
                self.job.address,
                namespace=self.job.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        _ray_private.mute_errors()

    def _begin(self, start: DriverStarted) -> None:
        self._began_s = self._line_s = self.now_s()
        self.journal.append(self._began_s, [(self._began_s, start)])
        self.script.bill = counted(self.script.bill, start, self._began_s)
        self.storage = open_storage(self.job.uri)
        pools = self.job.needs.pools
        self.inbox, self.survey = (
            drills.Inbox(self.storage),
            Survey(AWAY_MOST_S if self.cluster is None else 0.0),
        )
        self.cloud_feed = CloudFeed.of(pools, embedded=self.cluster is not None)
        order = DemandReport(self.job.namespace, start.epoch, tuple(pools), ORPHAN_LEASE_S)
        self.provider = (
            EmbeddedNodes(self.cluster, pools)
            if self.cluster is not None
            else provider_for(order, take_over=False)
        )
        schedule = drills.Schedule(self.job.drill, self.storage.hasty(drills.MARK_MOST_S))
        hands = ScriptWorkers(self.script, self.provider.ray_id)
        self.drilling = DrillRunner(schedule, self.provider, hands, self.script.nodes, pools)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board: Any = ray.remote(Board)
        self._board_name = f"board-{start.epoch}"
        self.board = board.options(
            name=self._board_name, num_cpus=0, scheduling_strategy=here
        ).remote()
        self.fit = Fit(here)

    def _close(self) -> None:
        self.inbox.close()
        self.survey.close()
        self.cloud_feed.close()
        if hasattr(self, "provider"):
            self.provider.close(end=not self.lease.lost)
        if self.cluster is not None:
            self.cluster.disconnect()
            self.cluster.close()
        else:
            ray.shutdown()
        self.lease.release()

    def now_s(self) -> float:
        """Epoch seconds that never go back."""
        return self._anchor_s + time.monotonic()

    # ------------------------------------------------------------------------------------- the loop

    def _loop(self, asked: list[str]) -> None:
        script = self.script
        while script.outcome is None:
            now_s = self.now_s()
            self._hold()
            silent_s = self._exchange()
            self._nodes(now_s)
            self._orders(now_s)
            sure = self.lease.certain
            if asked:
                script.ask_stop(asked[0], now_s)
            if len(asked) > 1:
                script.end("stopped", "asked twice to stop: ended at once")
            script.pay(now_s)
            # while storage is away no node is asked for or released, and no group is begun
            if sure:
                self._capacity(now_s)
                self._first_group(now_s)
            script.look(now_s, silent_s)
            if sure:
                self._restarting(now_s)
            self._fit_ended()
            self._write(now_s)
            time.sleep(LOOK_S)

    def _hold(self) -> None:
        if self.lease.lost:
            raise LostContact(
                f"run '{self.job.name}': this driver ends, another one drives the run"
            )
        if self.cluster is not None and self.cluster.ended:
            self._lost("the process that keeps it was killed")
        if self.survey.head_lost:
            self._lost(self.survey.head_lost)

    def _lost(self, why: str) -> NoReturn:
        raise LostContact(
            f"run '{self.job.name}': its Ray cluster is lost: {why}; run it again with this "
            "--run-name to resume"
        )

    def _exchange(self) -> dict[tuple[int, int], float]:
        orders, self.script.orders = self.script.orders, []
        words: list[ScriptMessage]
        silent_s: dict[tuple[int, int], float]
        try:
            words, silent_s = ray.get(self.board.take.remote(orders), timeout=AWAY_MOST_S)
        except ray.exceptions.RayError as error:  # it stands beside this process
            self._lost(
                self.survey.head_lost
                or f"the board of its ranks has ended: {' '.join(str(error).split())[:200]}"
            )
        for word in words:
            if isinstance(word, ScriptOutput):
                for line in self._reader.shown(word.lines, word.at_s):
                    self.show(f"[rank {word.rank}] {line}")
            before = self.script.last_step
            self.script.heard(word, self._node_id(word.ray_id) if isinstance(word, Hello) else "")
            if self.script.last_step > before:
                for event in self.drilling.at_step(
                    self.script.last_step, self.script.plan, self.now_s()
                ):
                    self._happened(event, self.now_s())
        return silent_s

    def _node_id(self, ray_id: str) -> str:
        return next(
            (node_id for node_id in self.script.nodes if self.provider.ray_id(node_id) == ray_id),
            ray_id[:12],
        )

    def _write(self, now_s: float) -> None:
        log, self.script.log = self.script.log, []
        lines = lines_of(log)
        if not lines and self.script.bill.usd_per_h and now_s - self._line_s >= LINE_EVERY_S:
            # a driver that follows knows how long nodes were paid for
            lines = [([], Decision((), self.script.reason))]
        for events, decision in lines:
            self.journal.append(now_s, events, decision)
            self._line_s = now_s
        if self.journal.due_at_s is not None and now_s >= self.journal.due_at_s:
            self.journal.flush()

    # ---------------------------------------------------------------------------------------- nodes

    def _nodes(self, now_s: float) -> None:
        for event in self.provider.news(self.survey.alive):
            if isinstance(event, NodeReady):
                self._requests = _without_one(self._requests, event.node.pool)
                self._backoff.pop(event.node.pool, None)
            if isinstance(event, RequestFailed):
                self._requests.pop(event.request_id, None)
                wait_s = min(
                    BACKOFF_MOST_S, 2 * self._backoff.get(event.pool, (0.0, BACKOFF_S / 2))[1]
                )
                self._backoff[event.pool] = (now_s + wait_s, wait_s)
            self.script.node(event, now_s)
        group = self.script.group
        if group is not None and group.failing_s is not None and not group.over:
            self.survey.suspect(
                ray_id for node in self.script.nodes if (ray_id := self.provider.ray_id(node))
            )
        for node_id in list(self.script.nodes):
            why = self.survey.gone.get(self.provider.ray_id(node_id) or "")
            if why:
                self._lose(node_id, why, now_s)
        self.drilling.pass_deadlines(now_s)
        ray_ids = {
            node_id: ray_id
            for node_id in self.script.nodes
            if (ray_id := self.provider.ray_id(node_id))
        }
        for event in self.cloud_feed.news(
            self.script.nodes, ray_ids, self.survey.draining, now_s=now_s
        ):
            if not (isinstance(event, Notice) and event.node_id in self.script.leaving):
                self.script.node(event, now_s)

    def _lose(self, node_id: str, why: str, now_s: float) -> None:
        ray_id = self.provider.ray_id(node_id)
        if ray_id is not None:
            self._dead[ray_id] = node_id
        self.provider.lost(node_id)
        self.drilling.forget(node_id)
        self.cloud_feed.forget(node_id)
        self.script.node(NodeLost(node_id, why), now_s)

    def _release(self, node_id: str, now_s: float) -> None:
        ray_id = self.provider.ray_id(node_id)
        self.provider.release(node_id)
        if ray_id is not None and self.cluster is not None:
            self._dead[ray_id] = node_id
        self.drilling.forget(node_id)
        self.cloud_feed.forget(node_id)
        self.script.node(NodeLost(node_id, "released"), now_s)

    def _orders(self, now_s: float) -> None:
        orders = self.inbox.take()
        for entry in orders.drills:
            for event in self.drilling.carry_out(entry, self.script.plan, now_s):
                self._happened(event, now_s)
        if orders.stop is not None:
            self.script.log.append((now_s, StopAsked(orders.stop)))
            self.script.ask_stop(orders.stop, now_s)

    def _happened(self, event: Event, now_s: float) -> None:
        """Of a drill. Ray is told of a notice, as a cloud would tell it."""
        self.script.node(event, now_s)
        if isinstance(event, Notice):
            ray_id = self.provider.ray_id(event.node_id)
            if ray_id is not None:
                _ray_private.drain(ray_id, event.deadline_s, "drill")

    def _capacity(self, now_s: float) -> None:
        """Asks for nodes up to max_workers, the cheapest pools first; for none once the run is to
        stop."""
        script, needs = self.script, self.job.needs
        if script.stop_reason or script.outcome is not None:
            return
        coming = [pool for pool, _ in self._requests.values()]
        sizes = {pool.name: pool.gpus_per_node for pool in needs.pools}
        have = sum(node.gpus for node in script.staying) + sum(sizes[pool] for pool in coming)
        n_nodes = len(script.nodes) + len(coming)
        for pool in sorted(script.bill.pools, key=lambda pool: pool.usd_per_gpu_h):
            used = sum(node.pool == pool.name for node in script.nodes.values()) + coming.count(
                pool.name
            )
            n = min(pool.max_nodes - used, -(-(needs.max_workers - have) // pool.gpus_per_node))
            n = min(n, self.job.max_nodes - n_nodes) if self.job.max_nodes is not None else n
            if n <= 0 or self._backoff.get(pool.name, (0.0, 0.0))[0] > now_s:
                continue
            self._ask(pool, n, now_s)
            have += n * pool.gpus_per_node
            n_nodes += n

    def _ask(self, pool: Pool, n: int, now_s: float) -> None:
        text = (
            f"{some(n, 'node')} of pool {pool.name}: the script may use "
            f"{some(self.job.needs.max_workers, 'worker')}"
        )
        actions = []
        for _ in range(n):
            self._n_requests += 1
            request_id = f"script-{self._n_requests}"
            self._requests[request_id] = (pool.name, now_s)
            actions.append(RequestNodes(pool.name, 1, request_id))
            self.provider.request(pool.name, 1, request_id)
        self.script.log.append(Decision(tuple(actions), text))

    # ------------------------------------------------------------------------------------ Ray Train

    def _first_group(self, now_s: float) -> None:
        if self.fit.started or (self._requests and now_s - self._began_s < FIRST_NODES_S):
            return
        if len(self.script.workers()) < self.job.needs.min_workers:
            return
        from elastic.cluster.ray_train.script_worker import ScriptTask

        self.script.expect("start")
        self.script.expected_s = now_s
        job = self.job
        orders = ScriptTask(
            job.file, job.args, job.cwd, job.name, self._board_name, job.namespace, job.logs,
            job.asks_ray
        )  # fmt: skip
        self.fit.start(job, {"orders": orders})

    def _restarting(self, now_s: float) -> None:
        """Before the next group: noticed nodes are released, and Ray and Ray Train know which are
        gone."""
        script = self.script
        if not self.fit.started or script.outcome is not None:
            return
        if (script.group is None or script.group.over) and now_s - self._counted_s >= COUNT_EVERY_S:
            self._counted_s = now_s
            _ray_private.count_nodes_again()
        if not script.restart:
            self._restart_s = None
            return
        if self._restart_s is None:
            self._restart_s = now_s
            for node_id in list(script.leaving):
                self._release(node_id, now_s)
        self._dead = {ray_id: node for ray_id, node in self._dead.items() if ray_id in _alive()}
        if not self._dead or now_s - self._restart_s > DEAD_MOST_S:
            _ray_private.count_nodes_again()
            script.go()

    def _fit_ended(self) -> None:
        error = self.fit.error() if self.script.outcome is None else None
        if error is None:
            return
        if error:
            self.script.end("failed", f"Ray Train gave up: {' '.join(error.split())[-300:]}")
            return
        # the last words of the ranks may be on their way still
        self.script.look(self.now_s(), self._exchange())
        if self.script.outcome is None:
            self.script.end("failed", "Ray Train ended without a word from the script's ranks")


def _alive() -> set[str]:
    return {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}


def _without_one(
    requests: Mapping[str, tuple[str, float]], pool: str
) -> dict[str, tuple[str, float]]:
    """The requests without the oldest one to the pool: a node has come."""
    first = next((request_id for request_id, (name, _) in requests.items() if name == pool), None)
    return {request_id: value for request_id, value in requests.items() if request_id != first}
