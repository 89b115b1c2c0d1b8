"""Heterogeneous GPUs and zones in the search: shares, stages, places, who is left out, and that no
GPU idles for arithmetic."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planner.pools import LLAMA_8B, SMALL, gpu

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.planner.cost import memory
from elastic.planner.cost.memory import Step
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.hetero_split import SplitTask, split
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.types import (
    Job,
    Layout,
    ModelProfile,
    Node,
    OptimizerSpec,
    SampleProfile,
    TensorSpec,
    WorkerId,
    grid,
    parse_layout,
)

MODEL = ModelProfile(
    8, 1_000_000, (TensorSpec("w", (1000, 1000), "float32", 0, 1),), (OptimizerSpec(("m", "v")),),
    0.0, 4
)  # fmt: skip


def blocky(n: int, **more: Any) -> ModelProfile:
    """A megabyte of parameters in each block, and none elsewhere."""
    specs = tuple(TensorSpec(f"w{i}", (512, 512), "float32", 0, i) for i in range(n))
    return ModelProfile(n, n * 512 * 512, specs, **{"tp_limit": 1, **more})


def job(**changes: Any) -> Job:
    return Job(**({"global_batch": 48} | changes))


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"n{i}", "p", g, "prepared") for i, g in enumerate(gpus)]


def rates(there: list[Node], speeds: tuple[float, ...]) -> dict[WorkerId, float]:
    return {
        WorkerId(node.node_id, k): speed
        for node, speed in zip(there, speeds, strict=True)
        for k in range(node.gpus)
    }


def busy_s(found: Choice, speeds: dict[WorkerId, float]) -> float:
    at = [speeds[worker] for worker in found.ranks]
    return unequal_shares.busy_s(
        found.layout, found.samples, found.layers, n_microbatches=found.n_microbatches, rates=at
    )


def names(found: Choice) -> list[str]:
    return list(dict.fromkeys(worker.node_id for worker in found.ranks))


# ------------------------------------------------------------------------------------- no GPU idles


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_any_number_of_gpus_is_used_wholly(per_node: int) -> None:
    for n in range(1, 17):
        sizes = [per_node] * (n // per_node) + ([n % per_node] if n % per_node else [])
        for model in (MODEL, SMALL.profile()):
            found = plan_layout(model, job(), nodes(*sizes))
            assert (
                found.layout.world_size == n
                and len(set(found.ranks)) == n
                and sum(found.samples) == 48
            )
            assert max(found.samples) - min(found.samples) <= found.n_microbatches


def test_a_number_that_does_not_divide_is_no_reason_to_cut_the_model_thinly() -> None:
    """What is gathered asks for tp=2; on 13 GPUs that leaves pp=13, which waits for itself."""
    one = blocky(26, tp_limit=2, optimizers=(OptimizerSpec(("m", "v")),))
    there = nodes(8, 5)
    whole = plan_layout(one, job(), there)
    assert whole.layout == Layout(dp_shard=13)
    least = memory.memory_bytes(ModelCost.of(one), Layout(dp_shard=6, tp=2))
    found = plan_layout(one, job(schedule="1f1b"), there, limits=LayoutLimits(memory_bytes=least))
    assert found.layout == Layout(dp_shard=6, tp=2)
    assert found.rejected[0] == "pp=13: with 1 worker more a step would take 1.16 times as long"
    assert (
        plan_layout(one, job(), there, limits=LayoutLimits(memory_bytes=least)).layout.world_size
        == 13
    ), "interleaved it waits less"


# -------------------------------------------------------------------------------- shares and stages


@st.composite
def tasks(draw: st.DrawFn) -> tuple[SplitTask, tuple[tuple[float, ...], ...]]:
    pp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_blocks, m = draw(st.integers(max(2, pp), 9)), draw(st.sampled_from([1, 2, 4]))
    units = draw(st.integers(dp, dp + 6))
    speed = st.sampled_from([0.2, 0.5, 0.9, 1.0, 2.0, 3.0])
    speeds = tuple(tuple(draw(speed) for _ in range(pp)) for _ in range(dp))
    return SplitTask(Layout(pp=pp, dp_shard=dp), n_blocks, units * m, m), speeds


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total))) for cut in cuts]


@settings(max_examples=200, deadline=None)
@given(tasks())
def test_shares_and_stages_are_about_the_best_of_all(
    case: tuple[SplitTask, tuple[tuple[float, ...], ...]],
) -> None:
    task, speeds = case
    layout, m = task.layout, task.n_microbatches
    at = [row[p] for p in range(layout.pp) for row in speeds]
    found = split(task, speeds)
    assert sum(found.samples) == task.global_batch and all(
        n >= m and n % m == 0 for n in found.samples
    )
    assert sum(found.layers) == task.n_blocks and min(found.layers) >= 1
    assert found.busy_s == pytest.approx(
        unequal_shares.busy_s(layout, found.samples, found.layers, n_microbatches=m, rates=at)
    )
    best = min(
        unequal_shares.busy_s(
            layout, tuple(n * m for n in shares), layers, n_microbatches=m, rates=at
        )
        for shares in compositions(task.global_batch // m, layout.dp)
        for layers in compositions(task.n_blocks, layout.pp)
    )
    assert found.busy_s <= 1.03 * best


def test_equal_speeds_keep_even_stages_and_the_given_order() -> None:
    there = nodes(2, 2, 2)
    for text in ("pp=3,dp_shard=2", "pp=2,dp_shard=3", "pp=3,tp=2"):
        found = plan_layout(
            MODEL, job(layout=text), there, limits=LayoutLimits(rates=rates(there, (7.0, 7.0, 7.0)))
        )
        assert found == plan_layout(MODEL, job(layout=text), there)
        assert found.layers == unequal_shares.stage_layers(8, found.layout.pp) and names(found) == [
            "n0",
            "n1",
            "n2",
        ]


def test_a_slow_stage_has_fewer_blocks_and_slow_gpus_share_it() -> None:
    there = nodes(1, 1, 1, 1)
    speeds = rates(there, (1.0, 0.5, 1.0, 0.5))
    found = plan_layout(
        MODEL, job(layout="pp=2,dp_shard=2"), there, limits=LayoutLimits(rates=speeds)
    )
    stages = [
        {speeds[found.ranks[rank]] for rank in grid.stage_ranks(found.layout, p)} for p in (0, 1)
    ]
    by_stage = stages == [{1.0}, {0.5}] or stages == [{0.5}, {1.0}]
    assert by_stage or found.samples[0] != found.samples[1]
    even = unequal_shares.busy_s(
        found.layout,
        (24, 24),
        (4, 4),
        n_microbatches=found.n_microbatches,
        rates=[1.0, 0.5, 1.0, 0.5],
    )
    assert busy_s(found, speeds) < 0.75 * even


def test_interleaved_stages_follow_the_speeds() -> None:
    there = nodes(1, 1)
    wanted = job(layout="pp=2,schedule=interleaved1f1b")
    found = plan_layout(MODEL, wanted, there, limits=LayoutLimits(rates=rates(there, (1.0, 3.0))))
    assert len(found.layers) == 4 and sum(found.layers) == 8
    of = [sum(found.layers[p::2]) for p in (0, 1)]
    fast = [worker.node_id for worker in found.ranks].index("n1")
    assert of[fast] == 6 and of[1 - fast] == 2


def test_the_head_counts_as_work_of_the_last_stage() -> None:
    task = SplitTask(Layout(pp=2), 16, 32, 8, ends=4.0)
    assert split(task, ((1.0, 1.0),)).layers == (10, 6)
    assert split(SplitTask(Layout(pp=2), 16, 32, 8), ((1.0, 1.0),)).layers == (8, 8)


def test_where_even_stages_hold_no_sample_other_ones_are_looked_for() -> None:
    def rows(blocks: tuple[int, ...]) -> tuple[int, ...]:
        return (0,) if blocks == (2, 2) else (1,)

    assert split(SplitTask(Layout(pp=2), 4, 4, 4, most_rows=rows), ((1.0, 2.0),)).layers == (1, 3)


def test_no_stage_is_deeper_and_no_share_larger_than_memory_holds() -> None:
    hardware = {"fast": gpu("H100-80GB-SXM"), "small": gpu("L40S-48GB")}
    there = [Node("small", "q", 8), Node("fast", "p", 8)]
    room = {"fast": 80 << 30, "small": 48 << 30}
    profile = LLAMA_8B.profile()
    work, usable = ModelCost.of(profile), {name: 0.92 * n for name, n in room.items()}
    limits = LayoutLimits(48 << 30, hardware=hardware, memory=room)
    data = {"global_batch": 64, "precision": "bfloat16"}
    for keys in ({"layout": "auto"}, {"layout": "auto,pp=2"}, {"layout": "auto,pp=4"}):
        found = plan_layout(profile, Job.from_plain(data | keys), there, limits=limits)
        assert sum(found.samples) == 64 and sum(found.layers) == 32
        for rank, worker in enumerate(found.ranks):
            at = grid.coordinates(found.layout, rank)
            step = Step(found.n_microbatches, found.samples[at.dp(found.layout)], 64, 8, "bfloat16")
            blocks = sum(found.layers[v] for v in grid.stages_at(found.layout, at.pp))
            assert (
                memory.stage_bytes(work, found.layout, step, n_blocks=blocks)
                <= usable[worker.node_id]
            )


@pytest.mark.parametrize("on_gpus", [True, False])
def test_what_cuda_and_nccl_take_is_left_to_them_where_stages_are_unequal(on_gpus: bool) -> None:
    """Of 24 GiB a stage among four has 21.5: CUDA's context, three communicators, two neighbors."""
    room, wanted = 24 << 30, job(layout="auto,pp=4,microbatch_size=1")
    kept = int(21.8 * (1 << 30)) // 4 // 3  # of three blocks, four times
    sample = SampleProfile(0.0, (("none", kept), ("selective", kept), ("full", kept)), 0, 0)
    model, there = replace(blocky(8), sample=sample), nodes(1, 1, 1, 1)
    limits = LayoutLimits(
        room, rates=rates(there, (3.0, 3.0, 1.0, 1.0)), on_gpus=on_gpus,
    )  # fmt: skip
    found = plan_layout(model, wanted, there, limits=limits)
    usable = memory.usable_bytes(room, found.layout, on_gpus)
    step = Step(found.n_microbatches, sum(found.samples), 48)
    work = ModelCost.of(model)
    most = memory.stage_bytes(work, found.layout, step, n_blocks=max(found.layers))
    assert most <= usable and sum(found.layers) == 8
    assert max(found.layers) == (2 if on_gpus else 3)


