"""What Ray says of a worker that is gone, in the driver's words."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
)
from support.waiting import until

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.nodes import providers
from elastic.cluster.workers import worker_group as worker_group_module
from elastic.cluster.workers.worker_actor import WorkerInfo, WorkerSetup
from elastic.cluster.workers.worker_group import BrokenWorker, WorkerGroup, _Member
from elastic.types import Node, WorkerId
from elastic.version import versions

ME = WorkerId("spot-1", 0)


def worker_group_whose_poll_raises(error: RayError, monkeypatch: pytest.MonkeyPatch) -> WorkerGroup:
    def raises(ref: Any) -> Any:
        raise error

    monkeypatch.setattr(ray, "get", raises)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    worker_group = WorkerGroup(WorkerSetup(ME, 1, "spot", {}, "", 1), "test", local=True)
    worker_group._join(ME, _Member(actor=None, ray_id="", incarnation=1, poll="the poll", pid=4711))
    return worker_group


def test_the_memory_monitor_takes_a_worker_not_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    report = OutOfMemoryError(
        "Task was killed due to the node running low on memory.\nTop 10 memory users: ..."
    )
    worker_group = worker_group_whose_poll_raises(report, monkeypatch)
    (broken,) = worker_group.collect(0.0)
    assert broken == BrokenWorker(
        ME,
        "process",
        "its process is gone: Ray's memory monitor killed it, since the host's memory was "
        "nearly used up",
        4711,
    )
    assert worker_group.workers() == []


def test_a_dead_node_is_a_worker_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group = worker_group_whose_poll_raises(
        NodeDiedError("the node of the actor died: received SIGTERM"), monkeypatch
    )
    (broken,) = worker_group.collect(0.0)
    assert (
        isinstance(broken, BrokenWorker)
        and broken.kind == "process"
        and "the node of the actor died" in broken.error
    )


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        (
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common "
            "causes include: (1) the process was killed by the OOM killer ...",
            "neither exit code nor signal reached Ray",
        ),
        ("Worker exits unexpectedly. Worker exits with an exit code 9.", "it exited with code 9"),
        (
            "Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). "
            "Exit code: 1. The process receives a SIGTERM.",
            "it was sent SIGTERM",
        ),
        ("Actor killed by GCS. Some common causes include: (1) ...", "Actor killed by GCS."),
    ],
)
def test_of_a_process_that_is_gone_what_ray_knows_is_told(
    monkeypatch: pytest.MonkeyPatch, detail: str, told: str
) -> None:
    """Texts as Ray 2.60 has them."""
    died = ActorDiedError()
    died.error_msg = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: Worker\nThe actor "
        "is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit "
        f"detail: {detail}"
    )
    worker_group = worker_group_whose_poll_raises(died, monkeypatch)
    (broken,) = worker_group.collect(0.0)
    assert isinstance(broken, BrokenWorker)
    assert broken.error == f"its process is gone: {told}"


def test_a_connection_that_may_come_back_says_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group = worker_group_whose_poll_raises(
        ActorUnavailableError("unavailable", actor_id=None), monkeypatch
    )
    assert worker_group.collect(0.0) == [] and worker_group.workers() == [ME]


class Ordered:
    """An actor: `order.remote` gives a call, which `ray.get` answers as the test says."""

    def __init__(self, *calls: str) -> None:
        self.given: list[Any] = []
        left = list(calls)

        def remote(epoch: int, order: Any) -> str:
            self.given.append(order)
            return left.pop(0)

        self.order = SimpleNamespace(remote=remote)


def group_of(monkeypatch: pytest.MonkeyPatch, answers: dict[str, RayError]) -> WorkerGroup:
    """Calls without an answer here are done."""

    def get(ref: Any) -> Any:
        if ref in answers:
            raise answers[ref]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(worker_group_module, "kill", lambda actor: None)
    return WorkerGroup(WorkerSetup(ME, 1, "spot", {}, "", 1), "test", local=True)


def test_the_late_error_of_an_order_to_a_killed_worker_leaves_its_successor_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forgotten without being killed, that one would hold its GPU for ever."""
    group = group_of(monkeypatch, {"to the first": ActorDiedError()})
    group._join(ME, _Member(Ordered("to the first"), "", 1))
    assert group.order(ME, "enter")
    group.end([ME])
    assert group.workers() == []
    group._join(ME, _Member(Ordered("to the second"), "", 2))
    assert group.order(ME, "prepare")
    assert group.collect(0.0) == []
    assert group.workers() == [ME] and group.actor(ME).given == ["prepare"]


def test_an_error_that_comes_in_the_same_round_as_the_end_of_its_worker_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = {"poll": ActorDiedError(), "a": ActorDiedError(), "b": ActorDiedError()}
    group = group_of(monkeypatch, dict(died))
    group._join(ME, _Member(Ordered("a", "b"), "", 1, poll="poll", pid=7))
    assert group.order(ME, "enter") and group.order(ME, "save")
    (broken,) = group.collect(0.0)
    assert isinstance(broken, BrokenWorker) and (broken.kind, broken.pid) == ("process", 7)
    assert group.workers() == []


