"""Random small models and layouts, and brute-force element sets of boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np

from elastic.reshard.pieces import Side
from elastic.reshard.rank_boxes import placements
from elastic.types import Box, Layout, ModelProfile, OptimizerSpec, OwnedEntry, TensorSpec, Transfer

OWNED = (OwnedEntry("begun", (2,), "uint8"), OwnedEntry("factor", (3, 3), "float32"))
Cut = tuple[Layout, tuple[int, ...]]
Element = tuple[str, tuple[int, ...]]


def random_model(random: Random, owners: bool = False) -> ModelProfile:
    """Odd sizes, dimensions smaller than the number of ranks, tied embeddings, buffers, scalars,
    frozen tensors. `owners`: some are stepped whole, each at its owner."""
    n_blocks = random.randint(1, 5)
    wide = random.randint(1, 7)
    specs = [
        TensorSpec(
            "embed.weight",
            (random.randint(1, 9), wide),
            "bfloat16",
            tp_dim=random.choice([0, 1, None]),
            block=-1,
        )
    ]
    for i in range(n_blocks):
        specs += [
            TensorSpec(
                f"layers.{i}.up", (random.randint(1, 11), wide), "float32", tp_dim=0, block=i
            ),
            TensorSpec(
                f"layers.{i}.down", (wide, random.randint(1, 11)), "float32", tp_dim=1, block=i
            ),
            TensorSpec(f"layers.{i}.norm", (wide,), "float32", block=i),
            TensorSpec(
                f"layers.{i}.frozen", (3, 2, 2), "float32", tp_dim=2, block=i, trainable=False
            ),
            TensorSpec(f"layers.{i}.cache", (4,), "float32", block=i, trainable=False, buffer=True),
            TensorSpec(f"layers.{i}.scale", (), "float32", block=i),
        ]
    specs.append(TensorSpec("void", (0, 3), "float32", block=n_blocks))
    tied = random.choice(["embed.weight", None])
    specs.append(
        TensorSpec(
            "head.weight", specs[0].shape, "bfloat16", specs[0].tp_dim, n_blocks, tied_to=tied
        )
    )
    adam = OptimizerSpec(("exp_avg",), ("step",))
    if owners:
        whole = random.choice([(".up",), (".up", ".norm", ".scale", "embed.weight")])
        specs = [replace(s, optimizer=int(s.fqn.endswith(whole))) for s in specs]
    optimizers = (adam, OptimizerSpec(owned=OWNED, form="{}")) if owners else (adam,)
    return ModelProfile(n_blocks, 0, tuple(specs), optimizers, tp_limit=4)


def random_cut(random: Random, n_blocks: int) -> Cut:
    pp, replicate, shard, cp, tp = (
        random.choice(sizes)
        for sizes in ([1, 1, 2, 3], [1, 2], [1, 2, 3, 4], [1, 1, 2], [1, 1, 2, 3])
    )
    pp = min(pp, n_blocks)
    layout = Layout(
        pp, replicate, shard, cp, tp, schedule=random.choice(["gpipe", "interleaved1f1b"])
    )
    # stages without blocks are allowed
    bounds = sorted(random.randint(0, n_blocks) for _ in range(layout.n_stages - 1))
    return layout, tuple(b - a for a, b in zip([0, *bounds], [*bounds, n_blocks]))


def random_move(random: Random, owners: bool = False) -> tuple[ModelProfile, Cut, Cut]:
    """A model, and how it is cut before and after."""
    model = random_model(random, owners)
    return model, random_cut(random, model.n_blocks), random_cut(random, model.n_blocks)


def elements(parts: Iterable[Box | Transfer]) -> Counter[Element]:
    """How often each element of each tensor lies in one of `parts`."""
    return Counter(
        (part.fqn, at)
        for part in parts
        for at in product(*(range(o, o + s) for o, s in zip(part.offsets, part.sizes)))
    )


def all_elements(specs: Iterable[TensorSpec]) -> Counter[Element]:
    return Counter((spec.fqn, at) for spec in specs for at in product(*map(range, spec.shape)))


def lost_tensor(model: ModelProfile, old: Cut, ranks: Collection[int]) -> str | None:
    """Name of the first tensor of which `ranks` of the old layout together do not hold every
    element, else None."""
    side, held = Side(model, old), sorted(ranks)
    for placed in placements(model):
        there = side.numbers(side.held(placed))[held]
        if any(not np.isin(column.numbers, there).all() for column in side.columns(placed)):
            return placed.spec.fqn
    return None
