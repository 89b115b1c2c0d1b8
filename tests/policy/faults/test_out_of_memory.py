"""Layouts that did not fit into the memory of some GPUs, and others that have more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story, stopped

from elastic.types import NodeLost, Plan, Pool, Quiesced, RequestFailed, WorkerFailed, WorkerId


def without_memory(story: Story, plan: Plan, node: str, *, at_gib: int) -> None:
    """The plan, of a node of eight GPUs, runs out of it."""
    full = WorkerFailed(WorkerId(node, 0), plan.generation, "out_of_memory", "none", at_gib << 30)
    story.tick(full)
    for k in range(8):
        story.tick(Quiesced(WorkerId(node, k), plan.generation, 0))


@pytest.mark.parametrize("larger", [True, False])
def test_a_layout_that_did_not_fit_is_tried_where_a_gpu_has_more_memory(larger: bool) -> None:
    """A node of such GPUs is asked for although one with all workers of the job is there."""
    small, large = (
        Pool(name, "A100", 8, market, 1.0, 0, n, memory_bytes_per_gpu=gib << 30)
        for name, market, n, gib in (("spot", "spot", 1, 40), ("large", "on-demand", 2, 80))
    )
    story = Story((small, large), layout="dp_shard=8", global_batch=16)
    story.state = replace(story.state, tries_larger=larger)
    plan = story.running("a", gpus=8)
    without_memory(story, plan, "a", at_gib=39)
    if not larger:
        assert stopped(story).outcome == "failed"
        return
    assert story.state.infeasible_on == {plan.layout: 40 << 30}
    assert story.state.phase == "waiting" and "large" in {
        one.pool for one in story.state.requests.values()
    }
    story.nodes("b", pool="large", gpus=8)
    again = story.entered()
    assert again.layout == plan.layout and again.nodes == ("b",)
    without_memory(story, again, "b", at_gib=79)
    assert "did not fit (79.00 GiB measured)" in stopped(story).reason


@pytest.mark.parametrize("others", [False, True])
def test_gpus_that_have_another_layout_are_asked_for_again(others: bool) -> None:
    """Whatever did not fit on them once: all nodes are gone."""
    pools = [Pool("spot", "A100", 8, "spot", 1.0, 0, 1, memory_bytes_per_gpu=40 << 30)]
    if others:
        pools.append(
            Pool("large", "A100", 8, "on-demand", 9.0, 0, 1, memory_bytes_per_gpu=80 << 30)
        )
    story = Story(tuple(pools), layout="auto", global_batch=16)
    story.state = replace(story.state, tries_larger=True)
    plan = story.running("a", gpus=8)
    without_memory(story, plan, "a", at_gib=39)
    assert story.entered().layout != plan.layout
    story.tick(NodeLost("a", "reclaimed"))
    story.tick(after_s=1)
    assert story.state.phase == "waiting"
    story.tick(*(RequestFailed(one.pool, key, "none") for key, one in story.state.requests.items()))
    story.tick(after_s=3600)
    assert "spot" in {one.pool for one in story.state.requests.values()}
