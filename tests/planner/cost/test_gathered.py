"""What a rank holds unsharded during a step, counted by hand."""

from __future__ import annotations

import pytest
from support.planner.pools import LLAMA_8B

from elastic.planner.cost.memory import state_parts
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.published.decoder import Decoder
from elastic.types import Layout

TABLE = 128_256 * 4096 * 2  # bytes of Llama 3's embedding, or of its head, in bfloat16
BLOCK = 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
TIED = Decoder(32, 4096, 32, 8, 14336, 128_256, 8192, tied=True)


def gathered(model: Decoder, layout: Layout) -> float:
    return state_parts(ModelCost.of(model.profile()), layout, 0.5)["gathered"]


@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=8), Layout(cp=8), Layout(offload=True), Layout()]
)
def test_at_stage_3_two_blocks_and_what_is_outside_of_them_with_the_gradient_of_the_head(
    layout: Layout,
) -> None:
    """One FSDP2 unit has embedding and head: gathered from the first to the last of a step."""
    assert gathered(LLAMA_8B, layout) == pytest.approx(2 * BLOCK + 3 * TABLE)
    assert gathered(TIED, layout) == pytest.approx(2 * BLOCK + 2 * TABLE)


def test_at_stage_2_the_gradient_of_the_head_waits_for_that_of_the_embedding() -> None:
    layout = Layout(dp_shard=8, zero_stage=2)
    assert gathered(LLAMA_8B, layout) == pytest.approx(32 * BLOCK + 3 * TABLE)


def test_tp_cuts_it() -> None:
    layout = Layout(dp_shard=2, tp=4)
    norms = 2 * 2 * 4096
    cut = 2 * (BLOCK - norms) + 3 * TABLE
    assert gathered(LLAMA_8B, layout) == pytest.approx(cut / 4 + 2 * norms)
