"""The actor's shell without Ray: environment, fencing, orders that come twice."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cluster.stage import FAKE, plan

from elastic.cluster.ray import processes
from elastic.cluster.workers.worker_actor import ORPHAN_LEAVE_S, Worker, WorkerSetup
from elastic.errors import SpecError
from elastic.types import (
    DigestPart,
    EnterPlan,
    FormGroups,
    NodePrepared,
    PlanEntered,
    Prepare,
    Quiesce,
    Quiesced,
    StepDone,
    WorkerId,
    WrongNumbers,
)
from elastic.types.orders import Rendezvous, WorkerOrder
from elastic.version import versions

ME = WorkerId("a", 0)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the shell does about the priority of its process, which is that of the tests here."""
    calls: list[str] = []
    monkeypatch.setattr(processes, "stand_back", lambda: calls.append("back") or True)
    monkeypatch.setattr(processes, "step_forward", lambda: calls.append("forward"))
    return calls


@pytest.fixture
def worker(tmp_path: Path, said: list[str]) -> Worker:
    setup = WorkerSetup(ME, 1, "spot", {"folder": ""}, str(tmp_path), 3, FAKE, ray_id="ff")
    return Worker(setup)


def test_the_environment_stands_before_torch_is_imported() -> None:
    code = (
        "import elastic.cluster.workers.worker_actor, sys; assert not {'torch', 'ray'} & "
        "set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_older_epoch_is_refused_a_newer_one_takes_over(worker: Worker) -> None:
    worker.order(3, WorkerOrder(Prepare("a")))
    worker.order(5, WorkerOrder(Prepare("a")))
    for late in (lambda: worker.poll(4, 0, 0.0), lambda: worker.order(4, order_of(1))):
        with pytest.raises(
            SpecError, match="driver of epoch 4 has been replaced by that of epoch 5"
        ):
            late()
    assert worker.ordered == 0


def order_of(generation: int, kind: type[EnterPlan] | type[FormGroups] = EnterPlan) -> WorkerOrder:
    return WorkerOrder(kind(plan(generation, [ME])), Rendezvous((ME,), ("127.0.0.1", 1)))


def test_a_generation_is_entered_once(worker: Worker) -> None:
    told: list[WorkerOrder] = []
    worker.session = SimpleNamespace(order=told.append)
    for generation in (1, 1, 3, 2, 3, 4):
        worker.order(3, order_of(generation))
    assert told == [order_of(1), order_of(3), order_of(4)]
    worker.order(3, order_of(4, FormGroups))
    worker.order(3, order_of(5, FormGroups))
    assert told[3:] == [order_of(5, FormGroups)] and worker.ordered == 4, (
        "groups of one that was entered are not made ahead"
    )


def test_what_prepares_stands_back_until_its_first_generation(
    worker: Worker, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.session = SimpleNamespace(order=lambda order: said.append(type(order.action).__name__))
    worker.order(3, WorkerOrder(Prepare("a")))
    for generation in (1, 2):
        worker.order(3, order_of(generation))
    assert said == ["back", "Prepare", "forward", "EnterPlan", "EnterPlan"]
    del said[:]
    # it ends the process when no driver polls
    monkeypatch.setattr(Worker, "_watch_driver", lambda self: None)
    Worker(WorkerSetup(ME, 1, "spot", {"folder": ""}, str(tmp_path), 3, FAKE, outlives=True))
    assert said == [], "on a cluster a node has its cores for itself"


def test_standing_back_is_undone_for_every_thread() -> None:
    code = """
import os, resource, threading
from elastic.cluster.ray import processes
values = lambda: {os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir("/proc/self/task")}
gate = threading.Event()
threading.Thread(target=gate.wait).start()
could = processes.stand_back()
threading.Thread(target=gate.wait).start()
back = values()
if could:
    processes.step_forward()
print(could, back, values())
gate.set()
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() in ("True {4} {0}", "False {0} {0}")


def test_the_next_driver_hears_the_newest_steps_again(worker: Worker) -> None:
    for step in (1, 2, 3):
        worker.session.put(StepDone(1, step, 1.0, 8, 0.1))
    worker.session.put(Quiesced(ME, 1, 3))
    assert len(worker.poll(3, 0, 1.0).messages) == 4
    assert worker.poll(3, 4, 0.0).messages == ()
    worker.session.put(StepDone(2, 4, 1.0, 8, 0.1))
    again = worker.poll(4, 0, 1.0).messages
    assert [(n, e.step) for n, e in again if isinstance(e, StepDone)] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (5, 4),
    ]
    assert len(again) == 4
    assert worker.poll(4, 5, 0.0).messages == ()


def test_the_next_driver_hears_again_what_was_found_of_the_content(worker: Worker) -> None:
    found = (DigestPart(2, 0, 1, 5, 6, 100), WrongNumbers(2, 4, 3, (ME,), "replicas differ"))
    for event in (*found, PlanEntered(2, 0)):
        worker.session.put(event)
    assert len(worker.poll(3, 0, 1.0).messages) == 3
    for step in range(1, 600):  # steps do not push it out
        worker.session.put(StepDone(2, step, 1.0, 8, 0.1))
    worker.poll(3, 3, 0.0)
    again = [e for _, e in worker.poll(4, 602, 0.0).messages if not isinstance(e, StepDone)]
    assert tuple(again) == found


def test_the_passport_says_whether_it_is_prepared(worker: Worker) -> None:
    assert worker.worker_info(3).prepared is False
    worker.order(3, WorkerOrder(Prepare("a")))
    beat = worker.poll(3, 0, 1.0)
    assert beat.messages[0][1] == NodePrepared("a", (os.getpid(),))
    worker_info = worker.worker_info(4)
    assert (worker_info.me, worker_info.pid, worker_info.prepared) == (ME, os.getpid(), True)
    assert (worker_info.ray_id, dict(worker_info.versions)) == ("ff", versions())
    worker.session.close()


class Exit(BaseException):
    """In the place of the process's end."""


@pytest.mark.parametrize("heard_at_s", [None, 500.0])
def test_who_hears_of_no_driver_stops_and_leaves_however_well_it_trains(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, heard_at_s: float | None
) -> None:
    """All ranks may be cut off from a driver that lives: their collectives work, and their steps
    continue."""
    now, calls = SimpleNamespace(s=0.0), list[tuple[Any, ...]]()
    beat = SimpleNamespace(phase="stepping", messages=())

    def passes(seconds: float) -> None:
        now.s += seconds
        if heard_at_s is not None and now.s - seconds < heard_at_s <= now.s:
            worker.poll(3, 0, 0.0)

    def leave(code: int) -> None:
        raise Exit

    worker.session = SimpleNamespace(
        order=lambda order: calls.append((now.s, order.action)),
        poll=lambda ack, wait_s: beat,
        store_alone=lambda epoch, wait_s: calls.append((now.s, epoch)),
    )
    monkeypatch.setattr(
        "elastic.cluster.workers.worker_actor.time",
        SimpleNamespace(monotonic=lambda: now.s, sleep=passes, time=lambda: now.s),
    )
    monkeypatch.setattr("elastic.cluster.workers.worker_actor.os._exit", leave)
    worker.polled_at, worker.ordered, worker.setup = (
        0.0,
        7,
        replace(worker.setup, orphan_lease_s=900.0),
    )
    with pytest.raises(Exit):
        worker._watch_driver()
    begun_s = 900.0 + (heard_at_s or 0.0)
    (asked_s, asked), (stored_s, epoch) = calls
    assert asked == Quiesce(7, save=True) and epoch == 3
    assert begun_s < asked_s <= begun_s + 2 and stored_s <= asked_s + ORPHAN_LEAVE_S + 1
    assert now.s <= begun_s + 3 + ORPHAN_LEAVE_S, "also where its training thread does not stop"
