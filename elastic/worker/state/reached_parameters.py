"""Which parameters the backward passes of a step reach on this rank, and on any.

FSDP adds up the gradients of a module in one piece, for which all ranks must have the same
parameters: what a rank's samples do not reach, as an expert that gets none of its tokens, counts as
zeros. What no rank reaches has no gradient, as in one process: an optimizer leaves it as it is, and
would let zeros decay it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic.worker.program.calls import tensors_in

FILLS = "set_reduce_scatter_unused_params"  # of FSDPModule, from torch 2.13 on
REDUCES = "RegisterPostBackwardFunctionBackward"  # of what FSDP calls a module with


class ReachedParameters:
    """`parameters`: those of this rank's `models`, by canonical name, as FSDP has cut them;
    `names`: all of them whose gradients several ranks add up, on every rank in the same order; none
    where a rank has them for itself. `kept`: FSDP keeps gradients from one microbatch to the next
    in a type of their own, to which it would add zeros of another."""

    def __init__(
        self,
        models: Iterable[nn.Module],
        parameters: Mapping[str, nn.Parameter],
        *,
        names: Sequence[str],
        kept: bool = False,
    ) -> None:
        self.names = tuple(names)
        self._reached: set[str] = set()
        # which FSDP has not gathered yet, so that nobody sees their gradients
        self._unseen = {fqn for fqn in names if fqn in parameters}
        known = {id(parameters[fqn]): fqn for fqn in self._unseen}
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, FSDPModule) and (places := [*_places(module, known)]):
                here = self._gathered(module, places)
                if hasattr(module, FILLS) and not kept:
                    getattr(module, FILLS)(True, recurse=False)
                else:
                    fill_with_zeros(module, here)

    def begin(self) -> None:
        """A step begins."""
        self._reached.clear()

    @property
    def flags(self) -> list[float]:
        """For each name, 1 where a gradient has come to it since `begin`."""
        return [float(fqn in self._reached or fqn in self._unseen) for fqn in self.names]

    def without(
        self, gradients: Mapping[str, torch.Tensor], unreached: Collection[int]
    ) -> Mapping[str, torch.Tensor]:
        """The gradients but of those (their numbers in `names`) that no rank has reached."""
        left = {self.names[number] for number in unreached}
        return {fqn: g for fqn, g in gradients.items() if fqn not in left} if left else gradients

    def _gathered(
        self, module: nn.Module, places: Iterable[tuple[nn.Module, str, str]]
    ) -> list[nn.Parameter]:
        """What FSDP gathers for `module`, in the first forward pass and from then on in the same
        tensors; empty before. `places`: modules, the names there, canonical names."""
        here: list[nn.Parameter] = []

        def once(*_: Any) -> None:
            handle.remove()
            for owner, name, fqn in places:
                here.append(owner.get_parameter(name))
                here[-1].register_hook(partial(self._note, fqn))
                self._unseen.discard(fqn)

        handle = module.register_forward_pre_hook(once)
        return here

    def _note(self, fqn: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._reached.add(fqn)


def _places(module: nn.Module, known: Mapping[int, str]) -> Iterator[tuple[nn.Module, str, str]]:
    """Of the parameters in it that no module inside gathers for itself. `known`: id -> name."""
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in known:
            yield module, name, known[id(parameter)]
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _places(child, known)


def fill_with_zeros(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """The gradients of these, which FSDP gathers for `module`, where a backward pass brings none.

    FSDP reduces them, or keeps them, when the gradient of what the module was called with is there:
    they are filled up right before. Where that asks for no gradient, as a model's own input, FSDP
    does so when all of the pass has ended, and they begin as zeros."""

    def fill(*_: Any) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def asking(value: Any) -> list[torch.Tensor]:
        return [x for x in tensors_in(value) if x.requires_grad] if torch.is_grad_enabled() else []

    def before(_: nn.Module, args: Any, keywords: Any) -> None:
        for x in asking((args, keywords)):
            # not so where it is computed again, within the backward pass
            if x.grad_fn is not None and x.grad_fn.name() == REDUCES:
                x.register_hook(fill)

    def behind(_: nn.Module, *called: Any) -> None:
        *given, output = called
        for x in asking(output) if not asking(given) else ():
            x.register_hook(fill)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(behind, with_kwargs=True)
