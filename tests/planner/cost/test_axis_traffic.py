"""Bytes of a step by axis, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.observe import bound_runs
from support.observe.bound_runs import MODEL

from elastic.planner.cost.axis_traffic import axis_bytes
from elastic.planner.cost.collectives import COMMIT_BYTES
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.types import Layout

SAMPLE = replace(bound_runs.SAMPLE, key_value_bytes=1 << 15)
WORK = ModelCost.of(replace(MODEL, sample=SAMPLE))  # 4 blocks, 1,000,000 parameters in float32
STEP = Step(2, 8, 16, dtype="bfloat16")  # 2 microbatches of 4 samples
PARAMETERS, HIDDEN = 1_000_000, SAMPLE.hidden_bytes


@pytest.mark.parametrize(("stage", "gathers", "scatters"), [(3, 4, 2), (2, 2, 2), (1, 1, 1)])
def test_shards_go_as_often_as_the_zero_stage_says(stage: int, gathers: int, scatters: int) -> None:
    found = axis_bytes(WORK, Layout(dp_shard=4, zero_stage=stage), STEP)
    low, wide = 2 * PARAMETERS, 4 * PARAMETERS
    assert found["fsdp"] == pytest.approx((gathers * low + scatters * wide) * 3 / 4)
    assert found == {"fsdp": found["fsdp"], "commit": 2 * COMMIT_BYTES * 3 / 4}


def test_replicas_add_up_their_shards_once() -> None:
    found = axis_bytes(WORK, Layout(dp_replicate=2, dp_shard=2), STEP)
    assert found["replicas"] == pytest.approx(2 * (4 * PARAMETERS / 2) / 2)
    assert "replicas" not in axis_bytes(WORK, Layout(dp_shard=4), STEP)


def test_activations_of_tp_cp_and_pp() -> None:
    tp = axis_bytes(WORK, Layout(tp=2), STEP)
    assert tp["tp"] == pytest.approx(2 * 4 * 4 * 2 * (4 * HIDDEN) / 2)  # m, blocks, all-reduces
    again = axis_bytes(WORK, Layout(tp=2, activation_checkpointing="full"), STEP)
    assert again["tp"] == pytest.approx(tp["tp"] * 6 / 4)
    cp = axis_bytes(WORK, Layout(cp=2), STEP)
    assert cp["cp"] == pytest.approx(2 * 4 * 4 * (4 * SAMPLE.key_value_bytes) / 2)
    assert cp["fsdp"] > 0  # cp shards the parameters too
    pp = axis_bytes(WORK, Layout(pp=2), STEP)
    assert pp["pp"] == pytest.approx(2 * 2 * 4 * HIDDEN) and "fsdp" not in pp


def test_one_rank_sends_nothing_and_a_model_nobody_knows_no_activations() -> None:
    assert axis_bytes(WORK, Layout(), STEP) == {}
    blind = ModelCost.of(replace(MODEL, sample=None))
    assert set(axis_bytes(blind, Layout(dp_shard=2, tp=2), STEP)) == {"fsdp", "commit"}
