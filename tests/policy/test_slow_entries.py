"""How long an entry may take: what moves its bound, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import Story, orders, plan_of

from elastic.types import Abort, Progress


@pytest.mark.parametrize("generation", [1, 2], ids=["the one before", "this one"])
def test_a_save_moves_no_bound_of_an_entry(generation: int) -> None:
    story = Story()
    story.running("a", "b", steps=6)
    plan = plan_of(story.nodes("c"))
    story.state = replace(story.state, heeds_loading=True)
    assert plan.generation == 2
    story.tick(Progress(plan.ranks[0], generation, "saving"), after_s=300)
    assert not orders(story.tick(after_s=299), Abort)
    assert orders(story.tick(after_s=2), Abort) == [Abort(2)]


def test_who_loads_moves_no_bound_of_a_save() -> None:
    story = Story()
    story.nodes("a", "b")
    story.tick(after_s=20)
    plan, before_s = story.state.target, story.state.busy_at_s
    assert plan is not None
    story.tick(Progress(plan.ranks[1], plan.generation, "loading"), after_s=60)
    assert story.state.busy_at_s == before_s
    told_s = story.state.loading_at_s
    story.tick(Progress(plan.ranks[1], plan.generation - 1, "loading"), after_s=60)
    assert told_s == story.state.loading_at_s > 0, "that was of a generation that is over"
