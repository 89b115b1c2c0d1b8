"""What a step of a new plan is expected to take: the cost model's word, corrected by what was
measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story

from elastic.planner.choice import Choice
from elastic.planner.cost import catalog_hardware
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.published.decoder import Decoder
from elastic.policy.speed.measured_steps import KEPT_STEPS, expected_s
from elastic.policy.state.state import MeasuredSteps, State, Window
from elastic.types import Job, Layout, Node, NodeLost, Plan, SharesSet, WorkerId

MODEL = Decoder(16, 2048, 32, 8, 8192, 32000, 2048).profile()  # large enough for 3 GPUs
CPU = replace(catalog_hardware.NOMINAL, accelerator_type="CPU", memory_bytes=0)


def test_the_first_plan_is_timed_by_the_model_where_the_hardware_is_known() -> None:
    story = Story()
    story.state = replace(story.state, model=MODEL, hardware=(CPU,))
    plan = story.running("a", "b")
    assert plan.model_step_s > 0 and plan.predicted_step_time_s == plan.model_step_s
    unknown = Story()
    unknown.state = replace(unknown.state, model=MODEL)
    assert unknown.running("a", "b").predicted_step_time_s == 0


def test_what_was_measured_corrects_the_model() -> None:
    story = Story()
    story.state = replace(story.state, model=MODEL, hardware=(CPU,))
    old = story.running("a", "b", "c", steps=3)
    measured = story.state.step_time_s
    story.tick(NodeLost("c"))
    story.quiesced(old, {name: [(k, 3, "peer") for k in range(3)] for name in ("a", "b")})
    new = story.state.target
    assert new is not None and new.layout.world_size == 2
    assert new.predicted_step_time_s == pytest.approx(
        measured * new.model_step_s / old.model_step_s
    )
    assert f"expected step time {new.predicted_step_time_s:.3g} s" in story.decisions[-1].reason


def test_without_a_profile_of_the_hardware_the_number_of_ranks_decides() -> None:
    story = Story()
    old = story.running("a", "b", "c", steps=3)
    measured = story.state.step_time_s
    story.tick(NodeLost("c"))
    story.quiesced(old, {name: [(k, 3, "peer") for k in range(3)] for name in ("a", "b")})
    assert story.state.target is not None
    assert story.state.target.predicted_step_time_s == pytest.approx(measured * 3 / 2)


def test_faster_kinds_get_more_samples_before_anything_is_measured() -> None:
    fast = replace(CPU, flop_per_s=(("float32", 2e14),), peak_flop_per_s=2e14)
    slow = replace(fast, flop_per_s=(("float32", 1e14),), peak_flop_per_s=1e14)
    nodes = [Node("a", "p"), Node("b", "q")]
    job = {"global_batch": 12, "layout": "auto"}
    assert plan_layout(
        MODEL, Job.from_plain(job), nodes, limits=LayoutLimits(hardware={"a": fast, "b": slow})
    ).samples == (8, 4)
    assert plan_layout(
        MODEL, Job.from_plain(job), nodes, limits=LayoutLimits(hardware={"a": fast})
    ).samples == (6, 6)


def measured(*seen: tuple[str, float], **known: Any) -> State:
    """On these nodes a step took so long; one step took nine times as long."""
    found = []
    for names, took_s in seen:
        found.append(MeasuredSteps(plan_on(names), (took_s, took_s, 9 * took_s, took_s, took_s)))
    nodes = {name: Node(name, "spot" if name in "abcdwx" else "other") for name in "abcdwxyz"}
    return State(measured=tuple(found), nodes=nodes, **{"expects_measured": True} | known)


def plan_on(nodes: str) -> Plan:
    made = on(nodes)
    return Plan(1, made.layout, made.ranks, made.samples, made.layers)


def on(nodes: str) -> Choice:
    n = len(nodes)
    ranks = tuple(WorkerId(name, 0) for name in nodes)
    return Choice(Layout(dp_shard=n), ranks, (12 // n,) * n, (4,), 1, 0)


def test_a_measured_plan_is_expected_to_take_what_it_took() -> None:
    state = measured(("abcd", 0.24), ("ab", 0.33), ("abcd", 0.25), ("abc", 0.3))
    assert expected_s(state, on("abcd")) == 0.25, "the newest, not what it was before"
    assert expected_s(state, on("ab")) == 0.33
    assert expected_s(state, on("wx")) == 0.33, "other nodes of the same pool"
    assert expected_s(measured(("ab", 0.3), ("yz", 0.5)), on("wx")) == 0.3, "not another pool's"
    assert expected_s(measured(("ab", 0.3), expects_measured=False), on("ab")) == 0.0


def test_plans_that_were_not_measured_follow_those_that_were() -> None:
    """On one machine twice the processes are no faster: what was seen says so."""
    assert expected_s(measured(("abcd", 0.2)), on("ab")) == pytest.approx(0.4), (
        "nothing else is known"
    )
    shared = measured(("abcd", 0.24), ("abc", 0.25))
    assert expected_s(shared, on("ab")) == pytest.approx(0.26, rel=0.05)
    scaling = measured(("abcd", 0.1), ("ab", 0.2))
    assert expected_s(scaling, on("abc")) == pytest.approx(0.4 / 3)
    grows = measured(("abcd", 0.3), ("ab", 0.2))
    assert expected_s(grows, on("a")) == pytest.approx(0.2), "the nearest one's"
    assert expected_s(measured(), on("a")) == 0.0


def on_one_machine(cores: int, unit_s: float, took_s: float) -> State:
    """Four workers share it; a step of all of them has taken so long, each pass of a sample through
    a block so many seconds of a processor (forward)."""
    state = measured(("abcd", took_s))
    nodes = {name: replace(node, shared_cores=cores) for name, node in state.nodes.items()}
    window = Window(0.0, 9.0, unit_s, 4, generation=1, step=9)
    return replace(state, nodes=nodes, speeds={WorkerId(name, 0): (window,) for name in "abcd"})


def test_blocks_that_keep_all_cores_busy_take_as_long_with_fewer_workers() -> None:
    """12 samples through 4 blocks there and back: 144 units."""
    busy = on_one_machine(2, 0.4 / 144, 0.2)
    assert expected_s(busy, on("ab")) == pytest.approx(0.2), "two cores compute all the while"
    assert expected_s(busy, on("a")) == pytest.approx(0.4), "one of them stays idle"
    half = on_one_machine(2, 0.2 / 144, 0.2)
    assert expected_s(half, on("ab")) == pytest.approx(0.1 + 0.1 * 2)
    waits = on_one_machine(2, 0.0, 0.2)
    assert expected_s(waits, on("ab")) == pytest.approx(0.4)
    own = on_one_machine(0, 0.4 / 144, 0.2)
    assert expected_s(own, on("ab")) == pytest.approx(0.4), "each node has a machine of its own"
    many = on_one_machine(8, 0.4 / 144, 0.2)
    assert expected_s(many, on("ab")) == pytest.approx(0.4), "there are cores enough"
    known = replace(busy, measured=(*busy.measured, MeasuredSteps(plan_on("abc"), (0.27,) * 3)))
    assert expected_s(known, on("ab")) == pytest.approx(0.4, rel=0.02), "what was seen counts more"


def test_the_cost_model_scales_where_it_knows_the_hardware() -> None:
    state = measured(("abcd", 0.2), ("ab", 0.3))
    costs = {4: 1.0, 2: 2.0}
    known = replace(
        state,
        measured=tuple(
            replace(one, plan=replace(one.plan, model_step_s=costs[one.plan.layout.dp]))
            for one in state.measured
        ),
    )
    asked = replace(on("abc"), model_step_s=1.9, hardware_known=True)
    power = math.log(0.3 / 0.2) / math.log(2)
    assert expected_s(known, asked) == pytest.approx(0.3 * (1.9 / 2) ** power)


def test_what_is_measured_leaves_out_the_first_step_and_other_shares() -> None:
    story = Story()
    story.state = replace(story.state, expects_measured=True)
    plan = story.running("a", "b", "c")
    story.steps(1, step_time_s=9.0)
    story.steps(2, step_time_s=0.5, data_s=0.1)
    assert [one.seconds for one in story.state.measured] == [(0.4, 0.4)]
    assert expected_s(story.state, on("abc")) == 0.0, "too few"
    story.steps(40, step_time_s=0.5)
    assert len(story.state.measured[0].seconds) == KEPT_STEPS
    story.tick(SharesSet(plan.generation, (6, 3, 3), story.state.step + 1))
    story.steps(3, step_time_s=0.7)
    assert [one.plan.samples for one in story.state.measured] == [(4, 4, 4), (6, 3, 3)]
    assert expected_s(story.state, on("abc")) == 0.5
    assert expected_s(story.state, replace(on("abc"), samples=(3, 6, 3))) == 0.7