def test_unequal_memory_makes_room_for_a_pipeline_that_even_stages_do_not_have() -> None:
    one = blocky(8)
    block = 2 * 4 * 512 * 512  # parameters and gradients
    there, wanted = nodes(1, 1), job(layout="auto,dp_shard=1")
    with pytest.raises(InfeasiblePlan):
        plan_layout(one, wanted, there, limits=LayoutLimits(3 * block))
    found = plan_layout(
        one,
        wanted,
        there,
        limits=LayoutLimits(2 * block, memory={"n0": 2 * block, "n1": 6 * block}),
    )
    deep = dict(zip(names(found), found.layers, strict=True))
    assert found.layout.pp == 2 and deep == {"n0": 2, "n1": 6}


# ------------------------------------------------------------------------------------------ places


def test_tensor_parallel_groups_are_of_equal_gpus_of_one_node() -> None:
    there = nodes(4, 4)
    speeds = rates(there, (1.0, 1.0)) | {WorkerId("n0", 1): 0.4, WorkerId("n0", 2): 0.4}
    found = plan_layout(
        MODEL, job(layout="dp_shard=4,tp=2"), there, limits=LayoutLimits(rates=speeds)
    )
    for group in grid.axis_groups(found.layout, ("cp", "tp")):
        members = [found.ranks[rank] for rank in group]
        assert (
            len({worker.node_id for worker in members}) == 1
            and len({speeds[worker] for worker in members}) == 1
        )
    assert sorted(found.samples)[0] < sorted(found.samples)[1]


