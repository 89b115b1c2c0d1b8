"""The driver's side of admission: who is asked as a neighbor, and nodes that came together held
against each other."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster.stage import FAKE

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.backend.ray_run import RayRun
from elastic.cluster.workers.admission_links import DOUBT_S, NEIGHBORS, Entrance
from elastic.cluster.workers.worker_actor import Worker, WorkerSetup
from elastic.cluster.workers.worker_group import Placement
from elastic.errors import SpecError
from elastic.storage.local import LocalStorage
from elastic.types import (
    APART,
    Admission,
    Layout,
    Mark,
    Node,
    NodePrepared,
    NodeRefused,
    Notice,
    Plan,
    Pool,
    Prepare,
    StepDone,
    Terms,
    WorkerId,
    apart,
)
from elastic.types.orders import WorkerOrder
from elastic.version import versions
from elastic.worker.hosting.aggregate import Gather
from elastic.worker.profile.node_checks import answer

NODES = {name: Node(name, "spot", 2) for name in "abcd"}


class FakeWorkerGroup:
    """An actor is its worker's name."""

    def __init__(self, *nodes: str) -> None:
        self.there = [WorkerId(node, k) for node in nodes for k in range(2)]

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        return [worker for worker in self.there if node_id in (None, worker.node_id)]

    def actor(self, worker: WorkerId) -> str | None:
        return str(worker) if worker in self.there else None


def prepared(node_id: str, **more: str) -> NodePrepared:
    return NodePrepared(
        node_id, (1, 2), admission=Admission(0.1, 0.0, {**versions(), **more}, 1e9, 1 << 30)
    )


def entrance(*nodes: str) -> Entrance:
    worker_group: Any = FakeWorkerGroup(*nodes)
    return Entrance(worker_group)


def terms(at: Entrance, node_id: str) -> Terms:
    """That its workers are given."""
    entry = at.preparation(Prepare(node_id), None).entry
    assert entry is not None
    return entry.terms


def asked(at: Entrance, node_id: str, plan: Plan | None = None) -> tuple[Any, ...]:
    """Who is asked for a door."""
    entry: Any = at.preparation(Prepare(node_id), plan).entry
    (neighbors,) = entry.doors.args
    return tuple(neighbors)


def test_a_worker_is_told_whether_its_pool_is_of_gpus() -> None:
    told = []

    def start(me: WorkerId, place: Placement, order: WorkerOrder) -> None:
        assert order.entry is not None
        told.append((place.on_gpu, order.entry.terms.on_gpu))

    nothing = SimpleNamespace(forget=lambda _: None)
    group = SimpleNamespace(workers=lambda _: [], start=start, end=lambda _, **more: None)
    for kind in ("CPU", "H100"):
        backend: Any = object.__new__(RayBackend)
        vars(backend).update(
            nodes={"a": Node("a", "p")}, provider=SimpleNamespace(ray_id=lambda _: "ray"),
            gather=nothing, entrance=entrance(), worker_group=group, _plan=None,
            run=RayRun("r", "/runs/r", {}, (Pool("p", kind),)),
        )  # fmt: skip
        backend._prepare(Prepare("a"))
    assert told == [(False, False), (True, True)]


def test_the_first_node_has_no_neighbour_then_those_that_were_let_in_are_asked() -> None:
    at = entrance("a", "b", "c")
    order = at.preparation(Prepare("a", gpu_bytes=5), None)
    assert order.action == Prepare("a", gpu_bytes=5) and order.entry is not None
    assert order.entry.terms == Terms(versions(), 5, 0) and asked(at, "a") == ()
    at.passed(prepared("b"), NODES)
    assert asked(at, "a") == ("b/0",)
    assert asked(at, "b") == (), "not itself"
    at.passed(prepared("c"), NODES)
    at.forget("b")
    assert asked(at, "a") == ("c/0",)


