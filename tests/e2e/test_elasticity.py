"""One run each: a loss during a transition; no room for a layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import PROGRAM, SOON_S, events, job, run, went_on_as_if_nothing_happened

from elastic.types import PlanEntered, StepDone

pytestmark = pytest.mark.e2e


@pytest.mark.whole
def test_loss_during_a_transition(tmp_path: Path) -> None:
    """A node is killed at the step at which another one gets its notice."""
    drill = [
        {"at_step": 25, "notice": "rank:2", "deadline_s": SOON_S},
        {"at_step": 25, "kill": "rank:4"},
    ]
    summary, lines = run(job(tmp_path, 60, drill))
    went_on_as_if_nothing_happened(summary, lines, 60)
    ordered = [
        a.plan
        for line in lines
        if line.decision
        for a in line.decision.actions
        if hasattr(a, "plan")
    ]
    entered = {e.generation for e in events(lines, PlanEntered)}
    assert {p.generation for p in ordered} - entered, (
        "the kill must have hit a generation that was ordered and not entered"
    )
    assert [p.generation for p in ordered] == sorted({p.generation for p in ordered}), (
        "generations only rise"
    )


def test_a_layout_that_does_not_fit_gives_way_to_the_next(tmp_path: Path) -> None:
    """The allocator gives out at more than four samples on a worker: two shares of six do not
    fit."""
    program = PROGRAM.with_name("tiny_small_memory.py")
    pools = [{"name": "owned", "market_type": "owned", "gpus_per_node": 2, "max_nodes": 2}]
    folder = job(tmp_path, 12, [], layout={4: "dp_shard=2,tp=2"}, program=str(program), pools=pools)
    summary, lines = run(folder)
    assert summary["outcome"] == "succeeded", summary["reason"]
    start, then = summary["transitions"][:2]
    assert then["cause"] == "infeasible"
    assert start["to_layout"] == "dp_shard=2,tp=2"
    assert then["to_layout"] != "dp_shard=2,tp=2"
    why = [
        line.decision.reason
        for line in lines
        if line.decision and "does not fit" in line.decision.reason
    ]
    assert why
    assert "GiB measured" in why[0]
    assert sorted({e.step for e in events(lines, StepDone)}) == list(range(1, 13))
