"""One run each: notice, kill and growth; rank 0 killed, then a worker stopped; a loss during a transition; no room."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import (
    PROGRAM,
    SOON_S,
    Watch,
    events,
    job,
    lost_only_what_no_copy_had,
    plans,
    run,
    slow_until_grown,
    survivors_kept_their_processes,
    went_on_as_if_nothing_happened,
)  # fmt: skip

from elastic.ledger.journal import Line
from elastic.sim.replay import replay
from elastic.types import DrillAsked, NodePrepared, PlanEntered, Silent, StepDone

pytestmark = pytest.mark.ray


def test_notice_kill_and_growth_in_one_run(tmp_path: Path) -> None:
    drill = [
        {"at_step": 20, "notice": "any-spot", "deadline_s": SOON_S},
        {"at_step": 35, "kill": "any-spot"},
        {"at_step": 40, "add": "spot"},
    ]
    folder = job(tmp_path, 80, drill, layout={6: "dp_shard=3,tp=2", 4: "pp=2,dp_shard=2", 2: "dp_shard=2"})
    watch = Watch(tmp_path / "runs" / "run" / "journal.jsonl")
    watch.start()
    with slow_until_grown(watch.journal, tmp_path / "slow"):
        summary, lines = run(folder)
    watch.ended.set()
    went_on_as_if_nothing_happened(summary, lines, 80)
    by_cause = {t["cause"]: t for t in summary["transitions"]}
    assert set(by_cause) == {"start", "notice", "loss", "growth"}
    assert by_cause["notice"]["steps_lost"] == 0
    assert by_cause["growth"]["steps_lost"] == 0
    lost_only_what_no_copy_had(by_cause["loss"], lines)
    assert [by_cause[c]["source"] for c in ("notice", "growth")] == ["live", "live"]
    hit = {name for e in events(lines, DrillAsked) for kind in ("notice", "kill") for name in e.drill.get(kind, ())}
    survivors_kept_their_processes(lines, hit)
    assert watch.started
    assert not watch.replaced
    assert replay(lines).identical
    let_in(lines)


def let_in(lines: list[Line]) -> None:
    """Every node was looked at, beside what its workers do anyway; one that joined a running generation, its link too."""
    prepared = events(lines, NodePrepared)
    found = [event.admission for event in prepared]
    assert found and all(one is not None and one.flop_per_s > 0 and one.host_bytes > 0 for one in found)
    joined = found[-1]
    assert joined is not None and joined.neighbour in {node for plan in plans(lines) for node in plan.nodes}
    assert joined.neighbour != prepared[-1].node_id and joined.link_bytes_per_s > 0
    print("let in:", [(one.seconds, one.waited_s) for one in found if one is not None])


def test_the_killed_node_held_rank_0_then_a_worker_is_stopped_and_left_behind(tmp_path: Path) -> None:
    summary, lines = run(job(tmp_path, 70, [{"at_step": 20, "kill": "rank0"}, {"at_step": 45, "hang": "any-spot"}]))
    went_on_as_if_nothing_happened(summary, lines, 70)
    of_rank_0, of_the_stopped = [t for t in summary["transitions"] if t["cause"] == "loss"]
    lost_only_what_no_copy_had(of_rank_0, lines)
    lost_only_what_no_copy_had(of_the_stopped, lines)
    killed, hung = ({name for e in events(lines, DrillAsked) for name in e.drill.get(kind, ())} for kind in ("kill", "hang"))
    assert killed == {plans(lines)[0].ranks[0].node_id}
    survivors_kept_their_processes(lines, killed | hung)
    assert {e.worker.node_id for e in events(lines, Silent)} == hung
    assert of_the_stopped["pause_s"] < 60, "that of the group's own timeout"


def test_loss_during_a_transition(tmp_path: Path) -> None:
    """A node is killed at the step at which another one gets its notice."""
    drill = [{"at_step": 25, "notice": "rank:2", "deadline_s": SOON_S}, {"at_step": 25, "kill": "rank:4"}]
    summary, lines = run(job(tmp_path, 60, drill))
    went_on_as_if_nothing_happened(summary, lines, 60)
    ordered = [a.plan for line in lines if line.decision for a in line.decision.actions if hasattr(a, "plan")]
    entered = {e.generation for e in events(lines, PlanEntered)}
    assert {p.generation for p in ordered} - entered, "the kill must have hit a generation that was ordered and not entered"
    assert [p.generation for p in ordered] == sorted({p.generation for p in ordered}), "generations only rise"


def test_a_layout_that_does_not_fit_gives_way_to_the_next(tmp_path: Path) -> None:
    """The allocator gives out at more than four samples on a worker: two shares of six do not fit."""
    program = PROGRAM.with_name("tiny_small_memory.py")
    pools = [{"name": "owned", "market_type": "owned", "gpus_per_node": 2, "max_nodes": 2}]
    folder = job(tmp_path, 12, [], layout={4: "dp_shard=2,tp=2"}, program=str(program), pools=pools)
    summary, lines = run(folder)
    assert summary["outcome"] == "succeeded", summary["reason"]
    start, then = summary["transitions"][:2]
    assert then["cause"] == "infeasible"
    assert start["to_layout"] == "dp_shard=2,tp=2"
    assert then["to_layout"] != "dp_shard=2,tp=2"
    why = [line.decision.reason for line in lines if line.decision and "does not fit" in line.decision.reason]
    assert why
    assert "GiB measured" in why[0]
    assert sorted({e.step for e in events(lines, StepDone)}) == list(range(1, 13))
