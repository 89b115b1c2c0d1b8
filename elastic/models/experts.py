"""Experts whose weights lie stacked in one module, and how ranks share them out (`ep`).

Such a module is called with (hidden [tokens, hidden], index [tokens, k], weights [tokens, k]) and
gives for each token the sum over its k experts of weight times what the expert makes of it; all of
its own parameters have the expert as dimension 0. transformers (from 5 on) has all of its mixtures
in this form; `Experts` and `Mixture` are one in plain torch.

With ep > 1 a rank holds an equal share of the experts. Each token is sent to the ranks that have
its experts, and what these make of it comes back and is added up in the router's order, so that a
token's sum does not depend on the layout. No token is left out, whatever the router chooses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.errors import ProgramError
from elastic.program import pattern_regex

COUNTS = ("num_experts", "n_experts", "num_local_experts")  # attributes that say how many there are


def expert_modules(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, int]:
    """Name of each module of stacked experts -> how many it has; by `patterns`, or else by what the
    module looks like. Raises ProgramError where a pattern names anything else."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if patterns and not any(pattern_regex(pattern).match(name) for pattern in patterns):
            continue
        own = [tuple(p.shape) for p in module.parameters(recurse=False)]
        n = next((shape[0] for shape in own if len(shape) == 3), 0)
        whole = len(own) == sum(1 for _ in module.parameters())
        stacked = bool(n) and whole and all(shape and shape[0] == n for shape in own)
        if patterns and not (stacked and _takes_three(module)):
            raise ProgramError(
                f"Program.experts names {name}, a {type(module).__name__}: its parameters must "
                "all have the expert as dimension 0, one of them three dimensions, and its "
                "forward must take (hidden, index, weights)"
            )
        told = n in {getattr(module, attribute, None) for attribute in COUNTS}
        if stacked and (patterns or (told and _takes_three(module))):
            found[name] = n
    return found


def _takes_three(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind(None, None, None)
    except TypeError:
        return False
    return True


class Experts(nn.Module):
    """SwiGLU experts, stacked: w1 is the gate, w3 goes up, w2 comes down."""

    def __init__(self, hidden: int, ffn: int, n: int) -> None:
        super().__init__()
        self.n_experts = n
        self.w1 = nn.Parameter(torch.empty(n, hidden, ffn))
        self.w3 = nn.Parameter(torch.empty(n, hidden, ffn))
        self.w2 = nn.Parameter(torch.empty(n, ffn, hidden))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, k], [tokens, k] -> [tokens, hidden]."""
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=self.n_experts).cumsum(0).int()
        rows = hidden[order // index.shape[-1]]
        gate, up = F.grouped_mm(rows, self.w1, offs=ends), F.grouped_mm(rows, self.w3, offs=ends)
        found = F.grouped_mm(F.silu(gate) * up, self.w2, offs=ends)
        found = found[order.argsort()].view(*index.shape, -1)
        return (found * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)


class Mixture(nn.Module):
    """A router, the experts that it chooses `top_k` of for each token, and what every token goes
    through besides (`shared`)."""

    def __init__(
        self, hidden: int, ffn: int, n: int, *, top_k: int, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(hidden, n, bias=False)
        self.experts = Experts(hidden, ffn, n)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        scores = self.gate(rows).float().softmax(-1)
        weights, index = scores.topk(self.top_k)
        out = self.experts(rows, index, weights / weights.sum(-1, keepdim=True))
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.view_as(x)


# --------------------------------------------------------------------------------- over several ranks


def share_out(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Leaves the module, on the meta device, this rank's share of the experts. Its forward pass
    gives what it gave."""
    n_ranks, (n, *_) = group.size(), next(module.parameters()).shape
    mine = n // n_ranks
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = torch.empty((mine, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
        setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    for attribute in COUNTS:
        if getattr(module, attribute, None) == n:
            setattr(module, attribute, mine)
    module.forward = TokenExchange(module.forward, n, group)


class TokenExchange:
    """The forward pass of a module that has a share of `n` experts. `rows`: tokens that came to
    this rank's experts so far."""

    def __init__(
        self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], n: int, group: dist.ProcessGroup
    ) -> None:
        self.experts, self.n, self.group = experts, n, group
        self.rows = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, k], [tokens, k] -> [tokens, hidden]."""
        if hidden.is_meta:  # only shapes are asked for
            return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        found = self._each(hidden[order // index.shape[-1]], chosen)
        found = found[order.argsort()].view(*index.shape, -1)
        return (found * weights.unsqueeze(-1)).sum(-2).to(hidden.dtype)

    def _each(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """What its expert makes of each row; rows are in the order of their experts."""
        n_ranks = self.group.size()
        sent = torch.bincount(chosen, minlength=self.n)
        came = sent.clone()  # in a rehearsal nothing comes: as many as were sent, then
        dist.all_to_all_single(came, sent, group=self.group)
        sends, comes = torch.stack((sent, came)).view(2, n_ranks, -1).sum(-1).tolist()
        here: Tensor = _Exchange.apply(rows, sends, comes, self.group)  # type: ignore[no-untyped-call]
        mine = torch.arange(self.n // n_ranks, device=chosen.device).repeat(n_ranks)
        expert = mine.repeat_interleave(came, output_size=len(here))
        self.rows += len(here)
        if not len(here):  # each rank has to give all weights a gradient
            here, expert = F.pad(here, (0, 0, 0, 1)), expert.new_zeros(1)
        made = self.experts(here, expert.unsqueeze(-1), here.new_ones(len(here), 1))
        back: Tensor = _Exchange.apply(made[: sum(comes)], comes, sends, self.group)  # type: ignore[no-untyped-call]
        return back


class _Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for; `sends[i]` to rank i of the group, `comes[i]` from it.
    Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], comes: list[int], group: Any) -> Tensor:
        ctx.back = comes, sends, group
        return _exchange(rows, sends, comes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(rows: Tensor, sends: list[int], comes: list[int], group: Any) -> Tensor:
    found = rows.new_empty((sum(comes), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), comes, sends, group=group)
    return found