def test_workers_of_the_plan_are_asked_first_one_of_a_node_and_not_more_than_enough() -> None:
    at = entrance("a", "b", "c", "d")
    for name in "bcd":
        at.passed(prepared(name), NODES)
    ranks = [
        WorkerId("gone", 0),
        WorkerId("d", 1),
        WorkerId("d", 0),
        WorkerId("a", 0),
        WorkerId("c", 1),
    ]
    running = Plan(1, Layout(dp_shard=5), tuple(ranks), (1,) * 5, (4,))
    found = asked(at, "a", running)
    assert found == ("d/1", "c/1") and len(found) == NEIGHBORS


def test_what_the_driver_does_not_know_the_first_node_says_for_all() -> None:
    at = entrance("a", "b")
    at.preparation(Prepare("a"), None)
    first = prepared("a", NCCL="2.27.5")
    assert at.passed(first, NODES) == first
    assert terms(at, "b").versions["NCCL"] == "2.27.5"
    assert at.passed(prepared("b", NCCL="2.26.2"), NODES) == NodeRefused(
        "b", "NCCL 2.26.2 (the run has 2.27.5)", "spot"
    )
    assert at.passed(NodeRefused("b", "why"), NODES) == NodeRefused("b", "why", "spot")
    for other in (StepDone(1, 1, 1.0, 8, 0.1), Notice("a", 5.0), NodePrepared("nobody")):
        assert at.passed(other, NODES) == other


def test_a_node_with_a_dataset_of_another_length_is_refused() -> None:
    """The order of all samples follows from it."""
    at = entrance("a", "b")
    assert isinstance(at.passed(replace(prepared("a"), n_samples=1000), NODES), NodePrepared)
    event = at.passed(replace(prepared("b"), n_samples=1100), NODES)
    assert isinstance(event, NodeRefused) and event.pool == "spot"
    assert event.reason == (
        "its data is not the run's: 1100 samples in the dataset, 1000 on node a, the first one"
    )
    assert isinstance(at.passed(prepared("b"), NODES), NodePrepared), "an older worker tells none"


@pytest.mark.parametrize(
    "found", [{"n_samples": 1100}, {"n_samples": 1000, "phase_lengths": (1000, 60)}]
)
def test_a_run_with_other_data_than_before_is_refused_unless_it_trains(
    found: dict[str, Any],
) -> None:
    worker_group: Any = FakeWorkerGroup("a", "b")
    before = (1000, 50) if "phase_lengths" in found else (1000,)
    event = replace(prepared("a"), **found)
    with pytest.raises(
        SpecError, match=r"^node a: its data is not .* before: .*continue with --allow-changed"
    ):
        Entrance(worker_group, lengths=before).passed(event, {"a": NODES["a"]})
    assert Entrance(worker_group, lengths=event.lengths).passed(event, NODES) == event
    allowed = Entrance(worker_group, lengths=before, may_change=True)
    assert allowed.passed(event, NODES) == event
    late = replace(prepared("b"), n_samples=before[0], phase_lengths=before[1:] and before)
    assert isinstance(allowed.passed(late, NODES), NodeRefused), "the first one has told"
    going_on = Entrance(worker_group, lengths=before, training=True, may_change=True)
    assert isinstance(going_on.passed(event, NODES), NodeRefused), "its workers have the old data"


def test_a_run_ends_for_other_data_only_where_no_node_has_its_own() -> None:
    """One stale copy that is ready first does not end it."""
    worker_group: Any = FakeWorkerGroup(*"abcd")
    stale, right = ([replace(prepared(name), n_samples=n) for name in "abcd"] for n in (1100, 1000))
    at = Entrance(worker_group, lengths=(1000,))
    refused = at.passed(stale[0], NODES)
    assert isinstance(refused, NodeRefused) and refused.reason.endswith("1000 before")
    assert at.passed(right[1], NODES) == right[1]
    assert isinstance(at.passed(stale[2], NODES), NodeRefused)

    at, three = Entrance(worker_group, lengths=(1000,)), {name: NODES[name] for name in "abc"}
    assert isinstance(at.passed(stale[0], three), NodeRefused)
    assert isinstance(at.passed(NodeRefused("b", "torch 2.0"), NODES), NodeRefused)
    assert isinstance(at.passed(stale[3], NODES), NodeRefused), "it took the place of a"
    with pytest.raises(SpecError, match="^node c: its data is not the run's: 1100"):
        at.passed(stale[2], NODES)


