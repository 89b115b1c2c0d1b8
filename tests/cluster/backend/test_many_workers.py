"""What the driver does about its workers and nodes grows with the cluster and no faster. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.counting import growth
from support.worker.beats import beat_of

from elastic.cluster.nodes.autoscaler import AutoscalerNodes
from elastic.cluster.nodes.autoscaler_agent import AutoscalerReport
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.workers.worker_actor import WorkerSetup
from elastic.cluster.workers.worker_group import WorkerGroup, _Member
from elastic.config.drill import Scene, resolve
from elastic.types import Layout, Plan, Pool, ShardStored, WorkerId
from elastic.types.grid import replica_key
from elastic.worker.hosting.aggregate import PLANS_KEPT, CheckpointParts, Gather
from elastic.worker.hosting.checkpoint_orders import holders_of
from elastic.worker.hosting.liveness import Liveness

GPUS = 8
MOST = 1.3  # of `growth`
Work = Callable[[], object]


def workers(n_nodes: int) -> list[WorkerId]:
    return [WorkerId(f"n{i:03}", k) for i in range(n_nodes) for k in range(GPUS)]


def plan(n_nodes: int, layout: Layout | None = None) -> Plan:
    n = n_nodes * GPUS
    return Plan(1, layout or Layout(dp_shard=n), tuple(workers(n_nodes)), (1,) * n, (1,))


def worker_group_of(n_nodes: int) -> WorkerGroup:
    worker_group = WorkerGroup(
        WorkerSetup(WorkerId("", 0), 1, "spot", {}, "", 1), "test", local=True
    )
    for worker in workers(n_nodes):
        worker_group._join(worker, _Member(actor=object(), ray_id="", incarnation=1))
    return worker_group


def workers_of_each_node(n: int) -> Work:
    worker_group = worker_group_of(n)
    return lambda: [worker_group.workers(f"n{i:03}") for i in range(n)]


def nobody_answers(n: int) -> Work:
    liveness = Liveness(0.5)
    liveness.step_time_s[1] = 0.1
    for worker in workers(n):
        beat = beat_of(progress=1)
        liveness.answered(worker, beat)
        liveness.called(worker)

    def look() -> None:
        for now_s in range(20):
            liveness._looked_at_s = now_s - 0.5
            found = liveness.look(float(now_s))
            if found:
                assert len(found) == n * GPUS
                return
        raise AssertionError("nobody was silent")

    return look


def nodes_that_it_has(n: int) -> Work:
    alive = {
        f"r{i}": RayNode(f"r{i}", "10.0.0.1", i, {"elastic-node": f"n{i}"}, 8, 0, False)
        for i in range(n)
    }
    report = AutoscalerReport(given=dict.fromkeys(alive, "spot"))
    desk: Any = SimpleNamespace(heard=lambda: (report, True), tell=lambda *told, **more: None)
    nodes = AutoscalerNodes((Pool("spot", max_nodes=n),), desk=desk)
    nodes._ours.update({f"n{i}": ("spot", f"r{i}") for i in range(n)})
    return lambda: nodes.news(alive)


def holders_of_each_rank(n: int) -> Work:
    parts = CheckpointParts(plan(n, Layout(dp_replicate=2, dp_shard=n * GPUS // 2)), 5)
    return lambda: [holders_of(parts, rank) for rank in range(0, n * GPUS, 4)]


def all_have_stored_their_parts(n: int) -> Work:
    order = plan(n)

    def hear() -> None:
        whole: list[CheckpointParts] = []
        gather = Gather(whole.append, lambda node_id: GPUS)
        gather.expect(order)
        for rank, worker in enumerate(order.ranks):
            gather.add(worker, ShardStored(1, 5, rank, 1), float(rank))
        (found,) = whole
        assert found.missing == []

    return hear


def the_last_node(n: int) -> Work:
    return lambda: resolve("any", Scene(plan(n), dict.fromkeys(plan(n).nodes, "spot")))


PIECES = [
    workers_of_each_node,
    nobody_answers,
    nodes_that_it_has,
    holders_of_each_rank,
    all_have_stored_their_parts,
    the_last_node,
]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_the_work_grows_with_the_cluster(piece: Callable[[int], Work]) -> None:
    piece(4)()
    assert growth(piece, 8, 32) < MOST


def test_a_worker_group_knows_the_workers_of_a_node_until_they_are_forgotten() -> None:
    worker_group = worker_group_of(3)
    assert (
        worker_group.workers("n001") == [WorkerId("n001", k) for k in range(GPUS)]
        and worker_group.workers("n009") == []
    )
    assert worker_group.workers() == workers(3)
    for k in range(GPUS):
        worker_group.forget(WorkerId("n001", k))
        assert worker_group.workers("n001") == [
            WorkerId("n001", left) for left in range(k + 1, GPUS)
        ]
    worker_group.forget(WorkerId("n001", 0))
    assert worker_group.workers() == [worker for worker in workers(3) if worker.node_id != "n001"]


def test_the_driver_keeps_the_plans_whose_parts_may_still_come() -> None:
    """A run of months has thousands, each with all its ranks."""
    whole, order = list[CheckpointParts](), plan(1)
    gather = Gather(whole.append, lambda node_id: GPUS)
    gather.expect(order)
    first, *others = order.ranks
    gather.add(first, ShardStored(1, 5, 0, 1), 0.0)
    for number in range(2, 1000):
        gather.expect(replace(order, generation=number))
    assert [*gather.plans] == [1, *range(1000 - PLANS_KEPT, 1000)]
    for rank, worker in enumerate(others, 1):
        gather.add(worker, ShardStored(1, 5, rank, 1), 1.0)
    assert [parts.step for parts in whole] == [5], "of the first generation too"
    gather.expect(replace(order, generation=1000))
    assert len(gather.plans) == PLANS_KEPT


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp_replicate=4, dp_shard=2, tp=1),
        Layout(dp_replicate=2, cp=2, tp=4),
        Layout(tp=16),
    ],
)
def test_holders_are_the_replicas_in_rank_order(layout: Layout) -> None:
    parts = CheckpointParts(plan(2, layout), 5)
    for rank, worker in enumerate(parts.plan.ranks):
        alike = [
            w
            for r, w in enumerate(parts.plan.ranks)
            if replica_key(layout, r) == replica_key(layout, rank)
        ]
        assert holders_of(parts, rank) == [other for other in alike if other != worker]


def test_a_worker_is_no_peer_of_itself() -> None:
    """Of three two stall; the one that moves, and then nobody answers, keeps the others from being
    called silent."""
    liveness = Liveness(0.5)
    a, b, c = workers(1)[:3]
    for worker in (a, b, c):
        beat = beat_of(progress=1)
        liveness.answered(worker, beat)
        liveness.called(worker)
    liveness.step_time_s[1] = 0.1
    found: list[WorkerId] = []
    for k in range(1, 20):
        moved = beat_of(progress=k)
        liveness.answered(a, moved)
        liveness.called(a)
        found += [one.worker for one in liveness.look(0.5 * k)]
    assert found == []
    for k in range(20, 60):
        found += [one.worker for one in liveness.look(0.5 * k)]
    assert sorted(found) == [a, b, c]


def test_polls_of_workers_without_news_are_as_many_however_many_workers() -> None:
    """Each held longer then, and nobody counts as late or silent for that."""
    polls = {n: 8 * n / worker_group_of(n).hold_s for n in (8, 64, 128, 512)}
    assert polls == {8: 128.0, 64: 1000.0, 128: 1000.0, 512: 1000.0}
    liveness, worker = Liveness(0.5), workers(1)[0]
    beat = beat_of(progress=1)
    liveness.step_time_s[1] = 0.1
    liveness.answered(worker, beat)
    liveness.called(worker, 4.0)
    told = [(0.25 * k, found) for k in range(40) if (found := liveness.look(0.25 * k))]
    assert [at_s for at_s, _ in told] == [5.25] and liveness.late() == [worker]
