"""Parts of a step, each by its formula, with numbers that a person can follow."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import pytest
from support.planner.pools import JOB, LLAMA_8B, LLAMA_405B, cost_on, gpu

from elastic.planner.cost import step_cost as cost
from elastic.planner.cost.collectives import RankGroup, commit_s, exchange_s, gather_s, reduce_s
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.cost.step_cost import Site, step_cost
from elastic.types import Layout, ModelProfile, OptimizerSpec, OwnedEntry, TensorSpec

WORK = ModelCost.of(LLAMA_8B.profile())
SAMPLE = LLAMA_8B.sample()
SITE = site_of(JOB, gpu(), 8)
STEP = Step(8, 8, 64, 8, "bfloat16")


def test_405b_is_planned_from_its_dimensions_in_milliseconds() -> None:
    took_s = []
    for _ in range(3):  # a busy machine makes one of them slow
        began_s = process_time()
        found = cost_on(LLAMA_405B, gpu(), Layout(pp=9, dp_shard=16, tp=8), m=16)
        took_s.append(process_time() - began_s)
    assert min(took_s) < 0.2
    assert 0.25 < found.flop / found.step_s / (9 * 16 * 8) / 9.89e14 < 0.5


def test_flop_are_the_models_own_whatever_is_computed_twice() -> None:
    plain = cost_on(LLAMA_8B, gpu(), Layout(dp_shard=8))
    twice = cost_on(LLAMA_8B, gpu(), Layout(dp_shard=8, activation_checkpointing="full"))
    assert plain.flop == twice.flop == 8 * SAMPLE.flop
    busy = sum(plain.parts[name] for name in ("products", "attention", "moved"))
    # a forward pass, without the head
    assert plain.parts["recomputed"] == 0.0 < twice.parts["recomputed"] < busy / 3


def test_bubbles() -> None:
    """(p - 1) / m of the useful time where stages are equal (Narayanan et al. 2021, section 2.2.1),
    by v less interleaved."""
    assert cost.bubble(Layout(pp=8), 32) == 7 / 32
    assert cost.bubble(Layout(pp=8, schedule="interleaved1f1b", virtual_stages=4), 32) == 7 / 32 / 4
    found = cost_on(LLAMA_8B, gpu(), Layout(pp=4), m=16)
    useful = found.step_s - sum(
        found.parts[name]
        for name in ("bubble", "uneven", "optimizer", "accumulate", "jitter", "pp")
    )
    # the slowest stage waits for nobody: a little less than 3/16
    assert 0.8 * 3 / 16 < found.parts["bubble"] / useful <= 1.1 * 3 / 16


def test_the_slowest_stage_has_fewer_blocks_where_it_has_the_head() -> None:
    assert cost.slowest_stage(32, Layout(pp=4), 0.0) == 8
    # 9, 9, 8 and 6 with the head; 8 blocks with a head of 2 would be 10
    assert cost.slowest_stage(32, Layout(pp=4), 2.0) == 9
    assert cost.slowest_stage(30, Layout(pp=4), 0.0) == 8


def test_tp_reduces_the_hidden_state_four_times_and_six_where_it_is_computed_again() -> None:
    n_bytes = 8192 * 4096 * 2
    one = reduce_s(SITE.links, n_bytes, RankGroup(8)) * (1 - SITE.kernels.tp_hidden)
    assert cost.tp_s(SITE, SAMPLE, Layout(tp=8), STEP) == pytest.approx(4 * one)
    assert cost.tp_s(
        SITE, SAMPLE, Layout(tp=8, activation_checkpointing="full"), STEP
    ) == pytest.approx(6 * one)
    assert cost.tp_s(SITE, SAMPLE, Layout(), STEP) == 0.0


def test_stages_send_a_hidden_state_forward_and_its_gradient_back() -> None:
    one = 8192 * 4096 * 2 / SITE.links.between + SITE.links.between_hop_s
    assert cost.pp_s(SITE, SAMPLE, Layout(pp=2, dp_shard=8), step=STEP) == pytest.approx(2 * one)
    twice = Layout(pp=2, dp_shard=8, schedule="interleaved1f1b")
    assert cost.pp_s(SITE, SAMPLE, twice, step=STEP) == pytest.approx(4 * one)
    near = 8192 * 4096 * 2 / 4 / SITE.links.inside + SITE.links.inside_hop_s
    assert cost.pp_s(SITE, SAMPLE, Layout(pp=2, tp=4), step=STEP) == pytest.approx(2 * near)


def test_shards_of_a_block_are_gathered_in_bfloat16_and_scattered_in_float32() -> None:
    block = LLAMA_8B.attention_params + LLAMA_8B.mlp_params + 2 * 4096
    found = cost.shards(SITE, WORK, Layout(dp_shard=8), step=STEP)
    assert found.gather == pytest.approx(gather_s(SITE.links, 2 * block, RankGroup(8)))
    assert found.scatter == pytest.approx(gather_s(SITE.links, 4 * block, RankGroup(8)))
    assert found.replicas == 0.0
    both = cost.shards(SITE, WORK, Layout(dp_replicate=4, dp_shard=8), step=STEP)
    assert both.replicas == pytest.approx(
        reduce_s(SITE.links, 4 * LLAMA_8B.n_params / 8, RankGroup(4, 8))
    )


def test_adam_moves_30_bytes_a_parameter() -> None:
    """Read: parameter, gradient, two moments; written: parameter, two moments, the copy in
    bfloat16."""
    rate = 3.35e12 * SITE.kernels.bandwidth
    assert cost.optimizer_s(SITE, WORK, Layout(dp_shard=8)) == pytest.approx(
        LLAMA_8B.n_params / 8 * 30 / rate
    )
    assert cost.optimizer_s(SITE, WORK, Layout(dp_shard=8, zero_stage=0)) == pytest.approx(
        LLAMA_8B.n_params * 30 / rate
    )


def test_owners_gather_step_and_give_back() -> None:
    """Muon on 8 matrices, each stepped whole: twice the shard's part of a replica out, the shard
    in, and the products of one owner."""
    muon = OptimizerSpec(owned=(OwnedEntry("m", (1024, 4096), "float32"),), form="{}", flop=2e11)
    specs = tuple(TensorSpec(f"w{i}", (1024, 4096), "float32", block=i) for i in range(8))
    work = ModelCost.of(ModelProfile(8, 8 * 1024 * 4096, specs, (muon,)))
    assert (work.entries, work.whole, work.whole_flop) == (1.0, 8 * 2**24, 8 * 2e11)
    rate = gpu().peak("float32") * (gpu().reached or 1.0) * SITE.kernels.matmul

    def expected(shard: float, replicas: int, flop: float) -> float:
        ways = (2 * shard / replicas, shard)
        return sum(exchange_s(SITE.links, n, RankGroup(8)) for n in ways) + flop / rate

    assert cost.owners_s(SITE, work, Layout(dp_shard=8)) == pytest.approx(expected(2**24, 1, 2e11))
    assert cost.owners_s(SITE, work, Layout(dp_replicate=4, tp=2)) == pytest.approx(
        expected(4 * 2**24, 4, 2e11)
    )
    alone = cost.owners_s(SITE, work, Layout())
    assert alone == pytest.approx(8 * 2e11 / rate)
    assert cost.owners_s(SITE, work, Layout(dp_shard=64)) > 2e11 / rate, "one owner has one tensor"
    assert cost.owners_s(SITE, WORK, Layout(dp_shard=8)) == 0.0
    half = replace(work, whole=4 * work.whole, whole_flop=0.0, most_flop=1e-9)
    sent = expected(4 * 2**24, 1, 0.0)
    assert cost.owners_s(SITE, half, Layout(dp_shard=8)) == pytest.approx(sent, rel=0.01)
    both = replace(half, whole_flop=8 * sent * rate)
    assert cost.owners_s(SITE, both, Layout(dp_shard=8)) == pytest.approx(1.25 * sent, rel=0.01), (
        "four buckets: all but the first way there and the last way back is behind the products"
    )
    whole = cost.LayoutCost.of(SITE, work, Layout(), step=STEP)
    assert whole.optimizer == alone + cost.optimizer_s(SITE, work, Layout())


def test_offload_copies_up_twice_and_gradients_down_once() -> None:
    shard = LLAMA_8B.n_params / 8 * 4
    up = shard * (2 * 3 + 1) / 6.3e10
    updated = shard * 7.5 / (cost.HOST_BYTES_PER_S / 8)
    assert cost.offload_s(SITE, WORK, Layout(dp_shard=8, offload=True), m=3) == pytest.approx(
        up + updated
    )
    assert cost.offload_s(SITE, WORK, Layout(dp_shard=8), m=3) == 0.0


def test_gradients_of_further_microbatches_are_added_up() -> None:
    """Read in bfloat16; the sum read and written in float32: 10 bytes an element, of the shard at
    stage 3."""
    rate = 3.35e12 * SITE.kernels.bandwidth
    cut = cost.added_bytes(WORK, Layout(dp_shard=8))
    whole = cost.added_bytes(WORK, Layout(dp_shard=8, zero_stage=1))
    assert cut == pytest.approx(LLAMA_8B.n_params / 8 * 10)
    assert whole == pytest.approx(LLAMA_8B.n_params * 10)
    assert cost.accumulate_s(SITE, cut, m=4) == pytest.approx(3 * cut / rate)
    assert cost.accumulate_s(SITE, cut, m=1) == 0.0


def test_a_step_ends_with_the_commit_of_all_ranks() -> None:
    few, many = (
        step_cost(SITE, WORK, Layout(dp_shard=n), step=STEP).parts["commit"] for n in (8, 64)
    )
    assert (few, many) == (commit_s(SITE.links, 8), commit_s(SITE.links, 64)) and 0 < few < many


def test_nodes_that_wait_for_each_other() -> None:
    found = step_cost(SITE, WORK, Layout(dp_shard=32), step=replace(STEP, global_batch=256))
    rest = found.step_s - found.parts["jitter"]
    # 4 nodes: two doublings
    assert found.parts["jitter"] == pytest.approx(rest * SITE.kernels.jitter * 2)
    assert step_cost(Site(SITE.chip, 8), WORK, Layout(dp_shard=8), step=STEP).parts["jitter"] == 0.0
