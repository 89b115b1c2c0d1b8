"""The drill that cuts nodes off: which entries there may be, what is held back for how long, and
what workers do meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.waiting import until

from elastic.cluster.backend import drills
from elastic.cluster.backend.drill_runner import DrillRunner
from elastic.cluster.workers import worker_group as worker_group_module
from elastic.cluster.workers.worker_actor import WorkerSetup
from elastic.cluster.workers.worker_group import Placement, PollAnswer, WorkerGroup, _Member
from elastic.config.job import drill_entry
from elastic.errors import SpecError
from elastic.observe.event_messages import drill
from elastic.storage import open_storage
from elastic.types import Abort, DrillAsked, Node, Pool, Prepare, Quiesce, StepDone, WorkerId
from elastic.types.orders import Isolate, WorkerOrder
from elastic.worker.process.cut_off import CutOff, CutStorage

A, B = WorkerId("a", 0), WorkerId("b", 0)
ENTRY = {"at_step": 4, "partition": "b", "for_s": 8.0}


class Told:
    """A worker group that notes what it is told."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.calls: list[tuple[Any, ...]] = []

    def workers(self, node_id: str | None = None) -> list[WorkerId]:
        return [one for one in (A, B) if node_id in (None, one.node_id)]

    def order(self, worker: WorkerId, order: WorkerOrder) -> bool:
        self.calls.append((worker, order.action))
        return self.takes

    def cut(self, node_id: str, for_s: float) -> bool:
        self.calls.append(("cut", node_id, for_s))
        return self.takes


def carried_out(entry: dict[str, Any], worker_group: Told, folder: Path) -> list[Any]:
    nodes = {name: Node(name, "p", 1) for name in "ab"}
    schedule = drills.Schedule([entry], open_storage(folder))
    on = DrillRunner(schedule, None, worker_group, nodes, (Pool("p", "CPU", 1, "spot", 1.0, 0, 2),))  # type: ignore[arg-type]
    return on.at_step(4, None, 0.0)


@pytest.mark.parametrize(
    ("sides", "told"),
    [
        (None, [(B, Isolate(8.0, True, True)), ("cut", "b", 8.0)]),
        ("driver", [("cut", "b", 8.0)]),
        (["nodes"], [(B, Isolate(8.0, nodes=True))]),
        (["storage", "driver"], [(B, Isolate(8.0, storage=True)), ("cut", "b", 8.0)]),
    ],
)
def test_who_is_told_what(sides: Any, told: list[Any], tmp_path: Path) -> None:
    entry = ENTRY | ({"from": sides} if sides else {})
    assert drill_entry(entry).plain() == entry
    worker_group = Told()
    (event,) = carried_out(drill_entry(entry).plain(), worker_group, tmp_path)
    assert event == DrillAsked({**entry, "partition": ["b"]})
    assert worker_group.calls == told, "the workers hear of it before they cannot be reached"
    assert drill(event.drill).startswith("partition b for_s 8.0")


def test_nodes_that_do_not_reach_each_other_are_told_of_the_others(tmp_path: Path) -> None:
    entry = {"at_step": 4, "partition": ["a", "b"], "for_s": 8.0, "from": "each-other"}
    assert drill_entry(entry).plain() == entry
    worker_group = Told()
    assert carried_out(entry, worker_group, tmp_path) == [DrillAsked(entry)]
    assert worker_group.calls == [
        (A, Isolate(8.0, apart_from=("b",))),
        (B, Isolate(8.0, apart_from=("a",))),
    ]
    with pytest.raises(SpecError, match="each-other needs a list of two nodes or more"):
        drill_entry({"partition": ["a", "a"], "from": "each-other"})


def test_a_worker_waits_for_nodes_that_it_does_not_reach_as_long_as_a_meeting() -> None:
    cut = CutOff()
    cut.begin(0.05, False, False, apart_from=("b",))
    assert cut.wait_for_nodes({"a", "c"}, 60.0, lambda: False) == ()
    assert cut.wait_for_nodes({"a", "b"}, 60.0, lambda: True) == (), "aborted"
    assert cut.wait_for_nodes({"a", "b"}, 0.0, lambda: False) == ("b",)
    assert cut.wait_for_nodes({"a", "b"}, 60.0, lambda: False) == (), "it is back"


def test_where_nobody_can_be_cut_off_that_is_said(tmp_path: Path) -> None:
    _, failed = carried_out(ENTRY, Told(takes=False), tmp_path)
    assert failed.drill["error"] == "drill: no worker of b can be cut off"


