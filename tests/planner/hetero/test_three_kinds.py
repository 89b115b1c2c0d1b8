"""Three kinds of GPUs in one job, by the cost model: never behind equal shares, nor behind leaving
a kind out, but for what is allowed for leaving GPUs idle."""

from __future__ import annotations

import pytest
import unequal_plan
from support.planner.pools import group

from elastic.planner.layout_search import IDLE


def test_the_plan_over_three_kinds_is_behind_neither_equal_shares_nor_fewer_kinds() -> None:
    kinds = (group("H100-80GB-SXM", 1, 2), group("A100-80GB-SXM", 1, 2), group("L40S-48GB", 1, 2))
    found = unequal_plan.compared("llama3.2-1b", kinds)
    assert (
        found["unequal_tokens_per_s"]
        >= max(found["equal_tokens_per_s"], found["dropped_tokens_per_s"] / (1 + IDLE))
        > 0
    )
    assert found["all_kinds_tokens_per_s"] > found["equal_tokens_per_s"]
    assert found["unequal_tokens_per_s"] <= found["sum_of_kinds_tokens_per_s"] * 1.001


@pytest.mark.whole
def test_a_thousand_gpus() -> None:
    found = unequal_plan.compared("llama3-8b")
    assert found["unequal_over_equal"] > 1.3 and found["unequal_over_dropped"] > 1 / (1 + IDLE)
