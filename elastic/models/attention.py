"""Exact attention, also over a sequence that is cut over the ranks of a context-parallel group.

The sequence is cut into 2n chunks; rank i of n holds chunk i and chunk 2n-1-i, so that under a
causal mask all ranks have the same work. A rank gathers the keys and values of the whole sequence
and attends with its own queries, so the softmax is one softmax and the kernels are those of
`scaled_dot_product_attention`: the way of Llama 3 (Grattafiori et al. 2024, section 3.3.2; with
grouped queries, keys and values are a small part of a layer). Between forward and backward a rank
keeps its own keys and values only: the gathered ones give their memory back and are gathered again
when the backward pass comes to them.

Whoever runs the model says over which group the sequence is cut, for as long as forward and
backward run (`over`). With cp = 1 nobody does: what runs then is `scaled_dot_product_attention`
alone, also under torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from elastic.errors import ProgramError

# torch 2.13 has new names for these
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# of a mask that is written out; queries that need more are attended with block by block
MASK_ELEMENTS_MOST = 1 << 26


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every sequence: chunks `index` and 2 size - 1 - index of 2 size equal
    ones."""

    index: int
    size: int
    group: dist.ProcessGroup | None

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor with the whole sequence along `dim`. Raises ProgramError
        where that is uneven."""
        if x.shape[dim] % (2 * self.size):
            raise ProgramError(
                f"cp={self.size} cuts a sequence into {2 * self.size} equal chunks; "
                f"{x.shape[dim]} positions are no multiple"
            )
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat((chunks[self.index], chunks[2 * self.size - 1 - self.index]), dim)


@dataclass
class AttentionUse:
    """What a run of the model has met. `asked`: for positions."""

    shard: SequenceShard | None
    # never read in `attention`, or torch.compile would compile again when it changes
    called: bool = False
    asked: bool = False


# of the forward and backward pass that runs; its end takes it away
_now: AttentionUse | None = None


@contextmanager
def over(shard: SequenceShard | None) -> Iterator[AttentionUse]:
    """While this is open, `attention` and `positions` see a sequence that is cut as `shard` says.
    Backward passes of what was computed belong inside too."""
    global _now
    before, _now = _now, AttentionUse(shard)
    try:
        yield _now
    finally:
        _now = before


def wanted() -> bool:
    """Inside of `over`: the model must attend by `attention`, which sees the whole sequence."""
    return _now is not None


def where() -> tuple[int, int]:
    """Index and number of the context-parallel ranks; (0, 1) = the sequence is whole."""
    if _now is not None:
        _now.asked = True
    shard = _now.shard if _now is not None else None
    return (shard.index, shard.size) if shard is not None else (0, 1)


def positions(n: int, device: torch.device | None = None) -> Tensor:
    """Positions in the whole sequence of the `n` tokens that a model sees: int64 [n], ascending.
    0..n-1 but for context parallelism, where a model that turns or adds positions must take them
    from here."""
    index, size = where()
    if size == 1:
        return torch.arange(n, device=device)
    return SequenceShard(index, size, None).take(torch.arange(n * size, device=device), 0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention, exact over the whole sequence also where this rank holds a part
    of it (cp > 1).

    q [batch, heads, seq, head_dim], k [batch, kv_heads, seq, head_dim], v [batch, kv_heads, seq,
    value_dim] -> [batch, heads, seq, value_dim]; heads is a multiple of kv_heads (grouped queries).
    documents: int [batch, seq], of the same part of the sequence; a token sees those of its own
    document only. scale: default 1 / sqrt(head_dim). Raises ProgramError for shapes that do not
    fit.
    """
    _check(q, k, v, documents=documents)
    if _now is not None:
        _now.called = True
    shard = _now.shard if _now is not None else None
    if shard is None:
        return _attend(
            q, k, v, first=0, causal=causal, scale=scale, documents=(documents, documents)
        )
    out: Tensor = _over_shards(
        q, k, v, causal=causal, documents=documents, scale=scale, shard=shard
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4 or not q.shape[-2] == k.shape[-2] == v.shape[-2]:
        raise ProgramError(
            f"elastic.attention: {shapes}; all must be [batch, heads, seq, head_dim] of one batch "
            "and sequence"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ProgramError(
            f"elastic.attention: {shapes}; the heads of q must be a multiple of those of k and v"
        )
    if documents is not None and tuple(documents.shape) != (q.shape[0], q.shape[-2]):
        raise ProgramError(
            f"elastic.attention: documents are {list(documents.shape)}; they must be [batch, seq] "
            f"({shapes})"
        )


# ------------------------------------------------------------------------- on whole keys and values

Documents = tuple[Tensor | None, Tensor | None]  # of the queries, of the keys
Pair = tuple[Tensor, Tensor]  # keys, values


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: int,
    causal: bool,
    scale: float | None,
    documents: Documents,
) -> Tensor:
    """Queries at positions first, first + 1, ... against keys from position 0 on."""
    n, end = q.shape[-2], first + q.shape[-2] if causal else k.shape[-2]
    k, v = k[..., :end, :], v[..., :end, :]
    if documents[0] is None and (not causal or not first):
        return _kernel(q, k, v, scale=scale, is_causal=causal)
    if documents[0] is None and q.is_cuda:
        return _kernel(q, k, v, scale=scale, attn_mask=causal_lower_right(n, end))
    batch = 1 if documents[0] is None else q.shape[0]
    step = max(1, MASK_ELEMENTS_MOST // (batch * end))
    out = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        last = first + stop if causal else end
        mask = _mask(
            (first + start, first + stop, last),
            causal,
            documents,
            rows=(start, stop),
            device=q.device,
        )
        out.append(
            _kernel(
                q[..., start:stop, :],
                k[..., :last, :],
                v[..., :last, :],
                scale=scale,
                attn_mask=mask,
            )
        )
    return out[0] if len(out) == 1 else torch.cat(out, -2)


def _mask(
    span: tuple[int, int, int],
    causal: bool,
    documents: Documents,
    *,
    rows: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Who may see whom: bool [batch or nothing, 1, queries, keys]."""
    first, stop, n_keys = span
    mask = torch.ones(1, 1, stop - first, n_keys, dtype=torch.bool, device=device)
    if causal:
        mask = (
            torch.arange(n_keys, device=device) <= torch.arange(first, stop, device=device)[:, None]
        )
    mine, theirs = documents
    if mine is not None and theirs is not None:
        mask = mask & (mine[:, None, slice(*rows), None] == theirs[:, None, None, :n_keys])
    return mask


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    attn_mask: Any = None,
    is_causal: bool = False,
) -> Tensor:
    """Grouped heads are written out where the fast kernels do not know them: with a mask, and in
    float32."""
    grouped = q.shape[1] != k.shape[1]
    if grouped and (
        isinstance(attn_mask, Tensor)
        and type(attn_mask) is Tensor
        or (q.is_cuda and q.dtype == torch.float32)
    ):
        times = q.shape[1] // k.shape[1]
        k, v, grouped = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=grouped
    )


# ------------------------------------------------------------------------------ over a cut sequence


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _over_shards(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    documents: Tensor | None,
    scale: float | None,
    shard: SequenceShard,
) -> Tensor:
    whole_k, whole_v = _Gather.apply(k, v, shard)  # type: ignore[no-untyped-call]
    theirs = (
        None if documents is None else _gathered(documents[:, None, :, None], shard)[:, 0, :, 0]
    )
    if not causal:
        out = _attend(
            q, whole_k, whole_v, first=0, causal=False, scale=scale, documents=(documents, theirs)
        )
    else:
        c = q.shape[-2] // 2
        firsts = shard.index * c, (2 * shard.size - 1 - shard.index) * c
        parts = []
        for half, first in enumerate(firsts):
            mine = slice(half * c, (half + 1) * c)
            known = (documents[:, mine] if documents is not None else None, theirs)
            parts.append(
                _attend(
                    q[..., mine, :],
                    whole_k,
                    whole_v,
                    first=first,
                    causal=True,
                    scale=scale,
                    documents=known,
                )
            )
        out = torch.cat(parts, -2)
    if torch.is_grad_enabled() and out.requires_grad:
        whole, own = (whole_k.detach(), whole_v.detach()), (k.detach(), v.detach())
        out = _Release.apply(out, whole, own, shard)  # type: ignore[no-untyped-call]
    return out


class _Gather(torch.autograd.Function):
    """Keys and values of the whole sequence; their gradients are summed over the ranks, in
    float32."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, shard: SequenceShard) -> tuple[Tensor, Tensor]:
        ctx.shard = shard
        return _gathered(k, shard), _gathered(v, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, None]:
        return _summed(dk, ctx.shard), _summed(dv, ctx.shard), None


class _Release(torch.autograd.Function):
    """Takes the memory of the gathered keys and values away behind the forward pass, and gives it
    back, filled again, before the backward pass comes to the attention that has kept views of
    them."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, whole: Pair, mine: Pair, shard: SequenceShard) -> Tensor:
        ctx.shard = shard
        ctx.save_for_backward(*whole, *mine)
        for gathered in whole:
            gathered.untyped_storage().resize_(0)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole_k, whole_v, k, v = ctx.saved_tensors
        for gathered, mine in ((whole_k, k), (whole_v, v)):
            gathered.untyped_storage().resize_(gathered.numel() * gathered.element_size())
            # `data`: to autograd these are the values that it has seen
            gathered.data.copy_(_gathered(mine, ctx.shard))
        return grad, None, None, None


def _gathered(x: Tensor, shard: SequenceShard) -> Tensor:
    """[batch, heads, seq / n, dim] of each rank -> [batch, heads, seq, dim], positions in order."""
    batch, heads, mine, dim = x.shape
    out = x.new_empty(shard.size * batch, heads, mine, dim)
    _all_gather(out, x.contiguous(), group=shard.group)
    parts = out.view(shard.size, batch, heads, 2, mine // 2, dim).movedim(0, 2)
    ordered = torch.cat((parts[:, :, :, 0], parts[:, :, :, 1].flip(2)), 2)
    return ordered.reshape(batch, heads, shard.size * mine, dim)


def _summed(grad: Tensor, shard: SequenceShard) -> Tensor:
    """The other way, summed: [batch, heads, seq, dim] -> [batch, heads, seq / n, dim]."""
    batch, heads, seq, dim = grad.shape
    chunks = grad.float().reshape(batch, heads, 2, shard.size, seq // (2 * shard.size), dim)
    pairs = torch.stack((chunks[:, :, 0], chunks[:, :, 1].flip(2)), 3).movedim(2, 0).contiguous()
    mine = pairs.new_empty(pairs.shape[1:])
    _reduce_scatter(mine.view(-1), pairs.view(-1), group=shard.group)
    return mine.view(batch, heads, seq // shard.size, dim).to(grad.dtype)