def test_pipelines_of_one_kind_or_stages_of_one_kind_whichever_is_faster() -> None:
    there = nodes(1, 1, 1, 1)
    speeds = rates(there, (1.0, 3.0, 1.0, 3.0))
    few = plan_layout(
        MODEL,
        job(layout="pp=2,dp_shard=2", global_batch=8),
        there,
        limits=LayoutLimits(rates=speeds),
    )
    at = [(speeds[few.ranks[d]], speeds[few.ranks[2 + d]]) for d in (0, 1)]
    assert few.samples == (4, 4) and {frozenset(pair) for pair in at} == {frozenset((1.0, 3.0))}, (
        "stages of one kind"
    )
    shallow = ModelProfile(2, 1, MODEL.specs, MODEL.optimizers, 0.0, 1)
    many = plan_layout(
        shallow, job(layout="pp=2,dp_shard=2"), there, limits=LayoutLimits(rates=speeds)
    )
    at = [(speeds[many.ranks[d]], speeds[many.ranks[2 + d]]) for d in (0, 1)]
    assert sorted(at) == [(1.0, 1.0), (3.0, 3.0)], (
        "two blocks cannot be dealt out unequally: pipelines of one kind"
    )
    assert sorted(many.samples)[1] == pytest.approx(3 * sorted(many.samples)[0], rel=0.2)