def test_a_refusal_waits_whether_the_neighbor_is_gone() -> None:
    at = entrance("a", "b", "c")
    at.preparation(order := Prepare("a", gpu_bytes=5), None)
    refusal = NodeRefused("a", "b cannot be reached", "spot", neighbors=("c", "b"))
    assert not at.doubts(NodeRefused("a", "torch 2.0", "spot"), 10.0), (
        "neighbors have no part in that"
    )
    assert at.doubts(refusal, 10.0)
    assert at.settled(NODES, 10.0) == ([], [])
    without_b = {name: node for name, node in NODES.items() if name != "b"}
    assert at.settled(without_b, 10.5) == ([order], [])
    assert at.settled(without_b, 99.0) == ([], []), "once"
    assert at.doubts(refusal, 20.0)
    at.worker_group.there.remove(WorkerId("c", 1))  # type: ignore[attr-defined]
    assert at.settled(NODES, 20.5) == ([order], []), "a worker of it is gone, and is started over"


def test_one_that_holds_is_told_and_one_of_a_lost_node_is_not() -> None:
    at = entrance("a", "b")
    at.preparation(Prepare("a"), None)
    refusal = NodeRefused("a", "b cannot be reached", "spot", neighbors=("b",))
    assert at.doubts(refusal, 10.0)
    assert at.settled(NODES, 10.0 + DOUBT_S) == ([], [refusal])
    assert at.doubts(refusal, 20.0)
    at.forget("a")
    assert at.settled({}, 99.0) == ([], [])


def test_a_node_is_prepared_when_all_its_workers_are_and_is_as_good_as_the_worst() -> None:
    gather = Gather(lambda parts: None, lambda node_id: 2)
    slow = replace(prepared("a").admission, flop_per_s=1.0)  # type: ignore[type-var]
    for _ in range(2):  # again after it was prepared anew
        assert gather.add(WorkerId("a", 0), replace(prepared("a"), pids=(5,), admission=slow)) == []
        (event,) = gather.add(WorkerId("a", 1), replace(prepared("a"), pids=(6,)))
        assert isinstance(event, NodePrepared) and event.pids == (5, 6) and event.admission == slow
        gather.forget("a")
    assert gather.add(WorkerId("a", 0), NodePrepared("a", (5,))) == []
    (event,) = gather.add(WorkerId("a", 1), NodePrepared("a", (6,)))
    assert isinstance(event, NodePrepared) and event.admission is None


