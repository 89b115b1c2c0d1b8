"""An axis on which a model would compute something else is not used, and whoever asks for it is
told why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planner.pools import JOB, LLAMA_8B, LLAMA_70B, group

from elastic.api.planning.conflicts import check
from elastic.api.planning.model_source import of_model
from elastic.api.planning.plan_nodes import of_asked
from elastic.api.planning.quantities import gpus_of
from elastic.api.planning.query import notes_of
from elastic.config.job import job_of
from elastic.errors import InfeasiblePlan, SpecError
from elastic.planner.layout_choice import plan_layout
from elastic.planner.layout_space import Space
from elastic.planner.node_sets import LayoutLimits
from elastic.planner.offer_search import find_offers
from elastic.planner.offers import Aim
from elastic.types import Job, Layout, ModelProfile, Node, OptimizerSpec, TensorSpec
from elastic.worker.hosting.resume_checks import check_layouts

WHY = "layers.0 is used again by layers.3; give each its own weights"
MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=4,
)
SPEC = {"name": "j", "steps": 10, "global_batch": 4, "pools": [{"name": "p", "max_nodes": 4}]}


def closed(axis: str, model: ModelProfile = MODEL) -> ModelProfile:
    return replace(model, **{f"no_{axis}": WHY})  # type: ignore[arg-type]


def job(**changes: Any) -> Job:
    return Job(**({"global_batch": 4} | changes))


def nodes(*gpus: int) -> list[Node]:
    return [Node(f"n{i}", "p", g, "prepared") for i, g in enumerate(gpus)]


@pytest.mark.parametrize("axis", ["pp", "tp", "cp", "dp"])
@pytest.mark.parametrize("sizes", [(4, 4), (1, 1, 1), (8,), (2, 1)])
def test_auto_never_uses_it(axis: str, sizes: tuple[int, ...]) -> None:
    """8 workers on 4 samples: plain sharding does not go, something must be cut."""
    assert getattr(plan_layout(closed(axis), job(), nodes(*sizes)).layout, axis) == 1
    sample = LLAMA_8B.profile().sample
    model = closed(axis, replace(MODEL, sample=sample))
    for world in range(1, 9):
        assert all(
            getattr(shape, axis) == 1
            for shape in Space.of(model, job(), (8,), roomy=True, tight=True).shapes(world)
        )


def test_without_dp_only_other_axes_use_more_ranks() -> None:
    found = plan_layout(closed("dp"), job(global_batch=16), nodes(4)).layout
    assert found.world_size == 4 and found.dp == 1
    alone = replace(closed("dp"), no_pp=WHY, pipeline=False, tp_limit=1)
    choice = plan_layout(alone, job(), nodes(4))
    assert choice.layout == Layout() and choice.rejected[:2] == (f"no dp: {WHY}", f"no pp: {WHY}")


def test_blocks_are_computed_again_where_they_may_be() -> None:
    again = {"activation_checkpointing": "full"}
    model = replace(MODEL, sample=LLAMA_8B.profile().sample, no_pp_checkpointing=WHY)
    space = Space.of(model, job(), (8,), roomy=True, tight=True)
    assert space.modes(Layout(pp=2)) == ("none",)
    assert "full" in space.modes(Layout(dp_shard=2))
    assert not model.refusal(Layout(dp_shard=2, **again))  # type: ignore[arg-type]
    assert not model.refusal(Layout(pp=2))
    with pytest.raises(InfeasiblePlan, match=f"no activation_checkpointing with pp: {WHY}"):
        plan_layout(model, job(layout="pp=2", **again), nodes(4))


@pytest.mark.parametrize(
    ("axis", "layout"),
    [("pp", "pp=2"), ("tp", "tp=2"), ("cp", "cp=2"), ("dp", "dp_replicate=2"), ("pp", "auto,pp=2")],
)
def test_who_asks_for_it_is_told_why(axis: str, layout: str) -> None:
    with pytest.raises(InfeasiblePlan, match=f"no {axis}: {WHY}"):
        plan_layout(closed(axis), job(layout=layout), nodes(4))
    spec = job_of({**SPEC, "layout": layout}, Path("program.py"))
    with pytest.raises(SpecError, match=f"no {axis}: {WHY}") as error:
        check_layouts(spec, closed(axis))
    assert "Program.pipeline" not in str(error.value) and "\n" not in str(error.value)


def test_a_single_layout_that_computes_something_else_is_passed_over() -> None:
    plain = plan_layout(MODEL, job(), nodes(3)).layout
    limits = LayoutLimits(unusable={str(plain): "it computes something else"})
    choice = plan_layout(MODEL, job(), nodes(3), limits=limits)
    assert choice.layout != plain and f"{plain}: it computes something else" in choice.rejected
    with pytest.raises(InfeasiblePlan, match="it computes something else"):
        plan_layout(MODEL, job(layout=str(plain)), nodes(3), limits=limits)


@pytest.mark.parametrize("axis", ["pp", "tp", "dp"])
def test_offers_are_without_it(axis: str) -> None:
    kinds = [group(n_nodes=2), group("A100-80GB-SXM", n_nodes=1)]
    for pool in (kinds[:1], kinds):
        offers = find_offers(closed(axis, LLAMA_8B.profile()), JOB, pool, aim=Aim(n_best=20)).best
        assert offers and all(getattr(offer.layout, axis) == 1 for offer in offers)
    with pytest.raises(InfeasiblePlan, match="no dp: "):
        find_offers(
            closed("dp", LLAMA_70B.profile()), replace(JOB, layout="auto,dp_shard=8"), [group()]
        )


def test_plan_says_it_in_its_notes_and_refuses_what_is_asked_for() -> None:
    subject = of_model("8b", 8)
    subject = replace(
        subject,
        model=replace(
            closed("pp", subject.model), pipeline=False, notes=("dropout draws by rank",)
        ),
    )
    machines = [of_asked(gpus_of("H100:8")[0])]
    notes = notes_of(subject, machines)
    assert f"no pp: {WHY}" in notes and "dropout draws by rank" in notes
    with pytest.raises(SpecError, match=f"no pp: {WHY}"):
        check(subject.with_layout("pp=2"), machines)
