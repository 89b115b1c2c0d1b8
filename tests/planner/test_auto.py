"""What `auto` chooses of all axes: examples with known answers, and that any choice passes the
checks of those who run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config.job import job_of
from elastic.config.pool_checks import check_fit
from elastic.errors import InfeasiblePlan
from elastic.models.attention import SequenceShard
from elastic.planner.choice import Choice
from elastic.planner.cost import catalog_hardware, collectives, compute, memory, step_cost
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.sites import site_of
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.reshard.rank_boxes import check_layers
from elastic.types import (
    Job,
    Layout,
    ModelProfile,
    Node,
    OptimizerSpec,
    Pool,
    SampleProfile,
    grid,
    parse_layout,
)
from elastic.worker.hosting.resume_checks import check_layouts

GPU = 80 << 30
# bytes per hidden element in bfloat16, of a block of Llama 3 as traced
PER_TOKEN = {"none": 55, "selective": 25, "full": 2}


def llama(hidden: int, kv: int, ffn: int, n_blocks: int, seq: int, **more: Any) -> ModelProfile:
    """A decoder with Llama 3's vocabulary, as the trace profiles it in bfloat16."""
    vocab = 128256
    block = 2 * hidden * (hidden + kv) + 3 * hidden * ffn
    flop = 6.0 * (n_blocks * block + vocab * hidden) * seq + 6.0 * n_blocks * hidden * seq * seq
    kept = tuple((mode, n * hidden * seq) for mode, n in PER_TOKEN.items())
    sample = SampleProfile(
        flop, kept, 2 * hidden * seq, 12 * vocab * seq, seq, 4 * kv * seq, **more
    )
    n_params = n_blocks * block + 2 * vocab * hidden
    return ModelProfile(
        n_blocks,
        n_params,
        (),
        (OptimizerSpec(("exp_avg", "exp_avg_sq")),),
        tp_limit=8,
        sample=sample,
    )


def one_b(seq: int = 2048, **more: Any) -> ModelProfile:
    return llama(2048, 512, 8192, 16, seq, **more)


def eight_b(seq: int = 8192, **more: Any) -> ModelProfile:
    return llama(4096, 1024, 14336, 32, seq, **more)


def seventy_b(seq: int = 8192, **more: Any) -> ModelProfile:
    return llama(8192, 1024, 28672, 80, seq, **more)


def chosen(
    model: ModelProfile, n_nodes: int, batch: int, gpus: int = 8, memory: int = GPU, **keys: Any
) -> Choice:
    """On H100 nodes, with as much memory as it says."""
    job = {"global_batch": batch, "layout": "auto", "precision": "bfloat16"} | keys
    nodes = [Node(f"n{i}", "p", gpus) for i in range(n_nodes)]
    known = {node.node_id: catalog_hardware.NOMINAL for node in nodes}
    limits = LayoutLimits(memory, hardware=known)
    return plan_layout(model, Job.from_plain(job), nodes, limits=limits)


# ------------------------------------------------------------------------------------ known answers


def test_a_small_model_is_sharded_and_gathered_once_a_step_where_there_is_room() -> None:
    assert chosen(one_b(), 1, 64).layout == Layout(dp_shard=8, zero_stage=1)
    assert chosen(one_b(), 1, 64, memory=0).layout == Layout(dp_shard=8), "memory is not known"


def test_an_8b_at_8k_tokens_computes_less_at_once_and_some_twice_before_anything_is_cut() -> None:
    found = chosen(eight_b(), 1, 64)
    assert found.layout == Layout(
        dp_shard=8, microbatch_size=1, activation_checkpointing="selective", zero_stage=2
    )
    assert found.n_microbatches == 8
    assert found.rejected[0].startswith("dp_shard=8: needs 5")
    assert found.rejected[0].endswith("GiB per GPU, 73.6 of 80 can be used")


def test_a_long_sequence_is_cut() -> None:
    found = chosen(eight_b(131072), 1, 8)
    assert found.layout == Layout(
        dp_shard=2, cp=4, microbatch_size=1, activation_checkpointing="full"
    )
    assert (
        found.memory_bytes + found.activation_bytes
        < GPU
        < 4 * cost_of(eight_b(131072), Layout(dp_shard=8))
    )


def cost_of(model: ModelProfile, layout: Layout) -> int:
    step, work = memory.Step(1, 1, layout.dp, dtype="bfloat16"), ModelCost.of(model)
    return memory.memory_bytes(work, layout, "bfloat16") + memory.activation_bytes(
        work, layout, step
    )


