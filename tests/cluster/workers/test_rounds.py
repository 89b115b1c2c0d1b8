"""How often the driver looks for answers: a round costs about as much as the report of a step
does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.workers.worker_group import PollAnswer
from elastic.types import (
    Action,
    Event,
    Layout,
    Plan,
    RequestNodes,
    StepDone,
    WorkerFailed,
    WorkerId,
)
from elastic.worker.hosting.hosting_backend import LEAST_S, LOOK_S, SLICE_S, Pacing
from elastic.worker.process.beat import Beat

PLAN = Plan(3, Layout(), (WorkerId("a", 0),), (1,), (1,))
QUIET_S, STEP_S = 20.0, 1.0
quiet: Any = SimpleNamespace


class Quiet(RayBackend):
    """On a clock of its own; its one worker answers with a step each STEP_S, and nothing else
    happens."""

    def __init__(self) -> None:
        self.clock_s, self.n_rounds, self.n_steps, self.waits_s = 0.0, 0, 0, [0.0]
        self._early, self._closed, self._plan, self._pacing = [], False, PLAN, Pacing()
        self.inbox: Any = SimpleNamespace(written=lambda **_: None)
        self.drilling = quiet(die=False, at_step=lambda *_: [])
        self.survey, self.copies = (
            quiet(suspects=False, head_lost=""),
            quiet(committing=False, news=list, digests={}),
        )
        self.liveness = quiet(called=print, answered=lambda *_: None, stepped=lambda *_: None)
        self.gather, self.show = quiet(add=lambda worker, message, at_s: [message]), None
        self.entrance = quiet(passed=lambda event, nodes: event, doubts=lambda *_: ())
        self.run, self.nodes = quiet(plans=()), {}
        self.hold: Any = quiet(check=lambda head_lost: None)
        self.before: Any = quiet(is_known=lambda message: False)
        self.worker_group: Any = quiet(open_polls=list, collect=self.collect, hold_s=0.5)

    def now_s(self) -> float:
        return self.clock_s

    def collect(self, wait_s: float) -> list[PollAnswer]:
        self.n_rounds += 1
        self.waits_s.append(wait_s)
        due_s = (self.n_steps + 1) * STEP_S
        if self.clock_s + wait_s < due_s - 1e-9:
            self.clock_s += wait_s
            return []
        self.clock_s, self.n_steps = due_s, self.n_steps + 1
        done = StepDone(3, self.n_steps, 1.0, 1, STEP_S)
        return [PollAnswer(PLAN.ranks[0], Beat((), 3, "stepping", self.n_steps, 0, 1), (done,))]

    def _arrivals(self) -> list[Event]: return []  # fmt: skip

    def _losses(self) -> list[Event]: return []  # fmt: skip

    def _look(self) -> list[Event]: return []  # fmt: skip


def rounds(backend: Quiet) -> int:
    """In QUIET_S more of the run."""
    before, until_s = backend.n_rounds, backend.clock_s + QUIET_S
    while backend.clock_s < until_s:
        backend.poll(until_s)
    return backend.n_rounds - before


def test_while_it_trains_the_driver_wakes_for_answers_and_looks_only() -> None:
    backend = Quiet()
    rounds(backend)
    assert rounds(backend) <= QUIET_S / STEP_S + 1.1 * QUIET_S / LOOK_S + 1
    assert max(backend.waits_s) <= LOOK_S + 1e-9


@pytest.mark.parametrize("what", ["suspects", "committing", "an order"])
def test_where_something_is_expected_it_looks_often(what: str) -> None:
    backend = Quiet()
    rounds(backend)
    expected: list[Action] = [RequestNodes("spot", 1, "one")] if what == "an order" else []
    backend._closed = True  # nothing is there that could carry it out
    for action in expected:
        backend.execute(action)
    backend._closed = False
    backend.survey.suspects, backend.copies.committing = what == "suspects", what == "committing"  # type: ignore[misc]
    before = backend.n_rounds
    backend.poll(backend.clock_s + SLICE_S)
    assert backend.waits_s[before + 1] == SLICE_S


def test_it_does_not_wait_beyond_the_time_that_it_is_asked_for() -> None:
    pacing = Pacing(trains=True)
    assert pacing.looks(10.0) and not pacing.looks(10.2)
    assert pacing.wait_s(10.1, None, False) == pytest.approx(LOOK_S - 0.1)
    assert pacing.wait_s(10.1, 10.11, False) == pytest.approx(0.01)
    assert pacing.wait_s(10.1, 9.0, False) == LEAST_S


def test_a_group_that_broke_is_asked_for_its_nodes_once_a_round() -> None:
    """Each of its ranks says that it did, of a node that was lost; each answer asked all nodes."""
    ranks, asked = tuple(WorkerId(name, k) for name in "ab" for k in range(4)), list[list[str]]()
    backend, answers = Quiet(), list[PollAnswer]()
    for one in ranks:
        failed = WorkerFailed(one, 3, "collective", "its peer has gone")
        answers.append(PollAnswer(one, Beat((), 3, "idle", 0, 0, 1), (failed,)))
    backend._plan, backend.copies.news = replace(PLAN, ranks=ranks), list
    backend.provider = quiet(ray_id=str)
    backend.survey.suspect = lambda ids: asked.append(sorted(ids))
    backend.worker_group.collect = lambda wait_s: answers
    assert len(backend._round(None)) == len(ranks) and asked == [["a", "b"]]
    answers.clear()
    assert backend._round(None) == [] and len(asked) == 1
