"""What a step of a new plan is expected to take: the cost model's word, corrected by what was
measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story

from elastic.planner.cost import catalog_hardware
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.published.decoder import Decoder
from elastic.types import Job, Node, NodeLost

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
