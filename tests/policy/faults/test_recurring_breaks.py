"""A step that breaks each time it is done, on nodes that stay, is the program's: the run ends, no
node is quarantined."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story, orders, stopped

from elastic.types import (
    NodeLost,
    NodePrepared,
    Plan,
    Prepare,
    Quarantine,
    Quiesced,
    Silent,
    Stop,
    WorkerFailed,
    WorkerId,
)

A, B = WorkerId("a", 0), WorkerId("b", 0)
PLACES = {A: "train.py, line 27", B: "its backward pass"}


def story(*, steps: int, blames_program: bool = True) -> Story:
    made = Story(layout="dp_shard=2", min_workers=2)
    made.state = replace(made.state, blames_program=blames_program)
    made.running("a", "b", steps=steps)
    return made


def ends(made: Story) -> bool:
    return any(orders(one, Stop) for one in made.decisions)


def quarantined(made: Story) -> list[str]:
    return [one.node_id for d in made.decisions for one in orders(d, Quarantine)]


def breaks(made: Story, *kinds: str, who: WorkerId = A) -> Plan:
    """The generation that runs, by these errors; its workers leave it, and say where they stood."""
    plan = made.state.plan
    assert plan is not None
    for kind in kinds:
        made.tick(WorkerFailed(who, plan.generation, kind, f"it said {kind}"))  # type: ignore[arg-type]
    for worker in plan.ranks:
        if made.state.lives(worker):
            made.tick(Quiesced(worker, plan.generation, 0, at=PLACES[worker]))
    return plan


def again(made: Story, steps: int = 0) -> None:
    """It begins anew, once who died is there again."""
    for decision in made.decisions[-4:]:
        for order in orders(decision, Prepare):
            made.tick(NodePrepared(order.node_id))
    made.tick(after_s=20)
    made.entered()
    made.steps(steps)


@pytest.mark.parametrize(
    "kinds", [("mismatch",), ("collective", "mismatch", "process"), ("mismatch", "process")]
)
def test_collectives_that_do_not_match_are_retried_once(kinds: tuple[str, ...]) -> None:
    made = story(steps=0, blames_program=False)
    breaks(made, *kinds)
    assert not ends(made)
    again(made)
    breaks(made, *kinds)
    stop = stopped(made)
    assert stop.outcome == "failed" and not quarantined(made)
    dead = "process" in kinds
    stood = "rank 0 stood at train.py, line 27, rank 1 at its backward pass"
    assert stop.reason.startswith(
        "step 1 has failed 2 times in a row, the program's ranks do not match: worker a/0: it said "
        f"mismatch; {'rank 1 stood at its backward pass' if dead else stood}; every rank must call"
    )


def test_mismatches_of_two_steps_are_two() -> None:
    made = story(steps=3)
    breaks(made, "mismatch")
    again(made, steps=4)
    breaks(made, "mismatch")
    assert not ends(made)


def test_a_step_that_fails_whenever_it_is_done_ends_the_run() -> None:
    """Its process dies without a word of why, or does not come: that is seen three times."""
    made = story(steps=3)
    for n in range(3):
        assert not ends(made), n
        if n:
            again(made, steps=3)
        breaks(made, "process")
    stop = stopped(made)
    assert stop.outcome == "failed" and not quarantined(made)
    assert stop.reason.startswith(
        "step 4 has failed 3 times in a row, while the steps before it were done again on a, b "
        "each time: it is the program that fails there; the last time: worker a/0: it said process"
    )


def test_a_rank_that_does_not_come_in_one_step_is_no_stalled_node() -> None:
    made = story(steps=3)
    for n in range(3):
        if n:
            again(made, steps=3)
        plan = made.state.plan
        assert plan is not None
        made.tick(Silent(A, plan.generation, "stepping", 12.0, "it stands at train.py:9"))
        made.tick(Quiesced(B, plan.generation, 0))
    assert "it stands at train.py:9" in stopped(made).reason and not quarantined(made)


@pytest.mark.parametrize("how", ["another step", "no step redone", "a lost node", "before"])
def test_what_may_be_the_nodes_fault_does_not_end_it(how: str) -> None:
    steps = {"another step": (5, 4, 3), "no step redone": (0, 0, 0)}.get(how, (3, 3, 3))
    made = story(steps=steps[0], blames_program=how != "before")
    for n in range(3):
        if n:
            again(made, steps[n])
        breaks(made, "process")
        if how == "a lost node" and n < 2:
            made.tick(NodeLost("a", "reclaimed"))
            made.nodes("a")
    assert not ends(made)
