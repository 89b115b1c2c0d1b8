"""What losses, traffic between zones and checkpoints cost, by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from support.planner.pools import LLAMA_8B, best, group

from elastic.planner import dollars
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.offers import Aim
from elastic.reshard.rank_boxes import state_specs
from elastic.types import Job, Layout

WORK = ModelCost.of(LLAMA_8B.profile())
N = LLAMA_8B.n_params
STATE = 12 * N  # parameters and moments in float32: what copies hold


def test_a_lost_node_costs_its_detection_the_fetch_steps_done_again_and_its_absence() -> None:
    found = dollars.loss(
        [group(n_nodes=4, lost_per_node_h=0.05)], WORK, Layout(dp_shard=32), step_s=2.0
    )
    fetched = STATE / 32 / 5e10  # gradients are made anew
    assert found.per_h == pytest.approx(0.2)
    redone = (fetched / (0.01 * 2.0) + 1) / 2  # a copy is made as often as 1 % of the time allows
    assert found.seconds == pytest.approx(
        2 + 5 + fetched + redone * 2.0 + 300 / 4
    ) and found.moved_s == pytest.approx(fetched)
    long = dollars.loss([group(n_nodes=4)], WORK, Layout(dp_shard=32), step_s=200.0)
    assert long.seconds == pytest.approx(2 + 5 + fetched + 200.0 + 300 / 4)  # at every step


def test_copies_stop_the_steps_only_while_they_leave_the_gpus() -> None:
    nodes = [group(n_nodes=4)]
    found, host = (
        dollars.copying(nodes, WORK, Layout(dp_shard=32), step_s=2.0),
        nodes[0].hardware.host_bytes_per_s,
    )
    assert found.stall_s == pytest.approx(STATE / 32 / host)
    assert found.write_s == pytest.approx(STATE / 4e9)
    assert found.lost_node_s == dollars.loss(nodes, WORK, Layout(dp_shard=32), step_s=2.0).seconds


def test_goodput() -> None:
    found = dollars.loss(
        [group(n_nodes=4, lost_per_node_h=0.05)], WORK, Layout(dp_shard=32), step_s=2.0
    )
    assert found.goodput == pytest.approx(1 / (1 + 0.2 * found.seconds / 3600))
    assert dollars.loss([group()], WORK, Layout(dp_shard=8), step_s=2.0).goodput == 1.0


def test_validations_take_a_forward_pass_of_each_sample() -> None:
    """Of the whole job; a step is as long as it is."""
    job = Job(global_batch=32, eval_every=100, eval_samples=2048)
    assert dollars.validating(job) == pytest.approx(64 / 3 / 100)
    assert dollars.validating(Job(global_batch=32)) == 0.0
    plain, more = (
        best(LLAMA_8B, group(usd_per_node_h=40.0), aim=Aim(tokens=1e9), **keys)
        for keys in ({}, {"eval_every": 100, "eval_samples": 128 * 64})
    )
    assert more.step_s == plain.step_s
    assert (more.hours / plain.hours, more.usd / plain.usd) == pytest.approx([1 + 1.28 / 3] * 2)


def test_gradients_between_zones() -> None:
    two = [group(zone="a"), group(zone="b")]
    per_step = 2 * 2 * 4 * N / 1e9 * 0.02
    assert dollars.moved_usd_per_h(two, WORK, step_s=10.0) == pytest.approx(per_step * 360)
    assert dollars.moved_usd_per_h([group(zone="a"), group(zone="a")], WORK, step_s=10.0) == 0.0
    assert dollars.moved_usd_per_h([group(), group()], WORK, step_s=10.0) == 0.0


def test_copies() -> None:
    assert dollars.stored_usd_per_h(WORK) == pytest.approx(2 * STATE / 1e9 * 0.023 / 730)
    assert dollars.host_bytes(8, WORK, Layout(dp_shard=8)) == pytest.approx(2 * STATE)
    assert dollars.host_bytes(8, WORK, Layout(dp_shard=8, offload=True)) == pytest.approx(
        2 * STATE + 16 * N
    )


def test_frozen_weights_that_are_read_again_are_in_no_copy() -> None:
    """Adapters on a base that is read from its files."""
    profile = LLAMA_8B.profile()
    trained = {spec.fqn for spec in profile.specs if spec.block == 0}
    specs = tuple(
        replace(spec, trainable=spec.fqn in trained, reread=spec.fqn not in trained)
        for spec in profile.specs
    )
    model, layout = replace(profile, specs=specs), Layout(dp_shard=8)
    work = ModelCost.of(model)
    state = sum(prod(one.shape) * 4 for one in state_specs(model) if not one.buffer)
    assert 0 < state < STATE / 20
    found = dollars.copying([group()], work, layout, step_s=2.0)
    assert found.state_bytes == pytest.approx(state)
    assert found.moved_s == pytest.approx(state / 8 / group().hardware.link_bytes_per_s)
    assert dollars.stored_usd_per_h(work) == pytest.approx(2 * state / 1e9 * 0.023 / 730)
    assert dollars.host_bytes(8, work, layout) == pytest.approx(2 * state)
    offloaded = dollars.host_bytes(8, work, replace(layout, offload=True)) - 2 * state
    assert offloaded == pytest.approx(work.state_bytes) and offloaded > 4 * N


def test_an_offer_says_what_a_million_tokens_cost() -> None:
    offer = best(LLAMA_8B, group(n_nodes=2, usd_per_node_h=40.0), aim=Aim(tokens=1e9))
    assert offer.usd_per_h == pytest.approx(80 + dollars.stored_usd_per_h(WORK))
    assert offer.usd_per_mtoken == pytest.approx(offer.usd_per_h / 3600 / offer.tokens_per_s * 1e6)
    assert offer.hours == pytest.approx(1e9 / offer.tokens_per_s / 3600)
    assert offer.usd == pytest.approx(offer.hours * offer.usd_per_h)


def test_losses_cost_time_and_money() -> None:
    calm = best(LLAMA_8B, group(n_nodes=2, usd_per_node_h=40.0), aim=Aim(tokens=1e9))
    rough = best(
        LLAMA_8B, group(n_nodes=2, usd_per_node_h=40.0, lost_per_node_h=1.0), aim=Aim(tokens=1e9)
    )
    assert rough.step_s == calm.step_s and rough.goodput < 0.95
    assert rough.usd == pytest.approx(calm.usd / rough.goodput, rel=1e-6)


def test_the_cheapest_may_use_fewer_nodes_and_a_deadline_more() -> None:
    """Collectives between nodes cost efficiency: one node is cheaper; four are there in time."""
    nodes = group(n_nodes=4, usd_per_node_h=40.0, gbps=25.0)
    cheap = best(LLAMA_8B, nodes, aim=Aim("cheapest", tokens=1e9))
    fast = best(LLAMA_8B, nodes, aim=Aim(tokens=1e9))
    assert (
        cheap.n_gpus == 8 < fast.n_gpus == 32 and cheap.usd < fast.usd and fast.hours < cheap.hours
    )
    late = best(
        LLAMA_8B, nodes, aim=Aim("deadline", tokens=1e9, deadline_h=(cheap.hours + fast.hours) / 2)
    )
    assert late.hours <= (cheap.hours + fast.hours) / 2 and cheap.usd < late.usd <= fast.usd
    easy = best(LLAMA_8B, nodes, aim=Aim("deadline", tokens=1e9, deadline_h=2 * cheap.hours))
    assert easy.usd == cheap.usd
