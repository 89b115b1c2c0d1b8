"""Which layout on which nodes, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.errors import InfeasiblePlan
from elastic.planner import layout_search
from elastic.planner.cost import memory
from elastic.planner.cost.memory import USABLE, usable_bytes
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.cost.step_cost import Cost
from elastic.planner.layout_choice import plan_layout, ranked_layouts
from elastic.planner.layout_search import Candidate, Fastest
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.step_split import step_of
from elastic.types import (
    Job,
    Layout,
    ModelProfile,
    Node,
    OptimizerSpec,
    SampleProfile,
    TensorSpec,
    WorkerId,
)

MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
    0.0,
    4,
)


def memory_bytes(model: ModelProfile, layout: Layout) -> int:
    return memory.memory_bytes(ModelCost.of(model), layout)


def job(**changes: Any) -> Job:
    return Job(**({"global_batch": 16} | changes))


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"n{i}", "p", g, "prepared") for i, g in enumerate(gpus)]


def test_a_step_of_far_fewer_samples_than_workers_takes_one_worker_each() -> None:
    """However many more there are: those that are left idle cost, a run that cannot begin more."""
    many = nodes(*[8] * 70)
    alone = {"layout": "auto,pp=1,tp=1,cp=1"}
    assert plan_layout(MODEL, job(**alone), many).layout == Layout(dp_shard=16)
    assert plan_layout(MODEL, job(**alone, global_batch=3), nodes(*[1] * 70)).layout == Layout(
        dp_shard=3
    )


def test_auto_uses_every_worker_with_plain_sharding() -> None:
    choice = plan_layout(MODEL, job(), nodes(2, 2, 1))
    assert (
        choice.layout == Layout(dp_shard=5)
        and choice.samples == (4, 3, 3, 3, 3)
        and choice.layers == (4,)
    )
    assert choice.ranks[:3] == (WorkerId("n0", 0), WorkerId("n0", 1), WorkerId("n1", 0))


def test_auto_does_not_cut_the_model_because_the_batch_divides_badly() -> None:
    for batch, gpus in ((6, (2, 2)), (8, (7,)), (12, (5,))):
        assert plan_layout(MODEL, job(global_batch=batch), nodes(*gpus)).layout == Layout(
            dp_shard=sum(gpus)
        )


def test_auto_never_has_more_ranks_than_samples() -> None:
    choice = plan_layout(MODEL, job(global_batch=2), nodes(1, 1, 1))
    assert choice.layout.world_size == 2 and choice.layout.dp <= 2
    # no pipeline without microbatches
    assert plan_layout(MODEL, job(global_batch=1), nodes(1, 1, 1)).layout == Layout()


def test_auto_cuts_further_when_memory_is_short() -> None:
    tight = MODEL.specs[0]
    big = ModelProfile(4, 1, (tight,), (OptimizerSpec(("exp_avg", "exp_avg_sq")),), 0.0, 4)
    free = plan_layout(big, job(), nodes(4))
    assert free.layout == Layout(dp_shard=4)
    less = plan_layout(
        big, job(), nodes(4), limits=LayoutLimits(memory_bytes=free.memory_bytes - 1)
    )
    assert (
        less.layout.world_size == 4 and less.layout.tp > 1 and less.memory_bytes < free.memory_bytes
    )
    with pytest.raises(InfeasiblePlan, match="GiB per GPU"):
        plan_layout(big, job(), nodes(4), limits=LayoutLimits(memory_bytes=1000))


def test_what_a_rank_holds_at_each_stage() -> None:
    parameters = 4_000_000
    found = [memory_bytes(MODEL, Layout(dp_shard=4, zero_stage=stage)) for stage in (3, 2, 1)]
    assert found == [parameters + parameters // 2, 2 * parameters, 3 * parameters]
    assert memory_bytes(MODEL, Layout(dp_shard=4, offload=True)) == parameters // 2


def test_what_did_not_fit_is_not_tried_again_nor_anything_that_needs_more() -> None:
    first = plan_layout(MODEL, job(), nodes(2, 2))
    second = plan_layout(
        MODEL, job(), nodes(2, 2), limits=LayoutLimits(infeasible={first.layout: 5 << 30})
    )
    assert second.layout != first.layout and second.memory_bytes < first.memory_bytes
    assert any("did not fit (5.00 GiB measured)" in why for why in second.rejected)


@pytest.mark.parametrize(("room", "tried_on"), [(80, 40), (40, 40), (0, 40), (80, 0)])
def test_what_did_not_fit_is_tried_again_on_gpus_of_more_memory(room: int, tried_on: int) -> None:
    """0 = not known. What needs more than that is, too."""
    first = plan_layout(MODEL, job(), nodes(2, 2))
    limits = LayoutLimits(
        memory_bytes=room << 30,
        infeasible={first.layout: 39 << 30, Layout(): 39 << 30},
        infeasible_on={first.layout: tried_on << 30, Layout(): 40 << 30},
    )
    again = plan_layout(MODEL, job(), nodes(2, 2), limits=limits)
    assert (again.layout == first.layout) == (0 < tried_on < room)
    mixed = replace(limits, memory={"n0": tried_on << 30}, infeasible={Layout(): 39 << 30})
    if 0 < tried_on < room:
        one = plan_layout(MODEL, job(layout="dp_shard=1"), nodes(2, 2), limits=mixed)
        assert one.ranks == (WorkerId("n1", 0),)


def test_the_layout_of_the_job_is_taken_literally() -> None:
    choice = plan_layout(MODEL, job(layout="pp=2,dp_shard=2"), nodes(2, 2, 2))
    assert choice.layout == Layout(pp=2, dp_shard=2) and choice.layers == (2, 2)
    assert choice.n_microbatches == 4 and choice.samples == (8, 8)


@pytest.mark.parametrize(
    ("text", "there", "why"),
    [
        ("dp_shard=8", (2, 2), "needs 8 workers, there are 4 on 2 nodes"),
        ("tp=4", (2, 2), "0 of them in groups of 4 inside a node"),
        ("tp=3", (3,), "tp=3 must divide 4"),
        ("pp=5", (5,), "5 pipeline stages need at least 5 blocks, the model has 4"),
        ("dp_shard=17", (17,), "17 data-parallel ranks are more than the 16 samples"),
    ],
)
def test_a_layout_that_cannot_fit_says_why(text: str, there: tuple[int, ...], why: str) -> None:
    with pytest.raises(InfeasiblePlan, match=why):
        plan_layout(MODEL, job(layout=text), nodes(*there))


def test_a_map_names_the_layout_of_the_largest_size_that_is_there() -> None:
    wanted = {"2": "dp_shard=2", "4": "dp_shard=2,tp=2"}
    found = [
        plan_layout(MODEL, job(layout=wanted), nodes(*([1] * n if n < 4 else [2, 2]))).layout
        for n in (1, 2, 3, 4)
    ]
    assert found == [Layout(), Layout(dp_shard=2), Layout(dp_shard=2), Layout(dp_shard=2, tp=2)]


def test_a_tensor_parallel_group_never_leaves_its_node() -> None:
    choice = plan_layout(MODEL, job(layout="dp_shard=3,tp=2"), nodes(3, 2, 3))
    pairs = [choice.ranks[i : i + 2] for i in range(0, 6, 2)]
    assert all(a.node_id == b.node_id for a, b in pairs)
    assert WorkerId("n0", 2) not in choice.ranks


def test_bounds_on_the_number_of_workers() -> None:
    assert plan_layout(MODEL, job(max_workers=3), nodes(2, 2)).layout.world_size == 3
    with pytest.raises(InfeasiblePlan, match="2 of 3 required"):
        plan_layout(MODEL, job(min_workers=3), nodes(2))
    with pytest.raises(InfeasiblePlan, match="min_workers is 3"):
        plan_layout(MODEL, job(min_workers=3, global_batch=2), nodes(3))


def test_slow_nodes_get_fewer_samples() -> None:
    rates = {WorkerId(f"n{i}", 0): rate for i, rate in enumerate((30.0, 15.0, 30.0))}
    choice = plan_layout(MODEL, job(), nodes(1, 1, 1), limits=LayoutLimits(rates=rates))
    assert choice.samples == (6, 3, 7) or choice.samples == (7, 3, 6)


def test_a_token_budget_takes_no_pipeline() -> None:
    with pytest.raises(
        InfeasiblePlan,
        match="pp=2 needs micro-batches of one shape, which microbatch_tokens does not give",
    ):
        plan_layout(MODEL, job(layout="pp=2", microbatch_tokens=64), nodes(2))
    two = replace(MODEL, tp_limit=1)
    with pytest.raises(InfeasiblePlan, match="which microbatch_tokens does not give"):
        plan_layout(
            two,
            job(microbatch_tokens=64),
            nodes(2),
            limits=LayoutLimits(memory_bytes(two, Layout(dp_shard=2)) - 1),
        )
    rates = {WorkerId("n0", 0): 1.0, WorkerId("n0", 1): 1.0, WorkerId("n1", 0): 0.5}
    choice = plan_layout(
        MODEL, job(microbatch_tokens=64), nodes(2, 1), limits=LayoutLimits(rates=rates)
    )
    assert (
        choice.layout == Layout(dp_shard=3)
        and choice.n_microbatches == 1
        and choice.samples == (7, 6, 3)
    )


def test_a_small_gpu_keeps_room_for_communicators_where_8_percent_are_not_enough() -> None:
    """512 MiB of CUDA's context; 384 for the shards' communicator and the world's each; between
    stages 448 more."""
    gib = 1 << 30
    assert usable_bytes(80 * gib, Layout(dp_shard=8)) == USABLE * 80 * gib, "6.4 GiB are left"
    assert usable_bytes(8 * gib, Layout(dp_shard=8)) == 8 * gib - (512 + 2 * 384) * (1 << 20)
    assert usable_bytes(8 * gib, Layout(pp=2)) == 8 * gib - (512 + 2 * 384 + 448) * (1 << 20)
    assert usable_bytes(8 * gib, Layout(dp_shard=8), on_gpus=False) == USABLE * 8 * gib
    assert usable_bytes(gib, Layout(pp=4, tp=4)) == 0


def test_a_layout_is_refused_where_its_communicators_have_no_room() -> None:
    sample = SampleProfile(0.0, (("none", 0), ("selective", 0), ("full", 0)), 0, 0)
    known = replace(MODEL, sample=sample)
    needs = plan_layout(known, job(), nodes(4)).memory_bytes
    roomy, tight = (needs + (512 + 2 * 384 + spare) * (1 << 20) for spare in (64, -64))
    assert plan_layout(
        known, job(), nodes(4), limits=LayoutLimits(roomy, on_gpus=True)
    ).layout == Layout(dp_shard=4)
    assert (
        plan_layout(known, job(), nodes(4), limits=LayoutLimits(tight, on_gpus=True)).layout
        == Layout()
    ), "which has none"
    assert plan_layout(known, job(), nodes(4), limits=LayoutLimits(tight)).layout == Layout(
        dp_shard=4
    )


def test_the_tie_rule() -> None:
    """1 % for each axis or option beside plain sharding, 5 % where workers are left idle."""

    def value(layout: Layout, seconds: float) -> float:
        there: Any = None
        step = memory.Step(1, 2, 16)
        return Fastest(8).value(Candidate(there, layout, step, Cost({"products": seconds})))

    plain, once = Layout(dp_shard=8), Layout(dp_shard=8, zero_stage=1)
    assert value(once, 0.98) < value(plain, 1.0) < value(once, 0.995)
    assert value(replace(plain, microbatch_size=2), 1.0) == value(plain, 1.0)
    less = Layout(dp_shard=7)
    assert value(less, 0.94) < value(plain, 1.0) < value(less, 0.96)


def test_what_cannot_be_cut_is_asked_once_for_as_many_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each layout is refused in the words that it would be refused in by itself."""
    asked: list[Layout] = []

    def share_out(job: Job, layout: Layout, **how: Any) -> memory.Step:
        asked.append(layout)
        return shared(job, layout, **how)

    shared = layout_search.share_out
    monkeypatch.setattr(layout_search, "share_out", share_out)
    model, wanted = replace(MODEL, n_blocks=32, tp_limit=8), job(global_batch=1024)
    wanted = replace(wanted, microbatch_size=1)
    refused = ranked_layouts(model, wanted, nodes(*[8] * 63)).search.rejected
    assert len(refused) > 100 and len(asked) < len(refused) / 2
    for layout, why in refused:
        with pytest.raises(InfeasiblePlan) as found:
            step_of(model, wanted, layout, per_node=8)
        assert str(found.value) == why
    assert len({layout for layout, _ in refused}) == len(refused)