def test_an_order_that_a_broken_connection_may_have_lost_is_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = ActorUnavailableError("unavailable", actor_id=None)
    group = group_of(monkeypatch, {"first": away, "second": away})
    actor = Ordered("first", "second", "third")
    group._join(ME, _Member(actor, "", 1))
    assert group.order(ME, "enter")
    for n in (2, 3, 3, 3):  # the third has arrived
        assert group.collect(0.0) == [] and group.workers() == [ME]
        assert actor.given == ["enter"] * n


class Sent:
    """What stands for Ray where signals are sent: `made` functions, `calls` of them. `answers`:
    until then the head takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.calls, self.answers = 0, list[tuple[str, list[int], int]](), Event()
        ours = SimpleNamespace(remote=self.remote, is_initialized=lambda: True)
        monkeypatch.setattr(providers, "ray", ours)
        providers._signal_task.cache_clear()
        monkeypatch.setattr(worker_group_module, "kill", lambda actor: None)

    def remote(self, function: Any) -> Any:
        self.made += 1
        return SimpleNamespace(options=self.options)

    def options(self, *, scheduling_strategy: Any, **_: Any) -> Any:
        def call(pids: list[int], number: int, raylet: bool) -> None:
            assert self.answers.wait(10) and not raylet
            self.calls.append((scheduling_strategy.node_id, pids, number))

        return SimpleNamespace(remote=call)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sent]:
    made = Sent(monkeypatch)
    yield made
    made.answers.set()
    providers._signal_task.cache_clear()


def far_workers(n_nodes: int, each: int) -> WorkerGroup:
    """On other hosts, whose Ray ids are hexadecimal."""
    group = WorkerGroup(WorkerSetup(ME, 1, "spot", {}, "", 1), "test", local=False)
    for node in range(n_nodes):
        for k in range(each):
            member = _Member(object(), f"{node:056x}", 1, pid=100 * node + k + 1)
            group._join(WorkerId(f"n{node:02}", k), member)
    return group


def test_a_hundred_workers_are_ended_by_one_call_to_each_node_that_nobody_waits_for(
    sent: Sent,
) -> None:
    """Each made a function of its own, which the head keeps, and waited for the head."""
    group = far_workers(25, 4)
    group.end(group.workers()[:50])
    group.end(group.workers())
    assert group.workers() == [] and sent.calls == [], "the head does not answer"
    sent.answers.set()
    group.close(end=True)
    until(lambda: len(sent.calls) == 26, "the calls")
    assert sent.made == 1, "of the 13th node two workers each time"
    there = {ray_id: sorted(p for one, pids, _ in sent.calls if one == ray_id for p in pids)
             for ray_id, _, _ in sent.calls}  # fmt: skip
    assert there == {f"{n:056x}": [100 * n + k + 1 for k in range(4)] for n in range(25)}
    assert {number for *_, number in sent.calls} == {signal.SIGKILL}


def test_workers_of_a_node_that_is_gone_are_sent_nothing(sent: Sent) -> None:
    sent.answers.set()
    backend: Any = object.__new__(RayBackend)
    forgotten = SimpleNamespace(forget=lambda what: None, lost=lambda node_id: None)
    backend.nodes, backend.worker_group = {"n00": Node("n00", "spot")}, far_workers(1, 2)
    backend.provider = backend.drilling = backend.cloud_feed = backend.entrance = forgotten
    backend.gather = backend.liveness = forgotten
    backend._check_successor = lambda: None
    kinds = [type(event).__name__ for event in backend._lose("n00", "raylet unreachable")]
    assert kinds == ["WorkerFailed", "WorkerFailed", "NodeLost"]
    backend.worker_group.close(end=False)
    assert (backend.worker_group.workers(), sent.calls, sent.made) == ([], [], 0)


class Found:
    """An actor that a new driver finds; `worker_info.remote` gives what it will answer."""

    def __init__(self, worker_info: WorkerInfo) -> None:
        self.worker_info = SimpleNamespace(remote=lambda epoch: worker_info)


def test_workers_of_another_version_are_replaced_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = versions()
    said = {"same": ours, "other": ours | {"elastic": "0.0.9"}, "silent": {}}
    actors = {
        name: Found(
            WorkerInfo(WorkerId(name, 0), 1, "spot", 10, True, 1, tuple(known.items()), "ff")
        )
        for name, known in said.items()
    }
    killed: list[Any] = []
    monkeypatch.setattr(
        ray.util,
        "list_named_actors",
        lambda **_: [{"name": name, "namespace": "test"} for name in actors],
    )
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actors[name])
    monkeypatch.setattr(worker_group_module, "kill", killed.append)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    worker_group = WorkerGroup(WorkerSetup(ME, 1, "spot", {}, "", 1), "test", local=False)
    assert [worker_info.me.node_id for worker_info in worker_group.adopt(keep=True)] == [
        "same"
    ] and worker_group.workers() == [WorkerId("same", 0)]
    assert killed == [actors["other"], actors["silent"]]
    assert worker_group._members[WorkerId("same", 0)].ray_id == "ff", "where it is sent signals"
    assert (
        worker_group.outdated[WorkerId("other", 0)]
        == f"elastic 0.0.9 (the run has {ours['elastic']})"
    )
    assert (
        "worker other/0 is replaced: it runs elastic 0.0.9" in caplog.text
        and "worker silent/0" in caplog.text
    )
