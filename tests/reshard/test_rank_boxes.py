"""Boxes: who holds what, cut as torch.chunk cuts, owned exactly once."""

from __future__ import annotations

from random import Random

import pytest
import torch
from support.reshard.reshard_cases import OWNED, all_elements, elements, random_cut, random_model

from elastic.errors import SpecError
from elastic.reshard.rank_boxes import boxes, chunk, owned_boxes, state_specs
from elastic.types import Box, Layout, ModelProfile, OptimizerSpec, TensorSpec
from elastic.types.grid import coordinates


def model_of(*specs: TensorSpec, n_blocks: int = 2) -> ModelProfile:
    return ModelProfile(n_blocks, 0, specs, (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),))


def names(found: tuple[Box, ...]) -> list[str]:
    return [box.fqn for box in found]


def test_state_specs_names_every_tensor_of_the_training_state() -> None:
    model = model_of(
        TensorSpec("embed", (4, 2), "bfloat16", tp_dim=0, block=-1),
        TensorSpec("frozen", (3,), "float32", block=0, trainable=False),
        TensorSpec("table", (3,), "int64", block=1, buffer=True),
        TensorSpec("head", (4, 2), "bfloat16", tp_dim=0, block=2, tied_to="embed"),
    )
    specs = {spec.fqn: spec for spec in state_specs(model)}
    assert list(specs) == [
        "model.embed", "optim.exp_avg.embed", "optim.exp_avg_sq.embed", "optim.step.embed",
        "model.frozen", "model.table", "elastic.rng",
    ]  # fmt: skip
    moment, step, rng = (
        specs["optim.exp_avg.embed"],
        specs["optim.step.embed"],
        specs["elastic.rng"],
    )
    assert (moment.shape, moment.tp_dim, moment.block, moment.dtype) == ((4, 2), 0, -1, "bfloat16")
    assert (step.shape, step.dtype, step.block) == ((), "float32", -1)
    assert (rng.shape, rng.dtype, rng.block) == ((2,), "int64", None)


@pytest.mark.parametrize("size", range(8))
@pytest.mark.parametrize("n", range(1, 6))
def test_chunk_is_torch_chunk(size: int, n: int) -> None:
    parts = [part.tolist() for part in torch.arange(size).chunk(n)]
    parts += [[]] * (n - len(parts))
    assert [
        list(range(start, start + length))
        for start, length in (chunk(size, n, i) for i in range(n))
    ] == parts


@pytest.mark.parametrize("seed", range(30))
def test_boxes_are_the_chunks_of_torch(seed: int) -> None:
    """tp first, then fsdp on dimension 0 of the tp part, as fully_shard cuts what
    parallelize_module has cut."""
    random = Random(seed)
    model = random_model(random, owners=seed % 2 > 0)
    layout, layers = random_cut(random, model.n_blocks)
    specs = {spec.fqn: spec for spec in state_specs(model)}
    for rank in range(layout.world_size):
        at = coordinates(layout, rank)
        for box in boxes(model, layout, layers, rank):
            spec = specs[box.fqn]
            whole = torch.arange(torch.Size(spec.shape).numel()).reshape(spec.shape)
            part = whole
            at_owner = any(box.fqn.startswith(f"optim.{one.name}.") for one in OWNED)
            if spec.shape and not spec.buffer and not at_owner:
                if spec.tp_dim is not None:
                    part = part.chunk(layout.tp, spec.tp_dim)[at.tp]
                part = part.chunk(layout.dp_shard * layout.cp, 0)[at.fsdp(layout)]
            window = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))
            assert torch.equal(whole[window], part), box


@pytest.mark.parametrize("seed", range(60))
def test_owned_boxes_are_a_partition_of_the_state(seed: int) -> None:
    random = Random(seed)
    model = random_model(random, owners=seed % 2 > 0)
    layout, layers = random_cut(random, model.n_blocks)
    ranks = range(layout.world_size)
    assert elements(
        box for r in ranks for box in owned_boxes(model, layout, layers, r)
    ) == all_elements(state_specs(model))
    for rank in ranks:
        assert set(owned_boxes(model, layout, layers, rank)) <= set(
            boxes(model, layout, layers, rank)
        )
        assert all(box.n_elements for box in boxes(model, layout, layers, rank))


def test_stages_hold_their_blocks_and_what_is_tied_to_them() -> None:
    model = ModelProfile(
        3,
        0,
        (
            TensorSpec("embed", (4,), "float32", block=-1),
            *(TensorSpec(f"layers.{i}", (4,), "float32", block=i) for i in range(3)),
            TensorSpec("norm", (4,), "float32", block=3),
            TensorSpec("head", (4,), "float32", block=3, tied_to="embed"),
        ),
    )
    layout, layers = Layout(pp=3), (2, 0, 1)
    held = [names(boxes(model, layout, layers, rank)) for rank in range(3)]
    assert held[0] == ["model.embed", "model.layers.0", "model.layers.1", "elastic.rng"]
    assert held[1] == ["elastic.rng"]
    assert held[2] == ["model.embed", "model.layers.2", "model.norm", "elastic.rng"]
    owned = [names(owned_boxes(model, layout, layers, rank)) for rank in range(3)]
    assert owned[2] == ["model.layers.2", "model.norm"] and owned[1] == []


def test_several_stages_per_rank() -> None:
    """Rank p of the pp axis has the stages p and p + pp."""
    specs = [TensorSpec(f"layers.{i}", (4,), "float32", block=i) for i in range(5)]
    model = model_of(*specs, TensorSpec("head", (4,), "float32", block=5), n_blocks=5)
    layout, layers = Layout(pp=2, schedule="interleaved1f1b"), (2, 1, 1, 1)
    held = [
        [name for name in names(boxes(model, layout, layers, rank)) if name.startswith("model.")]
        for rank in range(2)
    ]
    assert held[0] == ["model.layers.0", "model.layers.1", "model.layers.3"]
    assert held[1] == ["model.layers.2", "model.layers.4", "model.head"]
    with pytest.raises(
        SpecError, match=r"pp=2 with 4 stages and 5 blocks; 4 numbers with the sum 5 are needed"
    ):
        boxes(model, layout, (3, 2), 0)


def test_late_ranks_have_no_box_of_a_short_tensor() -> None:
    model = model_of(TensorSpec("short", (5, 3), "float32", block=0), n_blocks=1)
    held = [
        [b.sizes for b in boxes(model, Layout(dp_shard=4), (), r) if b.fqn == "model.short"]
        for r in range(4)
    ]
    assert held == [[(2, 3)], [(2, 3)], [(1, 3)], []]


@pytest.mark.parametrize("layers", [(), (1, 1), (3,), (2, 2), (4, -1)])
def test_layers_that_do_not_fit_are_refused(layers: tuple[int, ...]) -> None:
    model = model_of(TensorSpec("w", (2,), "float32", block=0), n_blocks=3)
    with pytest.raises(SpecError, match="3 blocks"):
        boxes(model, Layout(pp=2), layers, 0)


def test_tied_to_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(SpecError, match="head is tied to embed"):
        state_specs(model_of(TensorSpec("head", (2,), "float32", tied_to="embed")))
