"""What the planner says that a rank stores is at least what the largest rank has."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from elastic.planner.cost.memory import state_parts
from elastic.planner.cost.model_cost import ModelCost
from elastic.reshard.rank_boxes import boxes
from elastic.types import DTYPE_BYTES, Layout, ModelProfile, OptimizerSpec, TensorSpec, parse_layout

N, H, VOCAB = 4, 64, 512
ADAM = OptimizerSpec(("exp_avg", "exp_avg_sq"))


def model_of(plan: dict[str, int], **more: int) -> ModelProfile:
    """A decoder; `plan`: which of its matrices tp cuts along which dimension."""
    shapes = {"qkv": (3 * H, H), "out": (H, H), "up": (4 * H, H), "down": (H, 4 * H)}

    def spec(name: str, shape: tuple[int, ...], block: int) -> TensorSpec:
        cut = plan.get(name.rpartition(".")[2])
        return TensorSpec(name, shape, "float32", cut, block)

    specs = [spec("embed", (VOCAB, H), -1)]
    for i in range(N):
        specs += [spec(f"layers.{i}.{name}", shape, i) for name, shape in shapes.items()]
    specs.append(spec("head", (VOCAB, H), N))
    n_params = sum(prod(one.shape) for one in specs)
    return ModelProfile(N, n_params, tuple(specs), (ADAM,), tp_limit=8, **more)


def stored(model: ModelProfile, layout: Layout) -> int:
    """On the rank that has most."""
    layers = (N // layout.n_stages,) * layout.n_stages
    return max(
        sum(
            prod(box.sizes) * DTYPE_BYTES[box.dtype]
            for box in boxes(model, layout, layers, rank)
            if box.fqn != "elastic.rng"
        )
        for rank in range(layout.world_size)
    )


def planned(model: ModelProfile, layout: Layout) -> float:
    parts = state_parts(ModelCost.of(model), layout, 1.0)
    return parts["parameters"] + parts["optimizer"]


def with_experts(n: int) -> ModelProfile:
    """In each block, stacked: one of the MLP's size each."""
    model = model_of({})
    specs = [
        replace(spec, shape=(n, *spec.shape), by_expert=True)
        if spec.fqn.endswith(("up", "down"))
        else spec
        for spec in model.specs
    ]
    in_experts = sum(prod(spec.shape) for spec in specs if spec.by_expert)
    n_params = sum(prod(spec.shape) for spec in specs)
    return replace(
        model, specs=tuple(specs), n_params=n_params, n_expert_params=in_experts, n_experts=n
    )


ATTENTION = {"qkv": 0, "out": 1}
ALL = ATTENTION | {"up": 0, "down": 1, "embed": 0, "head": 0}
LAYOUTS = ("tp=8", "tp=2", "dp_shard=4,tp=4", "pp=2,tp=4", "pp=4,dp_shard=2,tp=2", "dp_shard=8")


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("plan", [{}, ATTENTION, ALL], ids=["none", "attention", "all"])
def test_what_the_plan_for_tp_does_not_cut_is_whole_on_each_rank(
    plan: dict[str, int], text: str
) -> None:
    model, layout = model_of(plan), parse_layout(text)
    assert planned(model, layout) == pytest.approx(stored(model, layout))


def test_a_tied_matrix_is_cut_as_its_own_name_says() -> None:
    model = model_of(ATTENTION | {"embed": 0})
    tied = replace(model.specs[-1], tied_to="embed")
    model = replace(model, specs=(*model.specs[:-1], tied), n_params=model.n_params - VOCAB * H)
    for layout in (Layout(tp=8), Layout(pp=2, tp=4)):
        assert planned(model, layout) == pytest.approx(stored(model, layout))


def test_without_tensors_tp_is_taken_to_cut_all() -> None:
    model = replace(model_of({}), specs=())
    assert planned(model, Layout(tp=8)) == pytest.approx(planned(model, Layout()) / 8)


@pytest.mark.parametrize(
    ("n", "text", "most"),
    [
        (8, "dp_shard=64", 1 / 8),  # 8 ranks have one expert of a block each, 56 none
        (12, "dp_shard=8", 2 / 12),  # 6 ranks have two each
        (8, "dp_shard=4", 1 / 4),
        (8, "dp_shard=4,tp=2", 1 / 4),  # tp cuts no stacked experts
        (8, "dp_shard=16,ep=4", 1 / 8),  # of two each, that four ranks have, two hold one
        (8, "dp_shard=8,tp=2,ep=8", 1 / 8),
    ],
)
def test_stacked_experts_are_cut_between_two(n: int, text: str, most: float) -> None:
    model, layout = with_experts(n), parse_layout(text)
    assert planned(model, layout) == pytest.approx(stored(model, layout))
    experts = 3 * 4 * model.n_expert_params * most  # with Adam's entries
    assert (
        experts
        < planned(model, layout)
        < experts + 3 * 4 * (model.n_params - model.n_expert_params)
    )


def test_what_is_gathered_of_experts_has_the_padding_of_the_last_parts() -> None:
    """Each of 64 ranks gives as much as the first one has: one expert."""
    work = ModelCost.of(with_experts(8))
    few, many = (state_parts(work, Layout(dp_shard=n), 1.0)["gathered"] for n in (8, 64))
    assert many - few == pytest.approx(2 * work.experts.total * (64 / 8 - 1))
