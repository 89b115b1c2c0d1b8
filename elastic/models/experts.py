"""Experts whose weights lie stacked in one module, and how ranks share them out (`ep`).

Such a module is called with (hidden [tokens, hidden], index [tokens, k], weights [tokens, k]) and
gives for each token the sum over its k experts of weight times what the expert makes of it; all of
its own parameters have the expert as dimension 0. transformers (from 5 on) has all of its mixtures
in this form; `Experts` and `MixtureOfExperts` are one in plain torch.

With ep > 1 a rank holds an equal share of the experts. Each token is sent to the ranks that have
its experts, and what these make of it comes back and is added up in the router's order, so that a
token's sum does not depend on the layout. No token is left out, whatever the router chooses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from elastic.errors import ProgramError
from elastic.models.attention import where
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
    """SwiGLU experts, stacked: w1 is the gate, w3 goes up, w2 comes down. For a router of your own:
    called with hidden [tokens, `hidden`], index and weights [tokens, k], it gives [tokens,
    `hidden`]. `ffn`: the width of each of the `n` experts."""

    def __init__(self, hidden: int, ffn: int, n: int) -> None:
        super().__init__()
        self.n_experts = n
        self.w1 = nn.Parameter(torch.empty(n, hidden, ffn))
        self.w3 = nn.Parameter(torch.empty(n, hidden, ffn))
        self.w2 = nn.Parameter(torch.empty(n, ffn, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's matrices as those of nn.Linear."""
        for weight in self.parameters():
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, k], [tokens, k] -> [tokens, hidden]."""
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        ends = tokens_each(chosen, self.n_experts).cumsum(0).int()
        rows = hidden[order // index.shape[-1]]
        gate, up = products(rows, self.w1, ends), products(rows, self.w3, ends)
        found = products(F.silu(gate) * up, self.w2, ends)
        return combined(found, order, weights).to(hidden.dtype)


def tokens_each(chosen: Tensor, n: int) -> Tensor:
    """int64 [n]: how often each expert is chosen. torch.bincount does not run on the meta
    device."""
    return chosen.new_zeros(n).scatter_add_(0, chosen, torch.ones_like(chosen))


def products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[rows, k] x [n, k, m] -> [rows, m]: the rows up to ends[i] with the i-th matrix. Grouped
    where torch has that (numbers of at most 32 bits, in rows of a multiple of 16 bytes)."""
    if rows.is_meta:  # where torch knows of these in bfloat16 only
        if any(size % 8 for size in weights.shape[1:]):
            return rows @ weights[0]
        return F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ends).to(rows.dtype)
    whole = all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    old = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0)
    if whole and not old and rows.element_size() <= 4:
        return F.grouped_mm(rows, weights, offs=ends)
    parts = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def combined(found: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """What the experts made [tokens x k, hidden], as the choices were sorted by `order`, weighted
    and added up in the router's order: [tokens, hidden]."""
    each = found[order.argsort()].view(*weights.shape, found.shape[-1])
    out: Tensor = (each * weights.unsqueeze(-1)).sum(-2)
    return out


class MixtureOfExperts(nn.Module):
    """A router, the experts that it chooses `top_k` of for each token, and what every token goes
    through besides (`shared`). Takes and gives [..., `hidden`]; `ffn`: the width of each of the `n`
    experts.

    `balance`: the factor of a loss of each sequence that is least where all experts are chosen
    equally often (DeepSeek-V3, 2024, equations 17 to 20), times its positions: it goes with a loss
    that is a sum over them. It has gradients only: the loss that is reported is without it. As a
    sum over sequences it is the same in every layout; a rank that has a part of one (cp) cannot
    know it. `bias_rate`: no loss at all (Wang et al. 2024): an expert is chosen by its score and a
    bias, and in each step that is applied the bias of one that more tokens went to than the mean
    falls by so much, that of others rises."""

    expert_bias: Tensor

    def __init__(
        self, hidden: int, ffn: int, n: int, *, top_k: int, shared: nn.Module | None = None,
        balance: float = 0.0, bias_rate: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.top_k, self.balance, self.bias_rate = top_k, balance, bias_rate
        self.gate = nn.Linear(hidden, n, bias=False)
        self.experts = Experts(hidden, ffn, n)
        self.shared = shared
        self.loss_scale = 1.0  # of the step under way
        if bias_rate:
            self.register_buffer("expert_bias", torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        scores = self.gate(x).float().softmax(-1)
        index = (scores + self.expert_bias if self.bias_rate else scores).topk(self.top_k)[1]
        weights = scores.gather(-1, index)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = x.reshape(-1, x.shape[-1])
        chosen, by = index.flatten(0, -2), weights.flatten(0, -2)
        out: Tensor = self.experts(rows, chosen, by).view(x.shape)
        if self.balance and torch.is_grad_enabled():
            more = self._unbalanced(scores, index)
            out = _WithLoss.apply(out, more, self.loss_scale)  # type: ignore[no-untyped-call]
        return out + self.shared(x) if self.shared is not None else out

    def _unbalanced(self, scores: Tensor, index: Tensor) -> Tensor:
        """Summed over the sequences: dimension -2 of `scores`."""
        if where()[1] > 1:
            raise ProgramError(
                "MixtureOfExperts(balance=...) is a loss of whole sequences, and with cp a rank "
                "has parts of them; take bias_rate in its place, or cp=1"
            )
        n, length = scores.shape[-1], scores.shape[-2]
        chosen = torch.zeros_like(scores).scatter_(-1, index, n / self.top_k).mean(-2)
        return self.balance * length * (chosen * scores.mean(-2)).sum()

    @torch.no_grad()
    def rebalance(self, counts: Tensor) -> None:
        """By the tokens of a step that went to each expert, of all ranks."""
        share = counts.float()
        self.expert_bias.add_(torch.sign(share.mean() - share), alpha=self.bias_rate)


class _WithLoss(torch.autograd.Function):
    """Hands `out` on; the gradient of a loss that is nowhere added up begins here."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.begin = torch.full_like(loss, scale)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.begin, None


class TokenCounts:
    """How many tokens of a step each expert was chosen for, of the mixtures in a rank's stages that
    are balanced by a bias. One whose router is frozen (a teacher's, one under adapters), or that is
    in evaluation mode, stays as it is."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        every = [
            module
            for stage in stages
            for module in stage.modules()
            if isinstance(module, MixtureOfExperts)
        ]
        self.scaled = [mixture for mixture in every if mixture.balance]
        self.mixtures = [m for m in every if m.bias_rate and m.gate.weight.requires_grad]
        self._on = False
        self._sums: dict[int, Tensor] = {}
        for i, mixture in enumerate(self.mixtures):
            mixture.experts.register_forward_pre_hook(partial(self._count, i))

    def _count(self, at: int, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        if self._on and self.mixtures[at].training:
            n = len(self.mixtures[at].expert_bias)
            found = tokens_each(given[1].flatten(), n)
            self._sums[at] = self._sums[at] + found if at in self._sums else found

    def begin(self, loss_scale: float) -> None:
        """A step begins."""
        self._sums = {}
        for mixture in self.scaled:
            mixture.loss_scale = loss_scale

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A forward pass of the step runs inside."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def of_step(self) -> list[Tensor]:
        """Of each mixture [experts]; of a rank without samples 0."""
        zeros = (torch.zeros_like(m.expert_bias, dtype=torch.int64) for m in self.mixtures)
        return [self._sums.get(at, zero) for at, zero in enumerate(zeros)]


# ------------------------------------------------------------------------------ over several ranks


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


def exchanges(model: nn.Module) -> list[TokenExchange]:
    """Those of a model that `share_out` has changed."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, TokenExchange)]


class TokenExchange:
    """The forward pass of a module that has a share of `n` experts. `rows`: tokens that came to
    this rank's experts so far."""

    def __init__(
        self, experts: Callable[[Tensor, Tensor, Tensor], Tensor], n: int, group: dist.ProcessGroup
    ) -> None:
        self.experts, self.n, self.group = experts, n, group
        self.rows = 0

    def taken(self) -> int:
        """`rows`, which begin again."""
        found, self.rows = self.rows, 0
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden], [tokens, k], [tokens, k] -> [tokens, hidden]."""
        if hidden.is_meta:  # only shapes are asked for
            return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        found = self._each(hidden[order // index.shape[-1]], chosen)
        return combined(found, order, weights).to(hidden.dtype)

    def _each(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """What its expert makes of each row; rows are in the order of their experts."""
        n_ranks = self.group.size()
        sent, shares = tokens_each(chosen, self.n), [self.n // n_ranks] * n_ranks
        came = sent.clone()  # in a rehearsal nothing comes: as many as were sent, then
        # The sizes are given though they are equal: without them torch over NCCL 2.28 and later
        # takes "in progress", the answer of a communicator that can be aborted, for an error.
        if dist.get_backend(self.group) != "fake":
            dist.all_to_all_single(came, sent, shares, shares, group=self.group)
        sends, comes = torch.stack((sent, came)).view(2, n_ranks, -1).sum(-1).tolist()
        route = Route(sends, comes, self.group)
        here: Tensor = _Exchange.apply(rows, route)  # type: ignore[no-untyped-call]
        mine = torch.arange(self.n // n_ranks, device=chosen.device).repeat(n_ranks)
        expert = mine.repeat_interleave(came, output_size=len(here))
        self.rows += len(here)
        if not len(here):  # each rank has to give all weights a gradient
            here, expert = F.pad(here, (0, 0, 0, 1)), expert.new_zeros(1)
        made = self.experts(here, expert.unsqueeze(-1), here.new_ones(len(here), 1))
        back: Tensor = _Exchange.apply(made[: sum(comes)], route.back)  # type: ignore[no-untyped-call]
        return back


@dataclass(frozen=True)
class Route:
    """`sends[i]` rows go to rank i of the group, `comes[i]` come from it; in the order of ranks."""

    sends: list[int]
    comes: list[int]
    group: dist.ProcessGroup

    @property
    def back(self) -> Route:
        return Route(self.comes, self.sends, self.group)

    def carry(self, rows: Tensor) -> Tensor:
        found = rows.new_empty((sum(self.comes), *rows.shape[1:]))
        dist.all_to_all_single(found, rows.contiguous(), self.comes, self.sends, group=self.group)
        return found


class _Exchange(torch.autograd.Function):
    """Gradients go back the way that the rows came."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.back = route.back
        return route.carry(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        back: Route = ctx.back
        return back.carry(grad), None
