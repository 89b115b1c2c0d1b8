"""A made-up training state, and checkpoints of it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from elastic.reshard.rank_boxes import owned_boxes, state_specs
from elastic.storage import Storage
from elastic.types import Box, Layout, ModelProfile, OptimizerSpec, TensorSpec
from elastic.worker.checkpoint.checkpoint_format import folder_of
from elastic.worker.checkpoint.checkpoint_index import CheckpointInfo, find, verify
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard

Cut = tuple[Layout, tuple[int, ...]]


MODEL = ModelProfile(
    3,
    0,
    (
        TensorSpec("embed", (9, 4), "bfloat16", tp_dim=0, block=-1),
        *(TensorSpec(f"layers.{i}.up", (7, 4), "float32", tp_dim=0, block=i) for i in range(3)),
        *(TensorSpec(f"layers.{i}.down", (4, 7), "float32", tp_dim=1, block=i) for i in range(3)),
        TensorSpec("norm", (2,), "float32", block=3),
        TensorSpec("mask", (3,), "bool", block=3, trainable=False, buffer=True),
        TensorSpec("void", (0, 4), "float32", block=3),
        TensorSpec("head", (9, 4), "bfloat16", tp_dim=0, block=3, tied_to="embed"),
    ),
    (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
)
CUTS: list[Cut] = [
    (Layout(), ()),
    (Layout(dp_shard=4), ()),
    (Layout(pp=2, dp_replicate=2, tp=2), (1, 2)),
    (Layout(pp=3, dp_shard=2, cp=2, tp=3), (2, 0, 1)),
]


def state(step: int = 1) -> dict[str, Tensor]:
    """Each tensor of the training state, every element another value."""
    out = {}
    for k, spec in enumerate(state_specs(MODEL)):
        values = (
            torch.arange(prod(spec.shape), dtype=torch.float64).reshape(spec.shape) + 100 * k + step
        )
        out[spec.fqn] = values.to(getattr(torch, spec.dtype))
    return out


def part(tensors: dict[str, Tensor], box: Box) -> Tensor:
    return tensors[box.fqn][tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]


def save(
    storage: Storage,
    cut: Cut,
    step: int = 1,
    *,
    generation: int = 1,
    epoch: int = 1,
    ordered: int = 0,
) -> str:
    tensors = state(step)
    for rank in range(cut[0].world_size):
        items = ((box, part(tensors, box)) for box in owned_boxes(MODEL, *cut, rank))
        n_bytes = write_shard(storage, step, generation, rank=rank, items=items, ordered=ordered)
        folder = folder_of(step, generation, ordered)
        assert n_bytes == storage.size(f"{folder}/__{rank}_0.distcp")
    return commit(
        storage,
        step,
        generation,
        world_size=cut[0].world_size,
        epoch=epoch,
        meta={"layers": cut[1], "layout": str(cut[0])},
        ordered=ordered,
    )


def find_valid(storage: Storage, deep: bool = True) -> tuple[CheckpointInfo | None, list[str]]:
    """The newest checkpoint in which nothing is wrong, and what is wrong with newer ones (each
    names a file).

    deep: every byte is read and compared with its digest; else presence, sizes and the index only.
    """
    problems: list[str] = []
    for found in find(storage, problems):
        wrong = verify(found.uri, deep)
        if not wrong:
            return found, problems
        problems += wrong
    return None, problems
