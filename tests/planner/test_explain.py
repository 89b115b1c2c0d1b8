"""Sentences of an offer: what they say, with which numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner.pools import JOB, LLAMA_8B, LLAMA_70B, LLAMA_405B, SMALL, best, group

from elastic.errors import InfeasiblePlan
from elastic.planner import explain
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost
from elastic.planner.offer_search import find_offers
from elastic.types import Layout

BUSY = {"products": 6.0, "attention": 1.0, "moved": 1.0, "optimizer": 0.0}


def cost(**parts: float) -> Cost:
    return Cost(BUSY | parts)


def warned(
    layout: Layout = Layout(dp_shard=8),  # noqa: B008
    used: float = 10.0,
    batch: int = 64,
    **parts: float,
) -> tuple[str, ...]:
    use = explain.MemoryUse(used * explain.GIB, 0.92 * (80 << 30))
    return explain.warnings(layout, cost(**parts), use, n_gpus=8, batch=batch)


def test_every_part_of_a_step_has_a_name() -> None:
    assert set(best(SMALL, group()).seconds) == set(explain.TOLD)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(dp_shard=8), "plain sharding"),
        (Layout(dp_replicate=2, dp_shard=4), "replicas"),
        (Layout(dp_shard=2, tp=4), "tp"),
        (Layout(pp=2, tp=2, cp=2), "tp x pp x cp"),
    ],
)
def test_families(layout: Layout, name: str) -> None:
    assert explain.family(layout) == name


def test_a_layout_is_in_the_family_of_each_of_its_options() -> None:
    found = Layout(dp_shard=8, zero_stage=2, activation_checkpointing="full", offload=True)
    assert list(explain.families(found)) == [
        "plain sharding",
        "zero_stage=2",
        "activation_checkpointing=full",
        "offload",
    ]
    interleaved = Layout(pp=2, dp_shard=4, schedule="interleaved1f1b")
    assert list(explain.families(interleaved)) == ["pp", "interleaved pipelines"]
    gpipe = Layout(pp=2, schedule="gpipe", zero_stage=1)
    assert "gpipe pipelines" in explain.families(gpipe)


def test_what_others_lose_against_the_first() -> None:
    first = cost(tp=1.0)
    assert (
        explain.why(cost(tp=2.8), first)
        == "20% slower than the first: it spends 20% of its step more on collectives of tp"
    )
    assert explain.why(cost(tp=1.04), first) == "as fast as the first within 1%"
    assert explain.why(cost(tp=0.1), first) == "10% faster than the first"
    mixed_up = explain.slower(cost(tp=0.5, bubble=2.3), first)
    bubble = "it spends 26% of its step more on the pipeline's bubble"
    assert mixed_up == f"20% slower than the first: {bubble}"


def test_what_the_first_spends_its_step_on() -> None:
    first = cost(fsdp=2.0)
    assert explain.why(first, first) == (
        "80% of a step is computation that must be done; most of the rest is gathering and "
        "scattering shards (20%)"
    )
    pure = cost(fsdp=0.0)
    assert explain.why(pure, pure) == "100% of a step is computation that must be done"


def test_warnings() -> None:
    assert warned() == ()
    assert (
        explain.leaves_node(Layout(tp=8, cp=2), 8) == "tp x cp = 16 would leave its node of 8 GPUs"
    )
    assert warned(used=70.0) == ("memory is tight: 70.0 of 73.6 GiB that can be used",)
    (said,) = warned(used=75.0)
    assert said.startswith("it should not fit: it needs 75.0 GiB, and 73.6 can be used")
    assert warned(bubble=2.0) == ("20% of a step goes into the pipeline's bubble",)
    assert warned(optimizer=2.0) == (
        "the optimizer takes longer than it should: the batch is small for so many GPUs",
    )


def test_idle_gpus_are_explained() -> None:
    (said,) = warned(Layout(dp_shard=4), batch=4)
    assert said == "4 of 8 GPUs stay idle: a step of 4 samples feeds 4 data-parallel ranks"
    assert warned(Layout(tp=3, dp_shard=2)) == (
        "2 of 8 GPUs stay idle: they are no multiple of tp x cp x pp = 3",
    )
    (said,) = warned(Layout(dp_shard=4))
    assert said == "4 of 8 GPUs stay idle: with them a step would take longer, or not fit"


def test_nothing_fits_names_the_reason_and_what_would_do() -> None:
    job = replace(JOB, layout="auto,offload=false")
    said = (
        r"no layout fits 8 x H100-80GB-SXM \(plain sharding: the state alone needs \d+\.\d GiB per "
        r"GPU, 73\.6 of 80"
    )
    with pytest.raises(InfeasiblePlan, match=said):
        find_offers(LLAMA_70B.profile(), job, [group()])
    # 16 bytes a parameter in 73.6 GiB: 1051 / 73.6
    assert explain.fewest(ModelCost.of(LLAMA_70B.profile()), group()) == 16
    assert explain.fewest(ModelCost.of(LLAMA_8B.profile()), group(per_node=1)) == 2
    assert (
        explain.too_large(100 * explain.GIB, 73.6 * explain.GIB, 80 << 30)
        == "needs 100.0 GiB per GPU, 73.6 of 80 can be used"
    )


def test_no_nodes_are_no_plan() -> None:
    with pytest.raises(InfeasiblePlan, match="no layout fits no GPUs"):
        find_offers(SMALL.profile(), JOB, [])


def test_what_the_host_cannot_hold_is_not_offloaded_to_it() -> None:
    """405B in float32 with moments: 6.5 TB and two copies of most of it on one node."""
    offload = replace(JOB, offload=True)
    with pytest.raises(
        InfeasiblePlan, match=r"offload needs \d{5} GiB of host memory per node, there are 2048"
    ):
        find_offers(LLAMA_405B.profile(), offload, [group(host_memory_bytes=2048 << 30)])
    assert best(LLAMA_405B, group(), offload=True).layout.offload  # not known: believed


def test_offload_is_named_and_never_chosen() -> None:
    """It makes a run that should wait for nodes a slow one; who wants it says so."""
    with pytest.raises(InfeasiblePlan, match=r"the job may ask for offload: dp_shard=8,.* a step$"):
        find_offers(LLAMA_70B.profile(), JOB, [group()])


def test_a_warning_counts_what_cuda_and_nccl_take_of_a_small_gpu() -> None:
    """1.25 GiB, where 8 % are less: one communicator and the world's."""
    named = replace(JOB, layout="dp_shard=8,microbatch_size=8,activation_checkpointing=none")
    roomy = find_offers(SMALL.profile(), named, [group()]).best[0]
    one = group()
    for spare, warns in ((1.0, True), (1.5, False)):
        room = int(roomy.memory_bytes + spare * explain.GIB)
        assert 0.92 * room > roomy.memory_bytes
        there = replace(one, hardware=replace(one.hardware, memory_bytes=room))
        offer = find_offers(SMALL.profile(), named, [there]).best[0]
        assert offer.layout == roomy.layout
        assert any("should not fit" in line for line in offer.warnings) == warns