def test_a_worker_that_costs_more_than_it_gives_is_left_out() -> None:
    there = nodes(1, 1, 1, 1)
    slow = rates(there, (1.0, 0.02, 1.0, 1.0))
    found = plan_layout(MODEL, job(global_batch=8), there, limits=LayoutLimits(rates=slow))
    assert names(found) == ["n0", "n2", "n3"] and found.layout.world_size == 3
    assert "with 1 worker more a step would take" in found.rejected[0]
    kept = plan_layout(
        MODEL,
        job(global_batch=8),
        there,
        limits=LayoutLimits(rates=rates(there, (1.0, 0.6, 1.0, 1.0))),
    )
    assert kept.layout.world_size == 4
    with pytest.raises(InfeasiblePlan, match="5 pipeline stages|min_workers"):
        plan_layout(MODEL, job(min_workers=5), there, limits=LayoutLimits(rates=slow))
    assert (
        plan_layout(
            MODEL, job(global_batch=8, min_workers=4), there, limits=LayoutLimits(rates=slow)
        ).layout.world_size
        == 4
    )


# ------------------------------------------------------------------------------------------ zones


def crossing(found: Choice, zones: dict[str, str]) -> bool:
    """Does a replica lie in two zones?"""
    groups = grid.axis_groups(found.layout, ("pp", "dp_shard", "cp", "tp"))
    return any(len({zones[found.ranks[rank].node_id] for rank in group}) > 1 for group in groups)


def test_a_node_in_another_zone_is_a_replica() -> None:
    there, zones = nodes(4, 4, 4), {"n0": "a", "n1": "b", "n2": "a"}
    found = plan_layout(MODEL, job(), there, limits=LayoutLimits(zones=zones))
    assert found.layout == Layout(dp_replicate=3, dp_shard=4) and not crossing(found, zones)
    assert found.rejected[0].startswith(
        "dp_shard=12: its shards would lie in a and b; only replicas may"
    )
    assert plan_layout(
        MODEL, job(across_zones=True), there, limits=LayoutLimits(zones=zones)
    ).layout == Layout(dp_shard=12)
    assert plan_layout(
        MODEL, job(), there, limits=LayoutLimits(zones={"n0": "a", "n1": "", "n2": "a"})
    ).layout == Layout(dp_shard=12)


