"""Attention over a cut sequence against softmax(q k^T) v written out in float64. The ranks are
threads with collectives of their own; what gloo does with it is shown by
tests/worker/parallel/test_axes.py."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import elastic
from elastic.errors import ProgramError
from elastic.models import attention as module
from elastic.models.attention import SequenceShard, over, positions, where

SEQ = 24


@dataclass
class Circle:
    """A group of threads."""

    n: int
    barrier: threading.Barrier = field(init=False)
    given: dict[int, Tensor] = field(default_factory=dict)
    n_gathers: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.n, timeout=300)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        found = [self.given[r] for r in range(self.n)]
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class Member:
    circle: Circle
    rank: int


@pytest.fixture(autouse=True)
def collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(out: Tensor, x: Tensor, group: Member) -> None:
        group.circle.n_gathers += 1
        out.copy_(torch.cat(group.circle.exchange(group.rank, x)))

    def scatter(out: Tensor, x: Tensor, group: Member) -> None:
        out.copy_(
            torch.stack(group.circle.exchange(group.rank, x))
            .sum(0)
            .view(group.circle.n, -1)[group.rank]
        )

    monkeypatch.setattr(module, "_all_gather", gather)
    monkeypatch.setattr(module, "_reduce_scatter", scatter)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, documents: Tensor | None) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def inputs(kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = [(2, 4, SEQ, 8), (2, kv_heads, SEQ, 8), (2, kv_heads, SEQ, 8)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def document_ids() -> Tensor:
    return torch.stack((torch.arange(SEQ) // 7, (torch.arange(SEQ) > 10).long()))


def together(
    n: int, tensors: list[Tensor], call: Callable[..., Tensor], documents: Tensor | None
) -> tuple[list[Any], Circle]:
    """What each rank gets for its part: (output, gradients of its q, k, v) when the output's
    gradient is its sine."""
    circle = Circle(n)

    def rank(r: int) -> Any:
        shard = SequenceShard(r, n, Member(circle, r))  # type: ignore[arg-type]
        q, k, v = (shard.take(x, 2).float().requires_grad_() for x in tensors)
        out = call(q, k, v, None if documents is None else shard.take(documents), shard)
        out.backward(out.detach().sin())
        return shard, out.detach(), [x.grad for x in (q, k, v)]

    with ThreadPoolExecutor(n) as threads:
        return list(threads.map(rank, range(n))), circle


def compare(got: list[Any], tensors: list[Tensor], causal: bool, documents: Tensor | None) -> None:
    whole = [x.clone().requires_grad_() for x in tensors]
    out = plain(*whole, causal, documents)
    out.backward(out.detach().sin())
    for shard, mine, grads in got:
        torch.testing.assert_close(mine.double(), shard.take(out.detach(), 2), atol=1e-5, rtol=1e-4)
        for grad, reference in zip(grads, whole, strict=True):
            torch.testing.assert_close(
                grad.double(), shard.take(reference.grad, 2), atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_parts_are_those_of_the_whole_sequence(
    n: int, causal: bool, packed: bool, kv_heads: int
) -> None:
    tensors, documents = inputs(kv_heads), document_ids() if packed else None

    def call(q: Tensor, k: Tensor, v: Tensor, mine: Tensor | None, shard: SequenceShard) -> Tensor:
        return module._over_shards(q, k, v, causal=causal, documents=mine, scale=None, shard=shard)

    compare(together(n, tensors, call, documents)[0], tensors, causal, documents)


def test_with_masks_in_blocks_and_under_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MASK_ELEMENTS_MOST", 100)
    tensors, documents = inputs(), document_ids()

    def call(q: Tensor, k: Tensor, v: Tensor, mine: Tensor | None, shard: SequenceShard) -> Tensor:
        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (
                module._over_shards(
                    q * 1.0, k * 1.0, v * 1.0, causal=True, documents=mine, scale=None, shard=shard
                )
                * 1.0
            )

        return checkpoint(layer, q, k, v, use_reentrant=False)

    got, _ = together(2, tensors, call, documents)
    compare(got, tensors, True, documents)


def test_gathered_keys_have_no_memory_between_forward_and_backward() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mine: Tensor | None, shard: SequenceShard) -> Tensor:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.detach()) or t, lambda t: t
        ):
            out = module._over_shards(q, k, v, causal=True, documents=None, scale=None, shard=shard)
        whole = (2, k.shape[1], SEQ, k.shape[3])
        gathered = [t for t in kept if t.shape == whole]
        assert gathered
        assert all(t.untyped_storage().nbytes() == 0 for t in gathered)
        return out

    tensors = inputs(kv_heads=4)
    got, circle = together(2, tensors, call, None)
    compare(got, tensors, True, None)
    assert circle.n_gathers == 2 * 2 * 2  # k and v, forward and backward, two ranks


def test_on_a_whole_sequence_it_is_plain_attention() -> None:
    tensors, documents = inputs(), document_ids()
    for causal in (True, False):
        for mine in (None, documents):
            q, k, v = (x.float() for x in tensors)
            got = elastic.attention(q, k, v, causal=causal, documents=mine)
            torch.testing.assert_close(
                got.double(), plain(*tensors, causal, mine), atol=1e-5, rtol=1e-4
            )


def test_positions_are_those_of_the_part() -> None:
    assert positions(6).tolist() == [0, 1, 2, 3, 4, 5]
    with over(SequenceShard(1, 3, None)) as seen:
        assert positions(4).tolist() == [2, 3, 8, 9]
        assert where() == (1, 3)
        assert not seen.called
    assert where() == (0, 1)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = (x.float() for x in inputs())
    with pytest.raises(ProgramError, match="multiple of those of k and v"):
        elastic.attention(q[:, :3], k, v)
    with pytest.raises(ProgramError, match="of one batch and sequence"):
        elastic.attention(q[0], k, v)
    with pytest.raises(ProgramError, match="documents are"):
        elastic.attention(q, k, v, documents=torch.zeros(2, 5))
    with pytest.raises(ProgramError, match="10 positions are no multiple"):
        SequenceShard(0, 2, None).take(torch.zeros(1, 10))


def test_compiled_once_whether_it_is_watched_or_not() -> None:
    """Nothing that `attention` writes down makes torch.compile start over, or break the graph."""
    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return elastic.attention(q * 2.0, k, v)

    q, k, v = (x.float() for x in inputs())
    for _ in range(3):
        layer(q, k, v)
    assert counter.frame_count == 1
    for _ in range(5):
        with over(None) as seen:
            layer(q, k, v)
            layer(q, k, v)
        assert seen.called
    assert counter.frame_count == 2
