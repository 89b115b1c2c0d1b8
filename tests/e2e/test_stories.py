"""Long runs in which all happens that happens to a run: each is judged from its journal, as if
nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import (
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
from support.e2e.strikes import FOUR_NODES, newcomer, sender, struck

from elastic.cluster.local.local_cluster import LocalCluster
from elastic.ledger.journal import Line
from elastic.sim.replay import replay
from elastic.types import (
    Abort,
    DrillAsked,
    NodePrepared,
    Quarantine,
    Silent,
    StepDone,
    WorkerFailed,
    WrongNumbers,
)

pytestmark = pytest.mark.e2e


def test_a_day_on_spot(embedded: LocalCluster, tmp_path: Path) -> None:
    """A notice, a new node, a kill, a new node, a stopped process, and the kill of rank 0's node:
    layouts of all axes."""
    drill = [
        {"at_step": 12, "notice": "any-spot", "deadline_s": SOON_S}, {"at_step": 24, "add": "spot"},
        {"at_step": 40, "kill": "any-spot"}, {"at_step": 46, "add": "spot"},
        {"at_step": 64, "hang": "any-spot"}, {"at_step": 80, "kill": "rank0"},
    ]  # fmt: skip
    folder = job(
        tmp_path, 95, drill, layout={6: "dp_shard=3,tp=2", 4: "pp=2,dp_shard=2", 2: "dp_shard=2"}
    )
    watch = Watch(tmp_path / "runs" / "run" / "journal.jsonl")
    watch.start()
    with slow_until_grown(watch.journal, tmp_path / "slow"):
        summary, lines = run(folder, on=embedded)
    watch.ended.set()
    went_on_as_if_nothing_happened(summary, lines, 95)
    moves = summary["transitions"]
    # the stopped node is replaced: before the last kill, or not any more
    causes = [t["cause"] for t in moves]
    assert causes[:6] == ["start", "notice", "growth", "loss", "growth", "loss"] and causes[6:] in (
        ["growth", "loss"],
        ["loss"],
    )
    promised = [(t["source"], t["steps_lost"]) for t in moves if t["cause"] in ("notice", "growth")]
    assert set(promised) == {("live", 0)}, promised
    for loss in (t for t in moves if t["cause"] == "loss"):
        lost_only_what_no_copy_had(loss, lines)
        assert loss["pause_s"] < 60, "that of the group's own timeout"
    asked = {
        kind: [n for e in events(lines, DrillAsked) for n in e.drill.get(kind, ())]
        for kind in ("notice", "kill", "hang")
    }
    survivors_kept_their_processes(lines, {name for names in asked.values() for name in names})
    assert {e.worker.node_id for e in events(lines, Silent)} == set(asked["hang"])
    assert asked["kill"][-1] == plans(lines)[-2].ranks[0].node_id
    assert plans(lines)[-1].layout.world_size in (2, 4)
    assert watch.started and not watch.replaced
    assert replay(lines).identical
    let_in(lines)


def let_in(lines: list[Line]) -> None:
    """Every node was looked at, beside what its workers do anyway; one that joined a running
    generation, its link too."""
    prepared = events(lines, NodePrepared)
    found = [event.admission for event in prepared]
    assert found and all(
        one is not None and one.flop_per_s > 0 and one.host_bytes > 0 for one in found
    )
    joined = found[-1]
    assert joined is not None and joined.neighbor in {
        node for plan in plans(lines) for node in plan.nodes
    }
    assert joined.neighbor != prepared[-1].node_id and joined.link_bytes_per_s > 0


def test_workers_that_answer_and_are_sick_all_the_same(
    embedded: LocalCluster, tmp_path: Path
) -> None:
    """Rank 0's GPU stalls while a checkpoint has begun and results are compared: its process
    answers, the others wait for it in a collective. Then one silently corrupts its results: the
    steps since the last comparison are done again."""
    drill = [
        {"at_step": 20, "stall": "rank:0", "gpu": 0},
        {"at_step": 42, "corrupt": "rank:2", "gpu": 0},
    ]
    layouts = {4: "dp_shard=2,tp=2", 3: "dp_shard=3", 2: "dp_shard=2"}
    pools = [
        {
            "name": "spot",
            "market_type": "spot",
            "gpus_per_node": 1,
            "usd_per_node_h": 1.0,
            "max_nodes": 4,
        }
    ]
    folder = job(
        tmp_path, 60, drill, pools=pools, layout=layouts, check_numbers_every=10, durable_every=10
    )
    summary, lines = run(folder, on=embedded)
    silent, wrong = events(lines, Silent), events(lines, WrongNumbers)
    assert [e.worker for e in silent] == [plans(lines)[0].ranks[0]], silent
    assert "has not come to collective" in silent[0].why and "in stand" in silent[0].why
    killed = [
        a.kill
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, Abort)
    ]
    assert (silent[0].worker,) in killed
    lost = next(t for t in summary["transitions"] if t["cause"] == "loss")
    assert lost["pause_s"] < 40, "not that of the group's own timeout"
    (asked,) = [e for e in events(lines, DrillAsked) if "corrupt" in e.drill]
    assert len(wrong) == 1 and {w.node_id for w in wrong[0].workers} == set(
        asked.drill["corrupt"]
    ), wrong
    assert wrong[0].good_step < wrong[0].step == wrong[0].good_step + 10
    went_on_as_if_nothing_happened(summary, lines, 60)
    assert replay(lines).identical


def test_losses_at_the_worst_moments(embedded: LocalCluster, tmp_path: Path) -> None:
    """A node is killed; a worker while that is repaired; then one that has just been told to join;
    then one with a notice that has just been told to send its boxes. Two copies of each box:
    nothing is read from disk."""
    drill = [
        {"at_step": 20, "kill": "rank:3"},
        {"at_step": 55, "notice": "rank:1", "deadline_s": 5},
    ]
    folder = job(tmp_path, 80, drill, peer_copies=2, **FOUR_NODES)
    whom = {"loss": lambda plan: plan.ranks[1], "growth": newcomer, "notice": sender}
    summary, lines, victims = struck(folder, whom, embedded)
    went_on_as_if_nothing_happened(summary, lines, 80)
    ordered = plans(lines)
    moves = {t["generation"]: t for t in summary["transitions"]}
    assert ordered[0].copies_to == ((1, 2), (2, 3), (3, 0), (0, 1))
    first = {
        cause: next(i for i, plan in enumerate(ordered) if plan.cause == cause) for cause in whom
    }
    after = {cause: ordered[i + 1] for cause, i in first.items()}
    assert {plan.cause for plan in after.values()} == {"loss"}
    assert [p.resume.source for p in (ordered[first["loss"]], after["loss"])] == ["peer", "peer"]
    assert victims["loss"] not in after["loss"].ranks
    lost_only_what_no_copy_had(moves[after["loss"].generation], lines)
    live = {h.rank for h in after["growth"].resume.holdings if h.kind == "live"}
    assert live == set(range(ordered[first["growth"] - 1].layout.world_size)), (
        "every box of the boundary is still in its place"
    )
    assert moves[after["growth"].generation]["steps_lost"] == 0
    assert victims["notice"] not in ordered[first["notice"]].ranks
    lost_only_what_no_copy_had(moves[after["notice"].generation], lines)


def test_a_device_that_fails_is_left_behind_and_its_node_quarantined(
    embedded: LocalCluster, tmp_path: Path
) -> None:
    """By a made-up CUDA error of one of its GPUs."""
    steps = 40
    drill = [{"at_step": 12, "device_error": "rank:3", "gpu": 1, "place": "backward"}]
    pools = [
        {
            "name": "spot",
            "market_type": "spot",
            "gpus_per_node": 2,
            "usd_per_node_h": 1.0,
            "max_nodes": 2,
        }
    ]
    summary, lines = run(
        job(tmp_path, steps, drill, pools=pools, layout={4: "dp_shard=4", 2: "dp_shard=2"}),
        on=embedded,
    )
    went_on_as_if_nothing_happened(summary, lines, steps)
    (asked,) = [e.drill["device_error"] for e in events(lines, DrillAsked)]
    (failed,) = [e for e in events(lines, WorkerFailed) if e.kind == "device"]
    assert [failed.worker.node_id] == asked and failed.step >= 12
    loss = next(t for t in summary["transitions"] if t["cause"] == "loss")
    lost_only_what_no_copy_had(loss, lines)
    assert loss["pause_s"] < 30, "that of the group's own timeout"
    after = next(plan for plan in plans(lines) if plan.generation == loss["generation"])
    assert asked[0] not in after.nodes and after.layout.world_size == 2
    (aside,) = [
        a
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, Quarantine)
    ]
    assert [aside.node_id] == asked and "uncorrectable ECC error" in aside.reason
    survivors_kept_their_processes(lines, set(asked))
    assert replay(lines).identical


@pytest.mark.whole
def test_a_node_that_is_cut_off_is_given_up_and_taken_back(
    embedded: LocalCluster, tmp_path: Path
) -> None:
    """From the driver, its peers and storage, for longer than its workers are waited for: the
    others continue without it, what it still does counts for nothing, and afterwards it takes part
    again."""
    steps = 24
    drill = [{"at_step": 10, "partition": "any-spot", "for_s": 8}]
    pools = [
        {
            "name": "spot",
            "market_type": "spot",
            "gpus_per_node": 1,
            "usd_per_node_h": 1.0,
            "max_nodes": 3,
        }
    ]
    folder = job(tmp_path, steps, drill, pools=pools, layout={3: "dp_shard=3", 2: "dp_shard=2"})
    with slow_until_grown(tmp_path / "runs" / "run" / "journal.jsonl", tmp_path / "slow"):
        summary, lines = run(folder, on=embedded)
    went_on_as_if_nothing_happened(summary, lines, steps)
    (asked,) = [e.drill["partition"] for e in events(lines, DrillAsked)]
    done = [e.generation for e in events(lines, StepDone)]
    assert done == sorted(done), "no step of an older generation after the first of a newer one"
    with_it, without, *back = [asked[0] in plan.nodes for plan in plans(lines)]
    assert with_it and not without and back[-1], plans(lines)
    loss = next(t for t in summary["transitions"] if t["cause"] == "loss")
    lost_only_what_no_copy_had(loss, lines)
    survivors_kept_their_processes(lines, set(asked))
    assert replay(lines).identical
