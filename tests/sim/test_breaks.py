"""Commits that only some have seen, wrong content and steps that are no number, on the virtual
clock."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.driver import drive
from elastic.ledger.journal import MemoryJournal
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault
from elastic.sim.sim_backend import SimBackend
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Job,
    ModelProfile,
    OptimizerSpec,
    Plan,
    Pool,
    RollForward,
    StepDone,
    TensorSpec,
    WorkerId,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=2,
)
POOLS = (Pool("p", max_nodes=4, usd_per_node_h=1.0, market_type="spot"),)
REPLICAS = {4: "dp_replicate=2,dp_shard=2", 3: "dp_shard=3", 2: "dp_shard=2"}
JOB: dict[str, Any] = {
    "steps": 40, "global_batch": 12, "layout": "auto", "min_workers": 1, "peer_every": 3,
    "durable_every": 5,
}  # fmt: skip
AT_S = 24.3  # inside a step


def run(*faults: Fault, **changes: Any) -> tuple[State, SimBackend, MemoryJournal]:
    job = JOB | changes
    backend, journal = SimBackend(POOLS, Job.from_plain(job), faults), MemoryJournal()
    state = drive(backend, journal, DriverStarted("r", 1, job, POOLS, MODEL))
    assert backend.violations == [] and replay(journal.lines).identical
    return state, backend, journal


def orders(journal: MemoryJournal, kind: type) -> list[Any]:
    return [
        a
        for line in journal.lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, kind)
    ]


def plans(journal: MemoryJournal) -> list[Plan]:
    return [order.plan for order in orders(journal, EnterPlan)]


def steps(journal: MemoryJournal) -> list[int]:
    return [
        event.step
        for line in journal.lines
        for _, event in line.events
        if isinstance(event, StepDone)
    ]


@pytest.mark.parametrize("which", range(4))
def test_replicas_lose_no_step_when_one_is_torn_by_a_loss(which: int) -> None:
    state, _, journal = run(
        Fault(AT_S, "loss", which, moment="torn"), layout=REPLICAS, peer_every=0
    )
    assert state.phase == "succeeded"
    forward = orders(journal, RollForward)
    after = plans(journal)[1]
    assert len(forward) == (which in (0, 3)), "else those who have seen the commit hold all of it"
    assert after.cause == "loss" and all(after.resume.step == order.step for order in forward)
    assert steps(journal) == list(range(1, 41)), "each step is done, and told of, once"


def test_nobody_is_gone_and_the_commit_was_torn() -> None:
    state, _, journal = run(Fault(AT_S, "error", moment="torn"))
    assert state.phase == "succeeded" and len(orders(journal, RollForward)) == 1
    assert steps(journal) == list(range(1, 41))


def test_without_replicas_a_torn_step_is_done_again() -> None:
    state, _, journal = run(Fault(AT_S, "loss", 1, moment="torn"))
    assert state.phase == "succeeded" and not orders(journal, RollForward)
    assert sorted(set(steps(journal))) == list(range(1, 41)) and len(steps(journal)) > 40


@pytest.mark.parametrize("moment", ["inside", "waiting"])
def test_a_step_that_nobody_has_committed_is_done_again_from_replicas(moment: Any) -> None:
    state, _, journal = run(Fault(AT_S, "loss", 1, moment=moment), layout=REPLICAS, peer_every=0)
    assert state.phase == "succeeded" and not orders(journal, RollForward)
    assert steps(journal) == list(range(1, 41)), "the state before it was whole"


def test_one_more_is_lost_while_it_rolls_forward() -> None:
    state, _, journal = run(
        Fault(AT_S, "loss", 0, moment="torn"),
        Fault(AT_S + 0.35, "loss", 1),
        layout=REPLICAS,
        peer_every=1,
        durable_every=5,
    )
    assert state.phase == "succeeded" and len(orders(journal, RollForward)) == 1
    assert plans(journal)[1].resume.step < orders(journal, RollForward)[0].step, (
        "the one that was to apply it is gone"
    )


def test_wrong_content_goes_back_to_a_copy_from_before_it() -> None:
    """The violations of the simulator say when anything comes of a generation that is wrong."""
    state, _, journal = run(Fault(20.0, "loss", 1), Fault(32.0, "corrupt"), peer_every=1)
    assert state.phase == "succeeded" and state.distrusted
    back = next(plan for plan in plans(journal) if plan.cause == "rollback")
    assert back.resume.generation not in state.distrusted and back.resume.source == "durable"
    (why,) = [
        line.decision.reason
        for line in journal.lines
        if line.decision and "rolled back" in line.decision.reason
    ]
    assert "the content of generation" in why and "steps back" in why


def test_a_generation_that_began_anew_has_taken_over_nothing_that_could_be_wrong() -> None:
    state, _, journal = run(Fault(AT_S, "corrupt"), steps=10)
    assert state.phase == "succeeded" and len(plans(journal)) == 1 and not state.distrusted


def test_a_step_that_once_is_no_number_is_done_again_with_the_same_samples() -> None:
    state, _, journal = run(Fault(AT_S, "not_finite"))
    assert state.phase == "succeeded" and [plan.cause for plan in plans(journal)] == [
        "start",
        "rollback",
    ]
    assert sorted(set(steps(journal))) == list(range(1, 41))


def test_a_step_that_always_is_no_number_ends_the_run() -> None:
    state, _, journal = run(Fault(AT_S, "not_finite", lasting=True))
    assert state.phase == "failed" and [plan.cause for plan in plans(journal)] == [
        "start",
        "rollback",
    ]
    assert "its samples: 1, 2; again, after one roll-back" in state.outcome_reason


class Watched(SimBackend):
    """At each order: who of all workers lives and answers, one by one and all at once."""

    ended = mute = 0

    def execute(self, action: Any) -> None:
        super().execute(action)
        nodes = {*self._machines, "nowhere"}
        workers = frozenset(WorkerId(name, k) for name in nodes for k in range(3))
        ended, mute = self._ended(workers, nodes), self._mute(workers, nodes)
        assert ended == {worker for worker in workers if not self._lives(worker)}
        assert mute == {worker for worker in workers if not self._answers(worker)}
        gone = {worker for worker in workers if worker.node_id == "nowhere"}
        self.ended, self.mute = self.ended + (ended > gone), self.mute + (mute > ended)


def test_many_workers_live_and_answer_as_each_of_them_does() -> None:
    pools = (Pool("p", gpus_per_node=2, max_nodes=4, market_type="spot"),)
    kinds = ("process", "loss", "hang", "partition")
    faults = [Fault(AT_S + 8 * i, kind, which=i, lasts_s=6) for i, kind in enumerate(kinds)]
    backend = Watched(pools, Job.from_plain(JOB | {"steps": 200}), faults)
    state = drive(
        backend, MemoryJournal(), DriverStarted("r", 1, JOB | {"steps": 200}, pools, MODEL)
    )
    assert state.phase == "succeeded" and backend.violations == []
    assert backend.ended and backend.mute
