"""The arithmetic of the benches: which transition answers which drill, floors, ratios, windows."""

from __future__ import annotations

from typing import Any

import pytest
from figures import (
    Block,
    Changes,
    ColdRestart,
    Drill,
    Found,
    Pace,
    Spread,
    answers,
    block,
    cold_restart,
    device_bound,
    excesses,
    gaps,
    line_through,
    overhead,
    pace,
    phases,
    recovery,
    watched,
)

from elastic.ledger.journal import Line
from elastic.observe.accounting.transitions import Transition
from elastic.types import (
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Layout,
    ModelProfile,
    NodePrepared,
    Plan,
    PlanEntered,
    StepDone,
    WorkerId,
)

COLD = ColdRestart(20.0, 7, {"driver": 5.0, "prepared": 12.0, "entered": 1.0, "step": 2.0})


def transition(
    generation: int, cause: str, at_s: float, pause_s: float, **values: Any
) -> Transition:
    phases_s = {
        "detect": 0.1,
        "quiesce": 0.2,
        "groups": 0.05,
        "build": 0.1,
        "transfer": 0.05,
        "first_step": 0.4,
    }
    lost = int(values.pop("lost", 0))
    return Transition(
        generation, cause, 10, lost, pause_s, phases_s | values, "dp_shard=4", "dp_shard=3", "live",
        1, True, at_s
    )  # fmt: skip


def line(at_s: float, *events: Event) -> Line:
    return Line(at_s, 1, tuple((at_s, event) for event in events), None)


def step(generation: int, number: int) -> StepDone:
    return StepDone(generation, number, 2.0, 50, 1.0)


def test_each_drill_is_answered_by_the_next_transition_that_reached_a_step() -> None:
    drills = [Drill("kill", 10.0), Drill("add", 20.0), Drill("notice", 30.0), Drill("hang", 40.0)]
    story = [
        transition(1, "start", 1.0, 0.0),
        transition(2, "loss", 11.0, 0.0, first_step=0.0),  # overtaken
        transition(3, "loss", 12.0, 1.0),
        transition(4, "growth", 25.0, 0.3),
        transition(5, "notice", 31.0, 0.4),
        transition(6, "loss", 44.0, 4.0),
        transition(7, "growth", 50.0, 0.5),  # the node of the hang is back
    ]
    found = answers(drills, story)
    assert {name: [t.generation for t in ts] for name, ts in found.items()} == {
        "loss": [3], "notice": [5], "growth": [4, 7], "hang": [6],
    }  # fmt: skip


def test_a_growth_that_overtook_a_loss_counts_for_the_loss_alone() -> None:
    story = [transition(2, "loss", 11.0, 0.0, first_step=0.0), transition(3, "growth", 12.0, 1.5)]
    found = answers([Drill("kill", 10.0)], story)
    assert [t.generation for t in found["loss"]] == [3]
    assert found["growth"] == []


def test_recovery_figures() -> None:
    story = {
        "loss": [
            transition(2, "loss", 11.0, 1.0, lost=4),
            transition(5, "loss", 41.0, 2.0, lost=2),
        ],
        "notice": [transition(3, "notice", 21.0, 0.5)],
        "growth": [transition(4, "growth", 31.0, 0.4)],
        "hang": [],
    }
    run = Found(story, {2: 1.2}, {"loss": [1.4, 1.0], "notice": [0.3], "growth": [], "hang": []})
    found = recovery(run, [COLD, COLD], Changes((0.2, 0.4), (0.1,)))
    assert (found["pause_loss_s"], found["pause_notice_s"], found["pause_hang_s"]) == (
        1.5,
        0.5,
        None,
    )
    assert (found["pause_over_bare_loss_s"], found["pause_over_bare_growth_s"]) == (1.2, 0.3)
    assert (found["excess_loss_s"], found["excess_notice_s"], found["excess_growth_s"]) == (
        1.2,
        0.3,
        None,
    )
    assert (found["steps_lost_loss"], found["steps_lost_notice"], found["steps_lost_hang"]) == (
        4,
        0,
        None,
    )
    assert (found["loss_vs_cold"], found["hang_vs_cold"], found["cold_restart_s"]) == (
        0.075,
        None,
        20.0,
    )
    assert found["spread"]["pause_loss_s"] == {"min": 1.0, "max": 2.0, "n": 2}
    assert found["spread"]["pause_hang_s"] == {"n": 0}
    assert found["phases_s"]["cold_restart"] == COLD.phases_s
    assert found["contents_equal"] is True