def test_the_shell_passes_terms_on_and_a_neighbour_that_does_not_answer_is_left_out(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic.cluster.ray import processes
    from elastic.cluster.workers import neighbor_links

    monkeypatch.setattr(processes, "stand_back", lambda: False)
    worker = Worker(
        WorkerSetup(WorkerId("a", 0), 1, "spot", {"folder": ""}, str(tmp_path), 1, FAKE)
    )
    told: list[Any] = []
    monkeypatch.setattr(worker.session, "order", told.append)

    class Actor:
        class hear:
            @staticmethod
            def remote() -> str:
                return "answer"

    def get(ref: str, timeout: float) -> Any:
        answers.append(timeout)
        if len(answers) == 1:
            raise neighbor_links.GetTimeoutError("it is busy")
        return "a door"

    answers: list[float] = []
    monkeypatch.setattr(neighbor_links.ray, "get", get)
    at = entrance()
    monkeypatch.setattr(at, "_neighbors", lambda node_id, plan: [Actor, Actor])
    order = at.preparation(Prepare("a"), None)
    worker.order(1, order)
    assert told == [order] and order.entry is not None and order.entry.terms == Terms(at.known)
    assert answers == [], "asked in the background"
    assert order.entry.doors() == ["a door"] and answers == [neighbor_links.HEAR_MOST_S] * 2


# ------------------------------------------------------------------------------------------ storage


def answered(at: Entrance, node_id: str) -> NodePrepared:
    """The node has found what the driver wrote, and answers in the same folder."""
    mark = terms(at, node_id).mark
    answer(mark)
    return told(node_id, mark)


def told(node_id: str, mark: Mark) -> NodePrepared:
    event = prepared(node_id)
    return replace(event, admission=replace(event.admission, mark=mark.text))  # type: ignore[type-var]


def test_a_node_that_shares_the_storage_is_let_in_and_asked_once(tmp_path: Path) -> None:
    worker_group: Any = FakeWorkerGroup("a")
    at = Entrance(worker_group, storage=LocalStorage(tmp_path))
    event = answered(at, "a")
    assert at.passed(event, NODES) == event
    assert terms(at, "a").mark is None
    at.forget("a")
    assert terms(at, "a").mark is not None
    at.close()
    assert LocalStorage(tmp_path).list() == []
    assert terms(entrance("a"), "a").mark is None, "object storage, or embedded nodes"


def test_a_node_that_lost_a_worker_is_not_asked_again(tmp_path: Path) -> None:
    """The workers that remain repeat what they found when the node was admitted."""
    worker_group: Any = FakeWorkerGroup("a")
    at = Entrance(worker_group, storage=LocalStorage(tmp_path))
    event = answered(at, "a")
    assert at.passed(event, NODES) == event
    assert terms(at, "a").mark is None
    assert at.passed(event, NODES) == event, "with the mark of the first time"


def test_a_node_whose_file_the_driver_does_not_find_is_refused(tmp_path: Path) -> None:
    worker_group: Any = FakeWorkerGroup("a", "b")
    at = Entrance(worker_group, storage=LocalStorage(tmp_path))
    at.passed(answered(at, "a"), NODES)
    mark = terms(at, "b").mark
    event = at.passed(told("b", mark), NODES)  # it has seen a copy of the folder
    assert isinstance(event, NodeRefused) and event.pool == "spot"
    assert event.reason.startswith(
        f"{APART}: a file that the node has written is not there on the driver's host, in "
        f"{tmp_path};"
    )


def test_a_node_is_asked_whether_it_reaches_object_storage(tmp_path: Path) -> None:
    """A folder is looked at by a file in it."""

    class Far(LocalStorage):
        remote = True

    worker_group: Any = FakeWorkerGroup("a")
    for kind in (Far, LocalStorage):
        storage = kind(tmp_path)
        found = terms(Entrance(worker_group, storage=storage), "a")
        assert (found.storage, found.mark is None) == (
            (storage.uri, True) if kind is Far else ("", False)
        )
    assert terms(Entrance(worker_group), "a").storage == "", "on the embedded cluster"


def test_the_run_is_refused_where_the_first_node_has_a_folder_of_its_own(tmp_path: Path) -> None:
    worker_group: Any = FakeWorkerGroup("a", "b")
    refused = NodeRefused("a", apart(str(tmp_path), "..."))
    at = Entrance(worker_group, storage=LocalStorage(tmp_path))
    with pytest.raises(
        SpecError, match=f"^node a: {APART}: .* give `storage` a folder that all nodes share"
    ):
        at.passed(refused, NODES)
    at.passed(answered(at, "b"), NODES)
    assert at.passed(refused, NODES) == replace(refused, pool="spot"), "the others train on"
    again = Entrance(worker_group, storage=LocalStorage(tmp_path), attached=True)
    assert again.passed(refused, NODES) == replace(refused, pool="spot"), (
        "workers of an earlier driver may train"
    )
    assert again.passed(prepared("b"), NODES) == prepared("b"), "it was admitted by that driver"


def test_storage_that_cannot_be_written_says_nothing_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_group: Any = FakeWorkerGroup("a")
    folder = LocalStorage(tmp_path)
    at = Entrance(worker_group, storage=folder)
    with monkeypatch.context() as full:

        def put(key: str, data: bytes) -> bool:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(folder, "put", put)
        assert terms(at, "a").mark is None
    assert terms(at, "a").mark is not None
