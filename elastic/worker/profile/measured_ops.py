"""What one process is timed at: products, attention, ordinary operations, memory, copies between
host and device, storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.models.attention import attention
from elastic.storage import open_storage
from elastic.types import Attention, Matmul
from elastic.worker.profile.operations import Operations
from elastic.worker.program.calls import tensors_in

BACKWARD = 3  # a product and its two gradients
SMALL_OPS = 200
KEY = "measured-by-elastic-profile"
Call = Callable[[], object]


@dataclass(frozen=True)
class CallLimits:
    """How large a call may be: seconds on CPU cores are long."""

    large: int  # rows, k and n of the large product
    flop: float
    n_bytes: int
    storage_bytes: int = 16 << 20

    @staticmethod
    def of(device: torch.device) -> CallLimits:
        on_gpu = device.type == "cuda"
        return CallLimits(8192, 4e12, 1 << 30) if on_gpu else CallLimits(768, 1e9, 64 << 20)


def fitting(matmuls: Iterable[Matmul], times: int, limits: CallLimits) -> list[Matmul]:
    """With the rows of `times` samples, or fewer where a product would be too large; those of no
    use at all are left out."""
    found: dict[tuple[int, int, int], float] = {}
    for one in matmuls:
        most = min(limits.flop / (2 * one.k * one.n), limits.n_bytes / 4 / max(one.k, one.n))
        rows = int(min(one.rows * times // max(1, one.experts), most))
        if rows >= 1 and one.k * one.n * 4 <= limits.n_bytes:
            n = one.count * max(1, one.experts)
            found[rows, one.k, one.n] = found.get((rows, one.k, one.n), 0.0) + n
    heavy = sorted(found, key=lambda shape: -shape[0] * shape[1] * shape[2] * found[shape])[:8]
    return [Matmul(*shape, count=found[shape]) for shape in heavy]


def product(one: Matmul, dtype: torch.dtype, device: torch.device) -> Call:
    """The product and its two gradients, as a linear layer has them."""
    x, w = _made((one.rows, one.k), dtype, device), _made((one.n, one.k), dtype, device)
    grad = _made((one.rows, one.n), dtype, device)

    def call() -> None:
        torch.mm(x, w.t())
        torch.mm(grad, w)
        torch.mm(grad.t(), x)

    return call


def product_flop(one: Matmul) -> float:
    """Of `product`."""
    return 2.0 * BACKWARD * one.rows * one.k * one.n


def mixed(
    matmuls: Sequence[Matmul], dtype: torch.dtype, device: torch.device
) -> tuple[Call, float]:
    """All products of a mean block, each about as often as it is there; and their FLOP."""
    least = min((one.count for one in matmuls), default=1.0)
    often = [(product(one, dtype, device), max(1, round(one.count / least))) for one in matmuls]

    def call() -> None:
        for run, times in often:
            for _ in range(times):
                run()

    return call, sum(product_flop(one) * times for one, (_, times) in zip(matmuls, often))


def attended(
    one: Attention, times: int, dtype: torch.dtype, *, device: torch.device, limits: CallLimits
) -> tuple[Call, float]:
    """Forward and backward pass of `times` samples, or of a part of the sequence where that is too
    much; and its FLOP, three times that of the forward pass."""
    queries, keys, heads = one.queries, one.keys, (one.heads, one.kv_heads)
    while (
        queries > 16 and one.flop / (one.queries * one.keys) * queries * keys * times > limits.flop
    ):
        queries, keys, times = queries // 2, keys // 2, max(1, times // 2)
    q = _made((times, heads[0], queries, one.head_dim), dtype, device).requires_grad_()
    k, v = (
        _made((times, heads[1], keys, one.head_dim), dtype, device).requires_grad_()
        for _ in range(2)
    )
    grad, causal = torch.ones_like(q), one.causal and queries == keys

    def call() -> None:
        if queries == keys:
            out = attention(q, k, v, causal=causal)
        else:
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=heads[0] != heads[1])
        out.backward(grad)
        q.grad = k.grad = v.grad = None

    half = 2 if causal else 1
    return call, BACKWARD * 4.0 * times * queries * keys * heads[0] * one.head_dim / half


def ordinary(
    n_rows: int, width: int, dtype: torch.dtype, *, device: torch.device
) -> tuple[Call, int]:
    """What a block does besides products and attention: a norm, a turn of halves, a gate, a sum;
    and the bytes that these read and write, counted as those of a sample are."""
    x = _made((n_rows, max(2, width - width % 2)), dtype, device)

    def chain(given: Tensor) -> Tensor:
        normed = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-6)
        first, second = normed.chunk(2, -1)
        turned = torch.cat((-second, first), -1) * given + normed
        return given + F.silu(turned) * normed

    seen = Operations({}, frozenset())
    with _Counting(seen):
        chain(torch.empty_like(x, device="meta"))
    return (lambda: chain(x)), seen.blocks.moved_bytes


class _Counting(TorchDispatchMode):
    def __init__(self, seen: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        assert all(x.is_meta for x in tensors_in(out))
        self.seen.count(True, func, args, out=out)
        return out


def small_ops(device: torch.device) -> Call:
    """SMALL_OPS operations on nearly nothing, recorded for a backward pass."""
    x = torch.ones(16, device=device, requires_grad=True)

    def call() -> None:
        y = x
        for _ in range(SMALL_OPS // 2):
            y = y * 1.0 + 0.0

    return call


def summed(device: torch.device, limits: CallLimits) -> tuple[Call, int]:
    """A sum of two large tensors, and the bytes that it reads and writes: the third kernel of
    STREAM (McCalpin 1995)."""
    a, b, c = (torch.zeros(limits.n_bytes // 4, device=device) for _ in range(3))
    return (lambda: torch.add(a, b, out=c)), 3 * limits.n_bytes


def copied(device: torch.device, limits: CallLimits) -> tuple[dict[str, Call], int]:
    """Between host and device, both ways, from pinned memory; on a CPU from memory to memory. And
    the bytes of one copy."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(limits.n_bytes // 4, pin_memory=on_gpu)
    there = torch.zeros(limits.n_bytes // 4, device=device)
    ways: dict[str, Call] = {"to_device": lambda: there.copy_(host, non_blocking=True)}
    if on_gpu:
        ways["to_host"] = lambda: host.copy_(there, non_blocking=True)
    return ways, limits.n_bytes


def stored(uri: str, limits: CallLimits) -> tuple[dict[str, Call], Call, int]:
    """Writes and reads one object in a run's storage; a call that takes it away, and the folder
    that was not there; its bytes."""
    fresh = "://" not in uri and not Path(uri).exists()
    storage = open_storage(uri)
    data, back = os.urandom(limits.storage_bytes), bytearray(limits.storage_bytes)
    key = f"{KEY}-{os.getpid()}"
    ways: dict[str, Call] = {
        "write": lambda: storage.put(key, data),
        "read": lambda: storage.read_into(key, 0, memoryview(back)),
    }

    def clean() -> None:
        storage.delete(key)
        with suppress(OSError):  # with something in it, it stays
            if fresh:
                Path(uri).rmdir()

    return ways, clean, limits.storage_bytes


def _made(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small numbers: denormal or huge ones would be slow on some machines."""
    return torch.full(shape, 0.01, dtype=dtype, device=device)
