"""The digest of the content: the same for every cut, another for every error."""

from __future__ import annotations

import time
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.types import Box
from elastic.worker.state.content_digest import digest, digest_of

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float16,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty((), dtype=dtype).element_size()
    # any bits, NaN too
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype).view(shape)


def box(tensor: torch.Tensor, offsets: tuple[int, ...] = ()) -> Box:
    return Box(
        "w",
        offsets or (0,) * tensor.ndim,
        tuple(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
    )


def tensor_digest(box: Box, tensor: torch.Tensor) -> int:
    return digest_of([(box, tensor)], {box.fqn: box.sizes})


def random_cut(
    random: Random, offsets: list[int], sizes: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Cuts a box into boxes, again and again."""
    dims = [d for d, size in enumerate(sizes) if size > 1]
    if not dims or random.random() < 0.35:  # a few parts, now and then hundreds
        return [(offsets, sizes)]
    dim = random.choice(dims)
    at = random.randint(1, sizes[dim] - 1)
    low, high = [*sizes], [*sizes]
    low[dim], high[dim] = at, sizes[dim] - at
    moved = [*offsets]
    moved[dim] += at
    return random_cut(random, offsets, low) + random_cut(random, moved, high)


SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 70_000)),
    st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 1 << 30))
def test_any_cut_gives_the_same(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    whole = random_tensor(shape, dtype, seed)
    want = tensor_digest(box(whole), whole)
    total = 0
    for offsets, sizes in random_cut(Random(seed), [0] * len(shape), list(shape)):
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        total += tensor_digest(box(part, tuple(offsets)), part)
    assert total % (1 << 64) == want


def test_even_parts_of_odd_rows_of_halves() -> None:
    """A row of 11 bfloat16 does not end on a word: the next row's even part is no row of words
    where it lies."""
    whole = random_tensor((2, 11), torch.bfloat16, 1)
    parts = {(0, 0): whole[:1], (1, 0): whole[1:, :10], (1, 10): whole[1:, 10:]}
    sums = [tensor_digest(box(part, at), part) for at, part in parts.items()]
    assert sum(sums) % (1 << 64) == tensor_digest(box(whole), whole)


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(DTYPES[:-2]), st.integers(0, 1 << 30))
def test_one_flipped_bit_is_seen(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    tensor = random_tensor(shape, dtype, seed)
    before = tensor_digest(box(tensor), tensor)
    random = Random(seed)
    data = tensor.view(-1).view(torch.uint8)
    data[random.randrange(data.numel())] ^= 1 << random.randrange(8)
    assert tensor_digest(box(tensor), tensor) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_typical_errors_are_seen(dtype: torch.dtype) -> None:
    """What a wrong transfer does: rows or columns exchanged or shifted, a part twice, signs turned,
    another tensor's name."""
    tensor = torch.randn(96, 130).to(dtype)
    seen = {tensor_digest(box(tensor), tensor)}
    errors = [
        tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0), tensor.flip(1), -tensor, tensor.abs(),
        tensor.roll((1, 1), (0, 1)), torch.cat([tensor[:48], tensor[:48]]),
        torch.cat([tensor[48:], tensor[:48]]), torch.zeros_like(tensor),
        torch.cat([-tensor[:, :2], tensor[:, 2:]], 1), torch.cat([-tensor[:2], tensor[2:]]),
    ]  # fmt: skip
    for wrong in errors:
        seen.add(tensor_digest(box(wrong), wrong.contiguous()))
    assert len(seen) == len(errors) + 1
    pair = {
        "a": (Box("a", (0, 0), (96, 130), "float32"), tensor),
        "b": (Box("b", (0, 0), (96, 130), "float32"), tensor.flip(0)),
    }
    exchanged = {"a": (pair["a"][0], pair["b"][1]), "b": (pair["b"][0], pair["a"][1])}
    shapes = {"a": (96, 130), "b": (96, 130)}
    assert digest(pair, shapes, pair) != digest(exchanged, shapes, pair)


def test_many_small_errors_do_not_cancel() -> None:
    """Sign bits are the topmost: two or four of them turned, anywhere, 2,000 times."""
    torch.manual_seed(3)
    tensor = torch.randn(64, 64)
    zero, seen = tensor_digest(box(tensor), tensor), 0
    for k in range(2_000):
        wrong = tensor.clone()
        at = torch.randperm(4096)[: 2 + 2 * (k % 2)]
        wrong.view(-1)[at] *= -1
        seen += tensor_digest(box(wrong), wrong) != zero
    assert seen == 2_000


def test_it_is_cheap() -> None:
    tensor = torch.randn(1024, 4096)
    before = time.thread_time()
    for _ in range(4):
        tensor_digest(box(tensor), tensor)
    # 3.5e9 bytes per second of a core when it is alone
    assert 4 * tensor.numel() * 4 / (time.thread_time() - before) > 0.8e9
