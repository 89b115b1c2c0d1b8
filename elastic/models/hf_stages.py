"""Models of transformers as pipeline stages: their own forward, with modules of other stages passed
through.

A later stage is called with the hidden state in the place of embedded tokens (`inputs_embeds`);
masks and rotary positions are computed on each stage again. Whether a model can be cut so is tried:
without its blocks, embeddings, norm and head its forward must release exactly what it is called
with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PROBE_TOKENS = 3


class _Through(nn.Module):
    """Gives its first argument back."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class _Nothing(nn.Module):
    """In the place of an embedding of positions: what is added to the hidden state is 0."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=x.device)


def stage_factory(model: nn.Module, blocks: str) -> Callable[[nn.Module, int, int], nn.Module]:
    """Program.stage of a model that `passes_through`. `model`: on the meta device, uncut."""
    nothing, through = _before_blocks(model, blocks)

    def stage(module: nn.Module, index: int, n_stages: int) -> nn.Module:
        if index > 0:
            _replace(module, nothing, _Nothing)
            _replace(module, through, _Through)
        own = module.forward
        name = "inputs_embeds" if index else "input_ids"

        def forward(x: Tensor, **named: Any) -> Any:
            out = own(**{name: x}, **named).logits
            return out if index == n_stages - 1 else out.clone()  # no view, which FSDP2 warns of

        module.forward = forward  # of this module only
        return module

    return stage


def passes_through(model: nn.Module, blocks: str) -> bool:
    """Does the model without what the first and the last stage have, and without blocks, release
    its `inputs_embeds`?"""
    config: Any = model.config
    hidden = getattr(config.get_text_config(), "hidden_size", None)
    if not isinstance(hidden, int):
        return False
    shell = copy.deepcopy(model)
    nothing, through = _before_blocks(shell, blocks)
    names = {
        name.rpartition(".")[0]
        for name, _ in shell.named_parameters(remove_duplicate=False)
        if not _inside(name, blocks)
    }
    names |= {name for name, _ in shell.named_modules() if _is_block(name, blocks)}
    _replace(shell, sorted((names | set(through)) - set(nothing)), _Through)
    _replace(shell, nothing, _Nothing)
    shell.to_empty(device="cpu")
    if next(shell.parameters(), None) is not None or not fill_plain_buffers(shell):
        return False
    x = torch.linspace(-1.0, 1.0, PROBE_TOKENS * hidden).view(1, PROBE_TOKENS, hidden)
    try:
        with torch.no_grad():
            found = shell(inputs_embeds=x).logits
    except (
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        KeyError,
    ):  # its forward wants more
        return False
    return isinstance(found, Tensor) and torch.equal(found, x)


def fill_plain_buffers(model: nn.Module) -> bool:
    """Program.buffers: values of buffers that no checkpoint holds, as transformers' own
    initialization gives them. False where it gives none for one of them."""
    kept = set(model.state_dict())
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name not in kept}
    for owner in owners:
        module = model.get_submodule(owner)
        if next(module.parameters(recurse=False), None) is not None:
            return False  # its parameters would be initialized too
        plain = [
            buffer
            for name, buffer in module.named_buffers(recurse=False)
            if f"{owner}.{name}".lstrip(".") not in kept
        ]
        if not all(buffer.is_floating_point() for buffer in plain):
            return False
        with torch.no_grad():
            for buffer in plain:
                buffer.fill_(float("nan"))
            model._init_weights(module)  # type: ignore[operator]
        if any(bool(buffer.isnan().any()) for buffer in plain):
            return False
    return True


# ------------------------------------------------------------------------------------------ modules


def _before_blocks(model: nn.Module, blocks: str) -> tuple[list[str], list[str]]:
    """Outside of the blocks: embeddings besides that of the tokens, and what has no parameters but
    drops."""
    tokens = model.get_input_embeddings()  # type: ignore[operator]
    outside = [
        (name, module)
        for name, module in model.named_modules()
        if name and not _inside(name, blocks)
    ]
    nothing = [
        name
        for name, module in outside
        if isinstance(module, nn.Embedding) and module is not tokens
    ]
    return nothing, [name for name, module in outside if isinstance(module, nn.Dropout)]


def _is_block(name: str, blocks: str) -> bool:
    return (
        name.rpartition(".")[0] == blocks.removesuffix(".*") and name.rpartition(".")[2].isdigit()
    )


def _inside(name: str, blocks: str) -> bool:
    first = blocks.removesuffix("*")
    return name.startswith(first) and name != first


def _replace(model: nn.Module, names: list[str], kind: type[nn.Module]) -> None:
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, kind())
