"""Which modules of a model are its repeated blocks."""

from __future__ import annotations

from torch import nn


def blocks_of(module: nn.Module) -> str:
    """The pattern of the repeated blocks: of the longest list of modules of one class with
    parameters, else 'layers.*'."""
    lists = {
        name: len(child)
        for name, child in module.named_modules()
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and _repeats(child)
    }
    longest = max(lists, key=lambda name: lists[name]) if lists else "layers"
    return f"{longest}.*" if longest else "*"  # the model itself is the list


def _repeats(blocks: nn.ModuleList | nn.Sequential) -> bool:
    return len({type(block) for block in blocks}) == 1 and all(
        next(block.parameters(), None) is not None for block in blocks
    )