def test_device_bound_figures_stand_beside_the_others() -> None:
    found = {
        "notice": [transition(2, "notice", 10.0, 0.2), transition(4, "notice", 30.0, 0.4)],
        "growth": [],
    }
    figures = device_bound(Found(found, {}, {"notice": [0.1], "growth": [0.6, 0.8]}))
    assert (
        figures["device_bound_pause_notice_s"] == 0.3
        and figures["device_bound_excess_growth_s"] == 0.7
    )
    assert figures["device_bound_pause_growth_s"] is None and not figures.keys() & {
        "pause_notice_s",
        "excess_growth_s",
    }


def test_phases_add_up_to_the_pause() -> None:
    loss = transition(2, "loss", 11.0, 0.7)
    found = phases("loss", [loss], {2: 1.0})
    assert found["rest"] == pytest.approx(1.0 - 0.9)
    assert found["ordinary_step"] == pytest.approx(-0.3)
    assert sum(found.values()) == pytest.approx(loss.pause_s)
    assert "quiesce" not in phases("notice", [loss], {})  # the old generation trains on meanwhile


def paced(*generations: tuple[int, int, int, float, float], worlds: dict[int, int]) -> Pace:
    """Each generation: its number, first and last step, when the first ended, seconds per step."""
    steps = [
        (g, s, at_s + (s - first) * each_s)
        for g, first, last, at_s, each_s in generations
        for s in range(first, last + 1)
    ]
    return Pace(tuple(steps), worlds)


def test_excess_is_what_the_progress_would_not_have_cost() -> None:
    """Steps of 1 s with four ranks, of 2 s with three. The kill at 60.5 s loses steps 56 to 60 and
    stops training for 4 s; the first three steps after it take 3 s more each (the machine was
    busy): all of it is excess."""
    run = paced(
        (1, 1, 60, 1.0, 1.0), (2, 56, 58, 64.5, 5.0), (2, 59, 120, 76.5, 2.0), worlds={1: 4, 2: 3}
    )
    loss = transition(2, "loss", 61.0, 3.0, lost=5)
    found = excesses(run, [Drill("kill", 60.5)], {"loss": [loss], "hang": []})
    first, last = run.window(60.5, 2) or (0, 0)
    assert (run.steps[first][:2], run.steps[last][:2]) == ((1, 40), (2, 75))
    wall_s = run.steps[last][2] - 40.0
    assert found == {"loss": [pytest.approx(wall_s - 15 * 1.0 - 20 * 2.0)], "hang": []}


def test_no_excess_is_told_where_another_transition_is_too_near() -> None:
    run = paced(
        (1, 1, 60, 1.0, 1.0),
        (2, 61, 70, 62.0, 1.0),
        (3, 71, 110, 73.0, 1.0),
        worlds={1: 4, 2: 3, 3: 4},
    )
    near = [transition(2, "notice", 61.0, 0.5), transition(3, "notice", 72.0, 0.5)]
    assert excesses(run, [Drill("notice", 60.5), Drill("notice", 71.5)], {"notice": near}) == {
        "notice": []
    }


def test_pace_reads_steps_and_ranks_from_the_journal() -> None:
    plan = Plan(1, Layout(dp_shard=2), (WorkerId("a", 0), WorkerId("b", 0)), (1, 1), (4,))
    lines = [
        Line(0.5, 1, (), Decision((EnterPlan(plan),), "go")),
        line(1.0, step(1, 1)),
        line(2.0, step(1, 2)),
    ]
    assert pace(lines) == Pace(((1, 1, 1.0), (1, 2, 2.0)), {1: 2})


def test_a_line_through_points() -> None:
    assert line_through([(0.0, 0.5), (1.0, 2.5), (2.0, 4.5)]) == (
        pytest.approx(0.5),
        pytest.approx(2.0),
    )
    assert line_through([(1.0, 0.5), (1.0, 2.5)]) is None


def test_gaps() -> None:
    lines = [
        line(1.0, step(1, 1)),
        line(2.0, step(1, 2)),
        line(4.5, step(2, 2)),
        line(5.0, step(2, 3)),
    ]
    assert gaps(lines) == {2: 2.5}


def test_a_cold_restart_runs_from_the_kill_to_the_first_step() -> None:
    again = DriverStarted("r", 2, {}, (), ModelProfile(1, 1, ()))
    lines = [
        line(10.0, step(1, 27)),
        line(16.0, again),
        line(24.0, NodePrepared("a"), NodePrepared("b")),
        line(26.0, PlanEntered(2, 20)),
        line(27.5, step(2, 21)),
        line(28.0, NodePrepared("c"), step(2, 22)),
    ]
    found = cold_restart(lines, 11.0)
    assert found == ColdRestart(
        16.5, 7, {"driver": 5.0, "prepared": 8.0, "entered": 2.0, "step": 1.5}
    )
    with pytest.raises(ValueError, match="no step after 30"):
        cold_restart(lines, 30.0)