def test_a_named_layout_that_would_cross_zones_is_refused_or_placed_within_one() -> None:
    there, zones = nodes(4, 4, 4), {"n0": "a", "n1": "b", "n2": "a"}
    with pytest.raises(
        InfeasiblePlan,
        match=r"of 12 workers each within one zone do not fit: workers in zones are a 8, b 4",
    ):
        plan_layout(MODEL, job(layout="dp_shard=12"), there, limits=LayoutLimits(zones=zones))
    assert names(
        plan_layout(MODEL, job(layout="dp_shard=8"), there, limits=LayoutLimits(zones=zones))
    ) == ["n0", "n2"]


CROWD = st.tuples(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from("abc"), st.sampled_from([1.0, 1.0, 0.5, 0.1])
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(CROWD, min_size=1, max_size=5), st.sampled_from(["auto", "auto", "auto,pp=2",
    "auto,tp=2", "auto,dp_replicate=2", "auto,pp=2,schedule=interleaved1f1b"]), st.integers(2, 64),
    st.sampled_from([0, 20 << 20, 5 << 20]),
)  # fmt: skip
def test_whatever_the_nodes_what_is_chosen_holds(
    there: list[tuple[int, str, float]], text: str, batch: int, room: int
) -> None:
    made = nodes(*(gpus for gpus, _, _ in there))
    zones = {node.node_id: zone for node, (_, zone, _) in zip(made, there)}
    speeds = rates(made, tuple(speed for _, _, speed in there))
    try:
        found = plan_layout(
            MODEL,
            job(layout=text, global_batch=batch),
            made,
            limits=LayoutLimits(room, rates=speeds, zones=zones),
        )
    except InfeasiblePlan:
        return
    layout, m = found.layout, found.n_microbatches
    assert not crossing(found, zones) and len(set(found.ranks)) == layout.world_size == len(
        found.ranks
    )
    assert (
        sum(found.samples) == batch
        and all(n and n % m == 0 for n in found.samples)
        and len(found.samples) == layout.dp
    )
    assert (
        sum(found.layers) == 8 and len(found.layers) == layout.n_stages and min(found.layers) >= 1
    )
    for group in grid.axis_groups(layout, ("cp", "tp")):
        assert len({found.ranks[rank].node_id for rank in group}) == 1
    assert not room or found.memory_bytes <= room
    assert parse_layout(str(layout)) == layout
    assert found == plan_layout(
        MODEL,
        job(layout=text, global_batch=batch),
        made,
        limits=LayoutLimits(room, rates=speeds, zones=zones),
    )


def test_a_pinned_size_of_microbatches_holds_for_unequal_shares_too() -> None:
    there = nodes(1, 1)
    found = plan_layout(
        MODEL,
        job(global_batch=16, microbatch_size=4, layout="dp_shard=2"),
        there,
        limits=LayoutLimits(rates=rates(there, (2.0, 1.0))),
    )
    assert max(found.samples) <= 4 * found.n_microbatches and sum(found.samples) == 16
    free = plan_layout(
        MODEL,
        job(global_batch=16, layout="dp_shard=2"),
        there,
        limits=LayoutLimits(rates=rates(there, (2.0, 1.0))),
    )
    assert free.samples == (11, 5)


def test_of_a_model_without_blocks_no_stage_has_any() -> None:
    """A small one, as of two linear layers: on unequal workers as on equal ones."""
    plain, there = replace(MODEL, n_blocks=0), nodes(2, 2)
    alike = plan_layout(plain, job(), there)
    speeds = rates(there, (1.0, 0.5))
    uneven = plan_layout(plain, job(), there, limits=LayoutLimits(rates=speeds))
    assert len(set(uneven.samples)) > 1, "shares follow the speeds"
    assert alike.layers == uneven.layers == (0,)