class Ref:
    """An answer that is on its way."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Actor:
    def __init__(self, name: str) -> None:
        self.name = name
        self.heard: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda epoch, *given: self._remote(method, *given))

    def _remote(self, method: str, *given: Any) -> Ref:
        self.heard.append(given[0].action if method == "order" else method)
        step = StepDone(1, len(self.heard), 1.0, 1, 1.0, 0.0, 0.0, 0.0, "")
        beat = SimpleNamespace(messages=((len(self.heard), step),), pid=7, generation=1)
        return Ref(beat if method == "poll" else None)


class Clock:
    now_s = 100.0


@pytest.fixture
def two(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[WorkerGroup, dict[WorkerId, Actor], Clock, list[Any]]:
    """A worker group of two workers; its clock; and whom it has killed."""
    clock, killed = Clock(), list[Any]()
    actors = {A: Actor("a"), B: Actor("b")}
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (list(refs), []))
    monkeypatch.setattr(ray, "get", lambda ref: ref.value)
    monkeypatch.setattr(
        worker_group_module,
        "time",
        SimpleNamespace(monotonic=lambda: clock.now_s, sleep=lambda s: None),
    )
    monkeypatch.setattr(worker_group_module, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(
        worker_group_module.os, "kill", lambda pid, number: killed.append((pid, number))
    )
    worker_group = WorkerGroup(WorkerSetup(A, 1, "spot", {}, "", 1), "test", local=True)
    for worker, actor in actors.items():
        worker_group._join(worker, _Member(actor, "", 1, pid=7))
    return worker_group, actors, clock, killed


def heard(worker_group: WorkerGroup) -> list[WorkerId]:
    worker_group.open_polls()
    return [answer.worker for answer in worker_group.collect(0.0) if isinstance(answer, PollAnswer)]


def test_a_node_that_is_cut_off_is_not_heard_and_its_orders_wait(two: Any) -> None:
    worker_group, actors, clock, _ = two
    assert heard(worker_group) == [A, B]
    worker_group.open_polls()  # one is open, and its answer has come, when the node is cut off
    assert worker_group.cut("b", 8.0)
    orders = [(B, Abort(1)), (B, Quiesce(2)), (A, Abort(1))]
    assert all(worker_group.order(worker, WorkerOrder(action)) for worker, action in orders)
    before = list(actors[B].heard)
    clock.now_s += 7.9
    assert heard(worker_group) == [A] and worker_group.open_polls() == [A, B], (
        "silence is measured on"
    )
    assert actors[B].heard == before and Abort(1) in actors[A].heard
    clock.now_s += 0.2
    assert B in heard(worker_group)
    assert [told for told in actors[B].heard if told != "poll"] == [Abort(1), Quiesce(2)], (
        "in the order in which they came"
    )


def test_who_was_ended_meanwhile_is_killed_before_anything_of_it_is_heard(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it lives on, and a generation that it is in may: nobody listens."""
    worker_group, actors, clock, killed = two
    started: list[Any] = []
    monkeypatch.setattr(worker_group, "_start", lambda me, *rest, **more: started.append(me))
    worker_group.open_polls()
    worker_group.cut("b", 8.0)
    worker_group.end([B])
    worker_group.start(B, Placement("ray", "spot", False), WorkerOrder(Prepare("b")))
    assert worker_group.workers() == [A] and not killed and not worker_group._starters
    clock.now_s += 8.0
    assert heard(worker_group) == [A]
    assert killed == [(7, signal.SIGKILL), "b"]
    until(lambda: started == [B], "the worker that takes its place")
    worker_group.close(end=False)


@pytest.mark.parametrize("own", [True, False])
def test_what_waits_is_done_when_the_run_ends_but_not_by_a_driver_that_was_replaced(
    two: Any, own: bool
) -> None:
    worker_group, _, _, killed = two
    worker_group.cut("b", 3600.0)
    worker_group.end([B])
    worker_group.close(end=False, own=own)
    assert killed == ([(7, signal.SIGKILL), "b"] if own else [])


def test_storage_times_out_and_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(
        "elastic.worker.process.cut_off.time", SimpleNamespace(monotonic=lambda: clock.now_s)
    )
    cut = CutOff()
    storage = CutStorage(open_storage(tmp_path), cut)
    storage.put("key", b"words")
    cut.begin(8.0, nodes=True, storage=False)
    assert storage.get("key") == b"words" and storage.uri.endswith(tmp_path.name)
    cut.begin(8.0, nodes=False, storage=True)
    for ask in (
        lambda: storage.get("key"),
        lambda: storage.put("key", b""),
        lambda: storage.create("key"),
    ):
        with pytest.raises(TimeoutError, match="made up by a drill"):
            ask()
    clock.now_s += 8.0
    assert storage.get("key") == b"words"


def test_peers_are_waited_for_until_the_time_is_over_or_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()

    def passes(seconds: float) -> None:
        clock.now_s += seconds

    monkeypatch.setattr(
        "elastic.worker.process.cut_off.time",
        SimpleNamespace(monotonic=lambda: clock.now_s, sleep=passes),
    )
    cut = CutOff()
    cut.wait_for_peers(lambda: False)
    assert clock.now_s == 100.0
    cut.begin(8.0, nodes=True, storage=True)
    cut.wait_for_peers(lambda: clock.now_s >= 103.0)
    assert clock.now_s == pytest.approx(103.0, abs=0.05)
    cut.wait_for_peers(lambda: False)
    assert clock.now_s == pytest.approx(108.0, abs=0.05)
