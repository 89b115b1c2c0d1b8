"""Data that cannot be read for no fault of the program: how long it is waited for, and which node is
left for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story, orders, plan_of

from elastic.policy.faults.unread_data import NODE_MOST
from elastic.types import Abort, Decision, EnterPlan, Plan, Quarantine, Stop, WorkerFailed, WorkerId

AWAY = (
    "the dataset failed at sample 7 of step 6: s3://b/k: no whole answer (asked 10 times in 120 s)"
)
EIO = "the dataset failed at sample 7 of step 6: OSError: [Errno 5] Input/output error"


def story(*nodes: str, steps: int = 5, awaits_data: bool = True) -> tuple[Story, Plan]:
    made = Story()
    made.state = replace(made.state, awaits_data=awaits_data)
    return made, made.running(*nodes, steps=steps)


def unread(plan: Plan, kind: str, node: str = "a") -> WorkerFailed:
    text = EIO if kind == "unread" else AWAY
    return WorkerFailed(WorkerId(node, 0), plan.generation, kind, text)  # type: ignore[arg-type]


def leave(made: Story, plan: Plan) -> Decision:
    """All of them, with what they hold."""
    step = made.state.step
    held = {w.node_id: [(rank, step, "live")] for rank, w in enumerate(plan.ranks)}
    return made.quiesced(plan, held)


def attempt(made: Story, kind: str, node: str = "a", *, for_s: float = 120.0) -> Decision:
    """The running generation waits so long for its data, in vain; the last decision: the next one
    is ordered, or the run ends."""
    plan = made.state.plan
    assert plan is not None
    broken = made.tick(unread(plan, kind, node), after_s=for_s)
    assert orders(broken, Abort) and not orders(broken, Stop), broken.reason
    found = leave(made, plan)
    if made.state.phase == "failed":
        return next(one for one in made.decisions if orders(one, Stop))
    while not orders(found, EnterPlan) and not orders(found, Stop):
        assert found.wake_at_s is not None
        found = made.tick(after_s=found.wake_at_s - made.now_s)
    if orders(found, EnterPlan):
        made.entered()
    return found


def ends(made: Story, kind: str, n: int, for_s: float) -> bool:
    return any(orders(attempt(made, kind, for_s=for_s), Stop) for _ in range(n))


@pytest.mark.parametrize("kind", ["storage", "refused"])
@pytest.mark.parametrize("steps", [5, 0])
@pytest.mark.parametrize("flag", [True, False], ids=["", "a journal of before"])
def test_storage_that_is_away_is_waited_for_by_a_run_that_has_begun(
    kind: str, steps: int, flag: bool
) -> None:
    made, _ = story("a", "b", steps=steps, awaits_data=flag)
    last = Decision()
    for _ in range(40):
        last = attempt(made, kind)
        if orders(last, Stop):
            break
    if flag and steps and kind == "storage":
        assert plan_of(last).generation == 41 and made.now_s > 4000.0
        made.steps(1)
        assert not made.state.unread, "what comes later begins anew"
        assert not ends(made, "unread", 5, 1.0) and ends(made, "unread", 1, 1.0)
        return
    (stop,) = orders(last, Stop)
    assert stop.outcome == "failed" and AWAY in stop.reason
    waited = 900.0 if flag and steps else 5 * 120.0
    assert waited < made.now_s < waited + 300.0, "credentials may be renewed, and nodes are paid"


@pytest.mark.parametrize("flag", [True, False], ids=["", "a journal of before"])
def test_it_explains_what_the_others_heard_and_is_no_break_of_a_step(flag: bool) -> None:
    """Its peers hear that it has gone before it has said why."""
    made, plan = story("a", "b", steps=5, awaits_data=flag)
    reset = WorkerFailed(WorkerId("b", 0), plan.generation, "collective", "connection reset")
    assert orders(made.tick(reset), Abort)
    assert made.state.breaks
    made.tick(unread(plan, "storage"))
    assert made.state.aborting is not None
    assert (AWAY in made.state.aborting.failure.reason) == flag
    assert bool(made.state.breaks) != flag
    if flag:
        leave(made, plan)
        again = made.tick(after_s=20.0)
        assert AWAY in again.reason
        made.entered()
        running = made.state.plan
        assert running is not None
        found = made.tick(replace(reset, generation=running.generation), unread(running, "storage"))
        assert AWAY in found.reason and not made.state.breaks


def test_what_one_node_alone_cannot_read_is_held_against_it() -> None:
    """It is tried again first, what it has in memory is served on, and then it goes."""
    made, _ = story("a", "b", "c")
    for n in range(NODE_MOST):
        assert "a" in made.state.plan.nodes, n  # type: ignore[union-attr]
        last = attempt(made, "unread")
    new = plan_of(last)
    assert new.nodes == ("b", "c") and new.resume.step == 5
    assert {held.worker.node_id for held in new.resume.holdings} >= {"a"}
    found = [made.tick(after_s=k) for k in (1.0, 6.0, 6.0)]
    (gone,) = [one for decision in found for one in orders(decision, Quarantine)]
    assert gone.node_id == "a" and EIO in gone.reason
    made.steps(1)
    assert made.state.phase == "running" and not made.state.unread


@pytest.mark.parametrize("nodes", [("a",), ("a", "b")], ids=["the only one", "others too"])
def test_no_node_is_left_for_what_others_cannot_read_either(nodes: tuple[str, ...]) -> None:
    made, _ = story(*nodes)
    for n in range(5):
        last = attempt(made, "unread", nodes[n % len(nodes)], for_s=1.0)
        assert plan_of(last).nodes == nodes
    (stop,) = orders(attempt(made, "unread", for_s=1.0), Stop)
    assert "5 attempts in a row made no progress past step 5" in stop.reason and EIO in stop.reason