def test_a_block_counts_whole_steps_only() -> None:
    ends = [10.3, 10.4, 11.4, 12.4, 14.4]  # the first was frozen half-way, the second is told late
    found = block(ends, {"workers": 8.0, "ray": 0.8}, 4.0)
    assert found is not None
    assert (found.mean_s, found.median_s) == (pytest.approx(4 / 3), pytest.approx(1.0))
    assert found.cpu_s == {
        "workers": pytest.approx(8 / 4 * 4 / 3),
        "ray": pytest.approx(0.8 / 4 * 4 / 3),
    }
    assert block(ends[:3], {}, 4.0) is None


def test_overhead_pairs_each_block_with_the_bare_one_beside_it() -> None:
    speeds = (1.0, 3.0, 1.0, 3.0)  # the machine changes its speed all the time
    pairs = [
        (
            Block(1.2 * s, 1.1 * s, {"workers": s, "ray": 0.5 * s}, {"data": s}),
            Block(s, s, {"workers": s}),
        )
        for s in speeds
    ]
    found = overhead(pairs)
    assert (found["pairs"], found["step_time_ratio"], found["median_step_time_ratio"]) == (
        4,
        1.2,
        1.1,
    )
    assert found["step_time_ratio_95"] == [1.2, 1.2] and found["cpu_seconds_ratio"] == 1.5
    assert (found["elastic_step_s"], found["bare_step_s"], found["bare_cpu_s"]) == (2.4, 2.0, 2.0)
    assert found["elastic_cpu_parts_s"] == {"ray": 1.0, "workers": 2.0} and found[
        "elastic_parts_s"
    ] == {"data": 2.0}


def test_ways_of_watching_are_compared_with_nothing_in_the_same_round() -> None:
    def round_of(s: float, slower: float) -> dict[str, Block]:
        return {
            "nothing": Block(s, s, {"workers": s}),
            "endpoint": Block(slower * s, s, {"workers": 2 * s}),
        }

    rounds = [round_of(1.0, 1.1), round_of(3.0, 1.1), {"nothing": Block(9.0, 9.0, {})}]
    found = watched(rounds, 2)
    assert found["nothing"] == {"step_s": 3.0}
    assert (found["endpoint"]["step_s"], found["endpoint"]["pairs"]) == (2.0, 2)
    assert found["endpoint"]["step_time_ratio"] == pytest.approx(1.1)
    assert found["endpoint"]["median_step_time_ratio"] == 1.0
    assert found["endpoint"]["cpu_seconds_ratio_95"] == [2.0, 2.0]
    assert watched([], 2) == {}


def test_what_is_computed_beside_the_training_is_told_per_step_and_of_all_cores() -> None:
    def block(step_s: float, beside_s: float) -> Block:
        """`beside_s`: in each second, by the driver and whoever watches."""
        mine = {"root": 0.25 * beside_s * step_s, "other": 0.75 * beside_s * step_s}
        return Block(step_s, step_s, {"workers": step_s, "ray": step_s, **mine})

    # a step that took longer gives what comes by the clock no other weight
    rounds = [
        {"dashboard": block(longer * 0.2, 0.022), "nothing": block(0.2, 0.020)}
        for longer in (1.0, 2.0, 0.5)
    ]
    found = watched([*rounds, {"dashboard": block(0.2, 0.9)}], 2)["dashboard"]
    assert found["watchers_cpu_ms_per_step"] == 0.4
    assert found["watchers_cpu_ms_per_step_95"] == [0.4, 0.4]
    assert found["watchers_cpu_share"] == 0.001
    assert found["watchers_cpu_ms_per_s"] == {"root": 0.5, "other": 1.5}
    alone = watched([{"dashboard": block(0.2, 0.9)}], 2)["dashboard"]
    assert alone["watchers_cpu_ms_per_step"] is None and "watchers_cpu_ms_per_s" not in alone


def test_the_interval_is_as_wide_as_the_pairs_differ() -> None:
    pairs = [(Block(1.0 + 0.1 * (i % 2), 1.0, {}), Block(1.0, 1.0, {})) for i in range(40)]
    low, high = overhead(pairs)["step_time_ratio_95"]
    assert 1.02 < low < 1.05 < high < 1.08


def test_spread_of_nothing() -> None:
    assert Spread(()).middle is None
