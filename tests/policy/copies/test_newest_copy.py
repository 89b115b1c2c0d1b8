"""Which copy a recovery starts from: live > peer > durable at equal step, the newest step wins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import SPOT, job

from elastic.errors import StateLost
from elastic.policy.copies.recovery import covered, from_memory, newest
from elastic.policy.copies.replica_placement import replica_holders
from elastic.policy.copies.retention import kept
from elastic.policy.state.fold import State, fold
from elastic.types import (
    Copy,
    CopyDamaged,
    DriverStarted,
    Holding,
    Job,
    Layout,
    ModelProfile,
    Node,
    Plan,
    WorkerId,
)

NAMES = ("a", "b", "c", "d")
WORKERS = tuple(WorkerId(name, 0) for name in NAMES)


def plan(layout: Layout, generation: int = 1) -> Plan:
    return Plan(generation, layout, WORKERS[: layout.world_size], (12,), (4,))


def state(layout: Layout, held: dict[str, list[tuple[int, int, str]]], **changes: Any) -> State:
    """Holdings of generation 1, by worker: (rank, step, kind)."""
    holdings = {
        WorkerId(n, 0): tuple(Holding(WorkerId(n, 0), 1, r, s, k) for r, s, k in there)
        for n, there in held.items()
    }  # type: ignore[arg-type]
    nodes = {name: Node(name, "spot", 1, "prepared") for name in NAMES}
    base = State(
        run="r",
        job=Job.from_plain(job()),
        pools=(SPOT,),
        nodes=nodes,
        plans={1: plan(layout)},
        generation=1,
        holdings=holdings,
        best_step=9,
    )
    return replace(base, **changes)


def test_live_boxes_of_all_ranks_beat_an_older_peer_copy() -> None:
    found = from_memory(
        state(
            Layout(dp_shard=2),
            {"a": [(0, 9, "live"), (1, 5, "peer"), (0, 5, "peer")], "b": [(1, 9, "live")]},
        )
    )
    assert found is not None and found.step == 9 and {h.kind for h in found.holdings} == {"live"}


def test_a_step_that_only_some_ranks_have_does_not_count() -> None:
    held = {
        "a": [(0, 9, "live"), (0, 5, "peer"), (2, 5, "peer")],
        "b": [(1, 9, "live"), (1, 5, "peer"), (0, 5, "peer")],
    }
    found = from_memory(state(Layout(dp_shard=3), held))
    assert found is not None and found.step == 5
    assert {(h.rank, h.worker.node_id) for h in found.holdings} == {
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (2, "a"),
    }


def test_replicas_stand_in_for_each_other() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    held = {"a": [(0, 9, "live")], "d": [(3, 9, "live")]}
    found = from_memory(state(layout, held))
    assert found is not None and found.step == 9
    assert from_memory(state(layout, {"a": [(0, 9, "live")], "c": [(2, 9, "live")]})) is None


def test_every_loss_of_one_node_is_covered_by_keepers() -> None:
    for layout in (Layout(dp_shard=4), Layout(pp=2, dp_shard=2), Layout(dp_shard=2, tp=2)):
        whole = plan(layout)
        to = replica_holders(layout, whole.ranks, {}, n=1)
        holdings = [
            Holding(whole.ranks[keeper], 1, rank, 5, "peer")
            for rank in range(len(to))
            for keeper in (rank, *to[rank])
        ]
        for lost in NAMES:
            assert covered(whole, [h for h in holdings if h.worker.node_id != lost])
        assert not covered(whole, [h for h in holdings if h.worker.node_id not in ("a", "b")])


def test_live_is_preferred_to_peer_at_the_same_step_on_the_same_worker() -> None:
    found = from_memory(state(Layout(), {"a": [(0, 5, "peer"), (0, 5, "live")]}))
    assert found is not None and [h.kind for h in found.holdings] == ["live"]


def test_holdings_of_a_dead_worker_or_of_a_forgotten_generation_do_not_count() -> None:
    held: dict[str, list[tuple[int, int, str]]] = {"a": [(0, 9, "live")]}
    assert from_memory(state(Layout(), held)) is not None
    assert from_memory(state(Layout(), held, dead=frozenset({WorkerId("a", 0)}))) is None
    assert from_memory(state(Layout(), held, nodes={"a": Node("a", "spot", 1, "lost")})) is None
    assert from_memory(state(Layout(), held, plans={})) is None
    assert from_memory(state(Layout(), held, distrusted=frozenset({1}))) is None


def test_draining_holders_are_used_only_where_nobody_else_would_do() -> None:
    nodes = {"a": Node("a", "spot", 1, "prepared"), "b": Node("b", "spot", 1, "draining")}
    both: dict[str, list[tuple[int, int, str]]] = {
        "a": [(0, 5, "peer"), (1, 5, "peer")],
        "b": [(1, 5, "live")],
    }
    found = from_memory(state(Layout(dp_shard=2), both, nodes=nodes))
    assert found is not None and {h.worker.node_id for h in found.holdings} == {"a"}
    found = from_memory(
        state(Layout(dp_shard=2), {"a": [(0, 5, "peer")], "b": [(1, 5, "live")]}, nodes=nodes)
    )
    assert found is not None and {h.worker.node_id for h in found.holdings} == {"a", "b"}


@pytest.mark.parametrize(
    ("durable_step", "source", "step"), [(4, "peer", 5), (5, "peer", 5), (6, "durable", 6)]
)
def test_the_newest_step_wins_and_memory_wins_a_tie(
    durable_step: int, source: str, step: int
) -> None:
    copy = Copy(durable_step, "durable", 1, Layout(), (4,), uri="u")
    resume = newest(state(Layout(), {"a": [(0, 5, "peer")]}, durable=(copy,)))
    assert (resume.source, resume.step) == (source, step)
    assert resume.uri == ("u" if source == "durable" else "")


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_a_new_driver_still_knows_which_copy_is_damaged(attached: bool, flag: bool) -> None:
    """It resumed from that, and where the job keeps one it removed the good one."""
    older, newer = (Copy(n, "durable", 1, Layout(), (4,), uri=f"u{n}") for n in (80, 100))
    before = state(Layout(), {}, durable=(newer, older))
    before = fold(before, CopyDamaged("u100", "altered"), 1.0)
    start = DriverStarted(
        *("r", 2, job(keep_last=1), (SPOT,), ModelProfile(0, 0, ())),
        attached=attached, durable=(newer, older), remembers_damage=flag,
    )  # fmt: skip
    now = fold(before, start, 2.0)
    assert newest(now).uri == ("u80" if flag else "u100")
    assert kept(now) == {"u80" if flag else "u100"}
    assert not flag or (set(now.damaged), now.damaged_copies) == ({"u100"}, (newer,))
    gone = fold(before, replace(start, durable=(older,)), 2.0)
    assert newest(gone).uri == "u80" and not gone.damaged_copies


def test_where_all_are_damaged_a_driver_that_resumes_from_storage_tries_them_again() -> None:
    copies = tuple(Copy(n, "durable", 1, Layout(), (4,), uri=f"u{n}") for n in (100, 80))
    now = state(Layout(), {}, durable=copies)
    for copy in copies:
        now = fold(now, CopyDamaged(copy.uri, "altered"), 1.0)
    start = DriverStarted(
        *("r", 2, job(), (SPOT,), ModelProfile(0, 0, ())), durable=copies, remembers_damage=True
    )
    with pytest.raises(StateLost, match="no checkpoint can be read"):
        newest(fold(now, replace(start, attached=True), 2.0))
    assert newest(fold(now, start, 2.0)).uri == "u100", "a person may have mended it"


def test_nothing_saved_starts_again_while_little_is_lost_and_fails_when_much_is() -> None:
    assert newest(state(Layout(), {}, step_time_s=1.0)).source == "fresh"
    with pytest.raises(StateLost, match="step 2000 was reached"):
        newest(state(Layout(), {}, step_time_s=1.0, best_step=2000))


def test_very_long_steps_are_done_again_before_the_first_checkpoint_can_be_there() -> None:
    found = newest(state(Layout(), {}, step_time_s=1000.0, best_step=2))
    assert found.source == "fresh"
    with pytest.raises(StateLost, match="step 3 was reached"):
        newest(state(Layout(), {}, step_time_s=1000.0, best_step=3))


def test_a_run_that_lost_all_before_its_first_checkpoint_begins_anew_whatever_that_costs() -> None:
    lost = {"step_time_s": 1.0, "best_step": 2000}
    found = newest(state(Layout(), {}, begins_anew=True, **lost))
    assert (found.source, found.step) == ("fresh", 0)
    never = replace(Job.from_plain(job()), durable_every=0)
    with pytest.raises(StateLost, match="no checkpoint was ever stored"):
        newest(state(Layout(), {}, begins_anew=True, job=never, **lost))