def test_a_sequence_that_cannot_be_cut_is_not() -> None:
    with pytest.raises(InfeasiblePlan, match="GiB per GPU"):
        chosen(
            eight_b(131072, no_cp="the model does not call elastic.attention"),
            1,
            8,
            layout="auto,tp=1",
        )
    with pytest.raises(
        InfeasiblePlan, match=r"cp=8, but the model does not call elastic\.attention"
    ):
        chosen(
            eight_b(131072, no_cp="the model does not call elastic.attention"), 1, 8, layout="cp=8"
        )
    keys = {"compile": True, "memory": 0, "layout": "auto"}
    assert chosen(one_b(), 1, 4, **keys).layout.tp > 1
    assert chosen(one_b(), 1, 4, microbatch_tokens=8192, **keys).layout == Layout(dp_shard=4)
    assert chosen(eight_b(131072), 1, 8, compile=True, layout="auto", memory=0).layout.cp == 1


def test_a_70b_on_32_gpus_is_sharded_and_computed_twice() -> None:
    found = chosen(seventy_b(), 4, 128)
    assert found.layout == Layout(dp_shard=32, microbatch_size=1, activation_checkpointing="full")
    with pytest.raises(
        InfeasiblePlan, match=r"the state alone needs 131\.\d GiB per GPU, 73\.6 of 80 can be used"
    ):
        chosen(seventy_b(), 1, 128)


def test_fewer_samples_than_gpus() -> None:
    found = chosen(one_b(32768), 1, 2)
    assert found.layout == Layout(dp_shard=2, cp=4, zero_stage=1)
    assert any(
        "dp_shard=8" in why and "8 data-parallel ranks are more than the 2 samples" in why
        for why in found.rejected
    )
    assert chosen(one_b(32768, no_cp="no"), 1, 2).layout.cp == 1


def test_a_pipeline_with_a_large_bubble_is_interleaved_where_the_blocks_divide() -> None:
    single = {"gpus": 1, "memory": 24 << 30, "layout": "auto,cp=1"}
    found = chosen(eight_b(), 32, 16, **single)
    assert found.layout.pp > 1 and found.layout.n_stages > found.layout.pp
    plain = chosen(eight_b(), 32, 16, **single, schedule="1f1b")
    assert (
        plain.layout.n_stages == plain.layout.pp
        and plain.parts["bubble"] > 1.5 * found.parts["bubble"]
    )
    odd = chosen(
        replace(eight_b(), n_blocks=31),
        32,
        16,
        **single | {"memory": 40 << 30, "layout": "auto,cp=1,pp=16"},
    )
    assert odd.layout.pp > 1 and odd.layout.n_stages == odd.layout.pp


def test_replicas_where_rings_over_all_ranks_are_too_long() -> None:
    keys = {"layout": "auto,pp=1,tp=1", "microbatch_size": 1, "zero_stage": 3}
    layout = chosen(one_b(), 128, 4096, **keys).layout
    assert layout.dp_replicate > 1 and layout.dp_shard % 8 == 0 and layout.dp == 1024
    assert chosen(one_b(), 2, 64, microbatch_size=1).layout.dp_replicate == 1


def test_a_zero_stage_that_gathers_less_where_there_is_room() -> None:
    tiny_step = chosen(one_b(512), 4, 32, layout="auto,tp=1,pp=1").layout
    assert tiny_step.zero_stage < 3 and tiny_step.dp_shard == 32
    assert chosen(one_b(512), 4, 32, zero_stage=3).layout.zero_stage == 3


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"layout": "auto,tp=2"}, {"tp": 2}),
        ({"layout": "auto, pp=2, schedule=gpipe"}, {"pp": 2, "schedule": "gpipe"}),
        ({"layout": "auto,cp=2,dp_shard=4"}, {"cp": 2, "dp_shard": 4}),
        ({"layout": "auto,dp_replicate=2"}, {"dp_replicate": 2}),
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": "full"}),
        (
            {"layout": "auto,microbatch_size=2", "zero_stage": 2},
            {"microbatch_size": 2, "zero_stage": 2},
        ),
    ],
)
def test_what_the_job_pins_stays_and_the_rest_is_filled(
    keys: dict[str, Any], want: dict[str, Any]
) -> None:
    layout = chosen(one_b(), 1, 64, **keys).layout
    assert layout.world_size == 8
    assert {name: getattr(layout, name) for name in want} == want


def test_what_did_not_fit_is_followed_by_less_at_once() -> None:
    job, nodes = (
        {"global_batch": 64, "layout": "auto", "precision": "bfloat16"},
        [Node("a", "p", 8)],
    )
    tried: dict[Layout, int] = {}
    needs = []
    for _ in range(4):
        found = plan_layout(
            one_b(), Job.from_plain(job), nodes, limits=LayoutLimits(infeasible=tried)
        )
        tried[found.layout] = GPU
        needs.append(found.memory_bytes + found.activation_bytes)
    assert [layout.dp_shard for layout in tried] == [8] * 4
    assert needs == sorted(set(needs), reverse=True) and len(needs) == 4


# ----------------------------------------------------------------------------------------- formulas


