"""What stands for a large model and a large dataset: a few blocks of each kind with weights drawn
at random, samples from all over, the first positions of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.worker.equivalence.forward_trace import Batch

TRIED = 16  # samples that are looked at for unequal ones
PERTURBED = 0.05  # standard deviation of what is added to each weight, of its own or of 1


def kept_blocks(blocks: Sequence[nn.Module], n: int) -> list[int]:
    """Indices, in order: the first of each kind, then others from the front, the end and the
    middle, up to `n`.

    Blocks are of one kind whose modules, parameters and settings are of equal classes, shapes and
    values. A setting that is another in each block (its number) makes no kind."""
    settings = [_settings(block) for block in blocks]
    counts: dict[Any, set[Any]] = {}
    for one in settings:
        for key, value in one.items():
            counts.setdefault(key, set()).add(value)
    numbers = {key for key, values in counts.items() if len(values) == len(blocks)}
    first: dict[Any, int] = {}
    for i, (block, mine) in enumerate(zip(blocks, settings, strict=True)):
        kind = (
            _shapes(block),
            frozenset((key, value) for key, value in mine.items() if key not in numbers),
        )
        first.setdefault(kind, i)
    kept = set(first.values())
    last = len(blocks) - 1
    for i in (0, last, last // 2, *range(len(blocks))):
        if len(kept) < n:
            kept.add(i)
    return sorted(kept)


def _shapes(block: nn.Module) -> tuple[Any, ...]:
    tree = tuple((name, type(module)) for name, module in block.named_modules())
    weights = tuple(
        (name, tuple(p.shape), p.requires_grad)
        for name, p in block.named_parameters(remove_duplicate=False)
    )
    return tree, weights, tuple((name, tuple(b.shape)) for name, b in block.named_buffers())


def _settings(block: nn.Module) -> dict[Any, Any]:
    """Plain values that its modules keep."""
    return {
        (name, key): (type(value), value)
        for name, module in block.named_modules()
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, bool | int | float | str | None)
    }


def spread_samples(dataset: Any, n: int) -> list[dict[str, Any]]:
    """Samples from all over a dataset of at least `n`, unequal ones where they are found."""
    from elastic.data.batches import item_of

    unequal: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for index in dict.fromkeys((*_spread(len(dataset), n), *_spread(len(dataset), TRIED))):
        item = dict(item_of(dataset, index, None))
        (others if any(_same(item, one) for one in unequal) else unequal).append(item)
        if len(unequal) == n:
            break
    return (unequal + others)[:n]


def _spread(size: int, n: int) -> list[int]:
    """Of each part of the dataset one, each at another place of it: what repeats with a period is
    seen too."""
    step = size / n
    return sorted({min(size - 1, int(i * step) + (i if step > n else 0)) for i in range(n)})


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[k]), np.asarray(other[k])) for k in one
    )


def positions(batch: Batch) -> int:
    return max((x.shape[1] for x in batch.values() if x.ndim == 2), default=0)


def first_positions(batch: Batch, most: int) -> Batch:
    n = positions(batch)
    return {key: x[:, :most] if x.ndim > 1 and x.shape[1] == n else x for key, x in batch.items()}


def converted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Complex numbers stay complex."""
    plural = torch.complex128 if dtype == torch.float64 else torch.complex64
    changed: nn.Module = model._apply(
        lambda x: x.to(plural if x.is_complex() else dtype if x.is_floating_point() else x.dtype)
    )
    return changed


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights as fresh modules of their kinds have them, where these say so; else of a usual
    size."""
    torch.manual_seed(0)
    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
            continue
        for name, p in module.named_parameters(recurse=False):
            p.normal_(std=p[0].numel() ** -0.5) if p.ndim > 1 else p.fill_(
                1.0 if name.endswith("weight") else 0.0
            )


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """So that no weight is 0 by design and none equals another."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            size = float(p.abs().mean()) or 1.0
            p.add_(
                torch.randn(p.shape, generator=generator).to(p.dtype)
                * (PERTURBED * size if p.ndim else 0.01 * size)
            )
