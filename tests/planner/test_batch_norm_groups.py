"""Samples that BatchNorm keeps together: no layout, share or micro-batch cuts a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.planner.hetero.unequal_shares import microbatches
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.types import Job, Layout, ModelProfile, Node, OptimizerSpec, SampleProfile, WorkerId
from elastic.types.grid import each_microbatches
from elastic.worker.program.calls import cut_rows

KEPT = (("none", 1 << 24), ("selective", 1 << 23), ("full", 1 << 20))
MODEL = ModelProfile(
    8,
    1 << 20,
    (),
    (OptimizerSpec(("momentum_buffer",)),),
    sample=SampleProfile(1e10, KEPT, 1 << 16, 1 << 16),
)


def chosen(together: int, layout: str, n: int, *, memory: int = 0) -> Choice:
    """On `n` GPUs, some of which are slow."""
    nodes = [Node(f"n{i}", "pool", 1) for i in range(n)]
    rates = {WorkerId(node.node_id, 0): 1 + i % 3 / 2 for i, node in enumerate(nodes)}
    model = replace(MODEL, together=together)
    limits = LayoutLimits(memory_bytes=memory, rates=rates)
    return plan_layout(model, Job(global_batch=96, layout=layout), nodes, limits=limits)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("layout", ["auto", "auto,pp=2", "auto,microbatch_size=16", "auto,pp=3"])
@pytest.mark.parametrize("n", [2, 3, 5, 6])
@pytest.mark.parametrize("unit", [2, 8])
def test_no_choice_cuts_a_group(unit: int, n: int, layout: str) -> None:
    if "pp" in layout and n < 3:
        return
    for memory in (0, 1 << 29):
        found = chosen(unit, layout, n, memory=memory)
        m, samples = found.n_microbatches, found.samples
        assert sum(samples) == 96
        each = each_microbatches(found.layout, samples, m, together=unit)
        for size, pieces in zip(samples, each, strict=True):
            cut = [len(rows) for rows in cut_rows(size, pieces, unit)]
            assert sum(cut) == size and not any(rows % unit for rows in cut) and min(cut)
            if found.layout.pp > 1:
                assert len(set(cut)) == 1


def test_a_rank_without_a_group_is_none() -> None:
    assert chosen(32, "auto", 6).layout.dp == 3
    with pytest.raises(InfeasiblePlan, match="6 data-parallel ranks are more than the 3 groups of"):
        chosen(32, "dp_shard=6", 6)
    with pytest.raises(InfeasiblePlan, match="96 samples in groups of 32 cannot feed 4"):
        microbatches(96, Layout(dp_shard=4), 32)
    with pytest.raises(InfeasiblePlan, match="microbatch_size=8: no number of microbatches"):
        microbatches(96, Layout(microbatch_size=8), 32)


def test_a_whole_step_is_computed_at_once() -> None:
    found = chosen(0, "auto", 5, memory=1 << 30)
    assert (found.n_microbatches, found.layout.microbatch_size) == (1, 0)
    with pytest.raises(InfeasiblePlan, match="microbatch_size=8: no number"):
        microbatches(96, Layout(dp_shard=2, microbatch_size=8), 0)


def test_replicas_with_more_samples_have_more_microbatches() -> None:
    layout = Layout(dp_replicate=2, microbatch_size=8)
    assert each_microbatches(layout, (72, 24), 6, together=4) == (9, 3)
    assert each_microbatches(layout, (72, 24), 3, together=8) == (9, 3)
    assert each_microbatches(layout, (72, 24), 6, together=0) == (6, 6)