def test_what_cuts_activations() -> None:
    sample = eight_b().sample
    assert sample is not None
    kept = memory.kept_bytes(sample, Layout(), "none")
    assert memory.kept_bytes(sample, Layout(cp=4), "none") == kept / 4
    assert memory.kept_bytes(sample, Layout(tp=4), "none") == pytest.approx(
        kept * (10 / 34 + 24 / 34 / 4)
    )
    assert memory.kept_bytes(sample, Layout(tp=4), "full") == memory.kept_bytes(
        sample, Layout(), "full"
    )
    assert (
        memory.kept_bytes(eight_b(sequence_parallel=True).sample, Layout(tp=4), "none") == kept / 4
    )  # type: ignore[arg-type]
    assert memory.ends_bytes(sample, Layout(tp=4, cp=2)) == sample.ends_bytes / 2
    assert (
        memory.ends_bytes(eight_b(loss_parallel=True).sample, Layout(tp=4)) == sample.ends_bytes / 4
    )  # type: ignore[arg-type]


def test_microbatches_in_flight() -> None:
    interleaved, gpipe = (Layout(pp=4, schedule=name) for name in ("interleaved1f1b", "gpipe"))
    assert [memory.in_flight(layout, 8) for layout in (Layout(), Layout(pp=4), gpipe)] == [1, 4, 8]
    # L (1 + (p - 1) / (p v)) of Korthikanti et al., in stages of L / p
    assert memory.in_flight(interleaved, 8) == 5.5
    # of torch's order of passes: its last rank has p (v - 1) + 1 of a v-th before it goes backward
    assert memory.in_flight(interleaved, 8, last=True) == 2.5
    assert [memory.in_flight(layout, 8, last=True) for layout in (Layout(pp=4), gpipe)] == [1, 8]
    assert step_cost.bubble(interleaved, 8) == step_cost.bubble(Layout(pp=4), 8) / 2 == 3 / 16


def test_the_stage_that_keeps_most_is_the_first_unless_the_last_has_the_logits() -> None:
    work, layout = ModelCost.of(eight_b()), Layout(pp=4)
    assert work.sample is not None
    kept = work.n_blocks / 4 * memory.kept_bytes(work.sample, layout, "none")
    many = memory.activation_parts(work, layout, memory.Step(8, 8, 8))
    assert many["activations"] == pytest.approx(4 * kept) and many["logits"] == 0, (
        "four microbatches are in flight there"
    )
    one = memory.activation_parts(work, layout, memory.Step(1, 1, 1))
    assert one["activations"] == pytest.approx(kept) and one["logits"] == pytest.approx(
        work.sample.ends_bytes
    )


@pytest.mark.parametrize(("schedule", "m"), [("gpipe", 8), ("1f1b", 3)])
def test_where_no_microbatch_goes_backward_early_the_last_stage_has_the_logits_of_all(
    schedule: str, m: int
) -> None:
    work, layout = ModelCost.of(eight_b()), Layout(pp=4, schedule=schedule)
    assert work.sample is not None
    kept = {mode: memory.kept_bytes(work.sample, layout, mode) for mode in ("none", "full")}
    found = memory.activation_parts(work, layout, memory.Step(m, m, m))
    ends = work.sample.ends_bytes
    assert found["activations"] == pytest.approx(m * work.n_blocks / 4 * kept["none"])
    assert found["logits"] == pytest.approx(m * ends)
    full = replace(layout, activation_checkpointing="full")
    again = memory.activation_parts(work, full, memory.Step(m, m, m))
    block = kept["none"] - kept["full"]
    assert sum(again.values()) == pytest.approx(
        m * work.n_blocks / 4 * kept["full"] + (m - 1) * ends + max(ends, block)
    ), "those of the one that is computed again are gone by then"


def test_rings() -> None:
    links = collectives.Links(1e9, 1e8, 4, 0.0, 0.0)
    assert collectives.gather_s(links, 8e9, collectives.RankGroup(1)) == 0
    assert collectives.gather_s(links, 8e9, collectives.RankGroup(4)) == pytest.approx(6.0)
    assert collectives.gather_s(links, 8e9, collectives.RankGroup(8)) == pytest.approx(
        8 / 2 / (4 * 0.1)
    )  # four cards of a node
    # one of them
    assert collectives.gather_s(links, 8e9, collectives.RankGroup(2, 4)) == pytest.approx(
        8 / 2 / 0.1
    )
    assert collectives.reduce_s(links, 8e9, collectives.RankGroup(4)) == pytest.approx(12.0)


def test_gathered_keys_and_values_of_cp() -> None:
    sample, site = eight_b().sample, site_of(Job(precision="bfloat16"), catalog_hardware.NOMINAL, 8)
    assert sample is not None
    step = memory.Step(1, 1, 1, dtype="bfloat16")
    # keys and values forward, backward, gradients in float32
    bytes_moved = 8192 * 2 * 1024 * 7 / 8 * (2 + 2 + 4)
    expected = bytes_moved / site.links.inside + 3 * 7 * site.links.inside_hop_s
    assert step_cost.cp_s(site, sample, Layout(cp=8), step) == pytest.approx(expected)


def test_gathered_parameters_by_stage() -> None:
    site, work = (
        site_of(Job(precision="bfloat16"), catalog_hardware.NOMINAL, 8),
        ModelCost.of(eight_b()),
    )
    step = memory.Step(4, 4, 32, dtype="bfloat16")
    idle = compute.BlockTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # nothing to hide under
    layouts = [Layout(dp_shard=8, zero_stage=stage) for stage in (3, 2, 1)]
    three, two, one = (
        step_cost._fsdp_s(
            site, layout, idle, m=4, blocks=32, of=step_cost.shards(site, work, layout, step=step)
        )
        for layout in layouts
    )
    # per block, in units of a gather in bfloat16 (gradients in float32 are two): 8 + 8, 4 + 8, 1 +
    # 2; of one block more each microbatch nothing is hidden
    assert two / three == pytest.approx(12 / 16, rel=0.05) and one / three == pytest.approx(
        3 / 16, rel=0.05
    )


# --------------------------------------------------------------------------- any model on any nodes

SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=4)
PINS = st.sampled_from(
    ["auto"] * 4
    + [
        "auto,tp=2",
        "auto,pp=2",
        "auto,cp=2",
        "auto,dp_shard=2",
        "auto,dp_replicate=2",
        "auto,pp=2,tp=2",
    ]
)
KEYS = st.fixed_dictionaries(
    {"layout": PINS},
    optional={
        "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved1f1b"]),
        "virtual_stages": st.integers(2, 3),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        "zero_stage": st.sampled_from([1, 2, 3]),
        "microbatch_size": st.integers(1, 4),
        "precision": st.sampled_from(["float32", "bfloat16"]),
        "compile": st.just(True),
        "max_workers": st.integers(1, 16),
    },
)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    kept = sorted(draw(st.tuples(*[st.integers(1, 1 << 20)] * 3)), reverse=True)
    sample = SampleProfile(
        draw(st.sampled_from([1e6, 1e10, 1e14])),
        tuple(zip(("none", "selective", "full"), kept, strict=True)),
        kept[2],
        draw(st.integers(0, 1 << 22)),
        draw(st.sampled_from([12, 16, 30, 64, 4096])),
        draw(st.integers(0, 1 << 16)),
        draw(st.sampled_from(["", "", "no"])),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    return ModelProfile(
        draw(st.integers(1, 12)), draw(st.integers(1, 1 << 22)), (), (OptimizerSpec(("m", "v")),),
        0.0, draw(st.sampled_from([1, 2, 4, 6, 8])), pipeline=draw(st.booleans()),
        sample=draw(st.sampled_from([sample, sample, sample, None])),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(profiles(), SIZES, st.integers(1, 48), st.sampled_from([0, 1 << 20, 1 << 23, 1 << 26]), KEYS)
def test_what_is_chosen_passes_the_checks_of_those_who_run_it(
    model: ModelProfile, sizes: list[int], batch: int, memory: int, keys: dict[str, Any]
) -> None:
    nodes = [Node(f"n{i}", "p", size) for i, size in enumerate(sizes)]
    data: dict[str, Any] = {"steps": 1, "global_batch": batch, **keys}
    try:
        found = plan_layout(model, Job.from_plain(data), nodes, limits=LayoutLimits(memory))
    except InfeasiblePlan:
        return
    layout = found.layout
    assert parse_layout(str(layout)) == layout
    spec = job_of({**data, "layout": str(layout)}, Path("program.py"))
    check_layouts(spec, model)
    check_fit(spec, [Pool(f"p{i}", gpus_per_node=size) for i, size in enumerate(sizes)])
    check_layers(model, layout, found.layers)
    assert sum(found.samples) == batch and all(
        n and n % found.n_microbatches == 0 for n in found.samples
    )
    assert grid.fills_rounds(layout.pp, layout.n_stages, found.n_microbatches)
    for group in grid.axis_groups(layout, ("cp", "tp")):
        assert len({found.ranks[rank].node_id for rank in group}) == 1
    if model.sample is not None:
        row = torch.empty(1, model.sample.sequence, device="meta")
        part = row if layout.cp == 1 else SequenceShard(0, layout.cp, None).take(row)
        assert layout.cp == 1 or not model.sample.no_cp
        assert not model.sample.sequence_parallel or part.shape[1] % layout.tp == 0
        needed = found.memory_bytes + found.activation_bytes
        assert not memory or needed <= memory
    if layout.cp > 1:
        assert not keys.get("compile")
