"""Position-keyed digest of logical tensors: the third layer of proof that a state is what it was,
however it is cut.

Each element has a 64-bit key from its logical position: the product, over the dimensions, of odd
numbers drawn for the index. The digest of a tensor is the sum over its elements of key x bits (mod
2**64), the digest of a state the sum of those times an odd number drawn for the name: a multilinear
hash (Carter and Wegman 1979; Dietzfelbinger 1996). Sums over any cut add up to the same number. A
change of one element is always seen; one of several is missed with a chance near 2**-32 at worst
(where only the topmost bits of words differ), unless it was made for these keys: a guard against
errors, not against forgers.

Bits are taken as signed 32-bit words: half a float64, a float32, two bfloat16. Of two halves of a
word the second has the key of the first times 2**16, so that whole words can be taken where the cut
lets them be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial

import torch

from elastic.types import Box
from elastic.worker.parallel.keyed_numbers import STEP, mixed_in_place, signed

Tensors = Mapping[str, tuple[Box, torch.Tensor]]

VERSION = 2  # of the digest; version 1 mixed each element by itself
LOW = 14  # bits of an index that have a table of keys of their own
BLOCK = 1 << 17  # words per pass: 1 MiB as int64, in the cache
# on a GPU: 128 MiB beside the state; a smaller pass is over before the next one is launched
DEVICE_BLOCK = 1 << 24
KEYS_KEPT = 256  # tables of a digest on a GPU, at most MOST_KEPT keys each
MOST_KEPT = 1 << 16
# rows shorter than the first are taken together, up to the second
FEW_COLUMNS, MOST_COLUMNS = 32, 1 << 16
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensors: Tensors, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> int:
    """Sum (mod 2**64) over the named boxes. `shapes`: of the logical tensors, whose rank the boxes
    share."""
    return digest_of((tensors[fqn] for fqn in names), shapes)


def digest_of(
    parts: Iterable[tuple[Box, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """Sum (mod 2**64) over boxes, each of any logical tensor. What a device has summed up is read
    once, at the end."""
    total = 0
    on_device: dict[torch.device, torch.Tensor] = {}
    keys: dict[torch.device, _Keys] = {}
    for box, tensor in parts:
        if len(box.offsets) != len(shapes[box.fqn]):
            raise ValueError(
                f"{box.fqn}: a box of {len(box.offsets)} dimensions, a tensor of "
                f"{len(shapes[box.fqn])}"
            )
        if not tensor.numel():
            continue
        device = tensor.device
        part = _tensor_sum(box, tensor, keys.setdefault(device, _Keys(device)))
        if in_cache(device):
            total += _name_key(box.fqn) * int(part)
        else:
            part.mul_(_name_key(box.fqn))
            on_device[device] = on_device[device].add_(part) if device in on_device else part
    return (total + sum(int(one) for one in on_device.values())) % (1 << 64)


def in_cache(device: torch.device) -> bool:
    """Is the digest taken in blocks that fit a processor's cache? Else in few passes over memory
    that is fast."""
    return device.type == "cpu"


class _Keys:
    """Keys on one device, for one digest. On a CPU the tables that all digests share are kept for
    good; on another device tables are made there, at their first use, so that nothing is copied and
    no stream reads what another one writes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: dict[tuple[str, int, int, int], torch.Tensor] = {}

    def _once(
        self, use: str, at: tuple[int, int, int], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """`at`: the stream or dimension, where it begins, how many."""
        if in_cache(self.device):
            return make()
        if (use, *at) in self._made:
            return self._made[use, *at]
        made = make()
        if at[-1] <= MOST_KEPT and len(self._made) < KEYS_KEPT:
            self._made[use, *at] = made
        return made

    def low(self, dim: int) -> torch.Tensor:
        """int64 [2**LOW]"""
        return _low(dim) if in_cache(self.device) else self.drawn(2 * dim + 1, 0, 1 << LOW)

    def drawn(self, stream: int, start: int, n: int) -> torch.Tensor:
        """int64 [n]: see `_drawn`."""
        make = partial(_drawn, stream, start, n, device=self.device)
        return self._once("drawn", (stream, start, n), make)

    def keys(self, dim: int, start: int, n: int) -> torch.Tensor:
        """int64 [n]: keys of the indices start..start+n-1 along dimension `dim`, all odd."""
        return self._once("keys", (dim, start, n), partial(self._keys, dim, start, n))

    def _keys(self, dim: int, start: int, n: int) -> torch.Tensor:
        first, end = start >> LOW, (start + n - 1 >> LOW) + 1
        high = self.drawn(2 * dim, first, end - first)
        if first + 1 == end:
            at = start - (first << LOW)
            return self.low(dim)[at : at + n] * high
        return (high[:, None] * self.low(dim)[None, :]).view(-1)[start - (first << LOW) :][:n]

    def last(self, dim: int, start: int, n: int, *, halves: bool) -> torch.Tensor:
        """int64 [n]: keys of the words, or of the 16-bit halves, start..start+n-1 along the last
        dimension."""
        if not halves:
            return self.keys(dim, start, n)
        pairs = self.keys(dim, start // 2, (start + n + 1) // 2 - start // 2)
        return torch.stack([pairs, pairs << 16], dim=1).view(-1)[start % 2 :][:n]

    def mask(self, start: int, n: int) -> torch.Tensor:
        """int64 [n]: of 16-bit halves, the lower one of a word (an even index) counts without its
        sign."""

        def make() -> torch.Tensor:
            index = torch.arange(start % 2, start % 2 + n, device=self.device)
            return torch.where(index % 2 == 0, 0xFFFF, -1)

        return self._once("mask", (start % 2, 0, n), make)


def _tensor_sum(box: Box, tensor: torch.Tensor, keys: _Keys) -> torch.Tensor:
    """int64, no dimension: the digest of one box without its name, on the tensor's device."""
    words, start, halves = _words(box, tensor.detach().contiguous())
    n_dims, n = len(box.sizes), words.shape[-1]
    outer = [keys.keys(d, box.offsets[d], box.sizes[d]) for d in range(n_dims - 1)]
    last, cut, n_columns = max(0, n_dims - 1), max(0, n_dims - 1), n
    while cut and n_columns < FEW_COLUMNS and n_columns * box.sizes[cut - 1] <= MOST_COLUMNS:
        cut -= 1
        n_columns *= box.sizes[cut]
    rows = _outer(outer[:cut], keys.device)
    matrix = words.view(-1, n_columns)
    if cut < last:
        columns = _outer([*outer[cut:], keys.last(last, start, n, halves=halves)], keys.device)
        return _sum(
            matrix,
            rows,
            columns,
            mask=keys.mask(start, n).repeat(n_columns // n) if halves else None,
        )
    return _by_steps(matrix, rows, keys, dim=last, start=start, halves=halves)


def _by_steps(
    matrix: torch.Tensor, rows: torch.Tensor, keys: _Keys, *, dim: int, start: int, halves: bool
) -> torch.Tensor:
    """The sum in ranges of columns whose indices share the upper half of their key, so that no long
    table is made. `start`: index of the first along dimension `dim`; `halves`: they are 16-bit
    halves."""
    step, left, end = 1 << LOW, start, start + matrix.shape[1]
    total: torch.Tensor | None = None
    while left < end:
        n_whole = (
            (end - left) // step if left % step == 0 and len(matrix) == 1 and not halves else 0
        )
        if n_whole:  # a long row: its ranges are rows of a matrix
            right = left + n_whole * step
            whole = matrix[0, left - start : right - start].view(n_whole, step)
            part = rows[0] * _sum(
                whole, keys.drawn(2 * dim, left >> LOW, n_whole), keys.low(dim), mask=None
            )
        else:
            right = min(left - left % step + step, end)
            mask = keys.mask(left, right - left) if halves else None
            part = _sum(
                matrix[:, left - start : right - start],
                rows,
                keys.last(dim, left, right - left, halves=halves),
                mask=mask,
            )
        total = part if total is None else total + part
        left = right
    assert total is not None, "a box without elements has no sum"
    return total


def _sum(
    words: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, mask: torch.Tensor | None
) -> torch.Tensor:
    """Sum of rows[i] x words[i, j] x columns[j], in blocks: on a CPU of such a size that they stay
    in the cache. `mask`: the bits of a word that count."""
    on_cpu = in_cache(words.device)
    height = max(1, (BLOCK if on_cpu else DEVICE_BLOCK) // columns.numel())
    buffer = torch.empty(
        (min(height, rows.numel()), columns.numel()), dtype=torch.int64, device=words.device
    )
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for top in range(0, rows.numel(), height):
        block = words[top : top + height]
        part = buffer[: block.shape[0]].copy_(block)
        if mask is not None:
            part &= mask
        sums = torch.mv(part, columns) if on_cpu else part.mul_(columns).sum(1)
        total += (sums * rows[top : top + height]).sum()
    return total


def _words(box: Box, data: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
    """The bits as words, [..., words of a row]; the first one's index along the last dimension; are
    they single halves?"""
    size = data.element_size()
    bits = data.view(_BITS[size]) if box.sizes else data.view(1).view(_BITS[size])
    start, n = (box.offsets[-1], box.sizes[-1]) if box.sizes else (0, 1)
    if size == 8:
        return bits.view(torch.int32), 2 * start, False
    if size != 2:
        return bits, start, False
    if start % 2 == 0 and n % 2 == 0:
        aligned = bits.storage_offset() % 2 == 0 and all(
            stride % 2 == 0 for stride in bits.stride()[:-1]
        )
        whole = bits if aligned else bits.clone(memory_format=torch.contiguous_format)
        return whole.view(torch.int32), start // 2, False
    return bits, start, True


def _outer(keys: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Products of one key of each dimension, in row-major order."""
    out = torch.ones(1, dtype=torch.int64, device=device)
    for key in keys:
        out = (out[:, None] * key[None, :]).view(-1)
    return out


@lru_cache(maxsize=16)
def _low(dim: int) -> torch.Tensor:
    return _drawn(2 * dim + 1, 0, 1 << LOW, device=torch.device("cpu"))


def _drawn(stream: int, start: int, n: int, *, device: torch.device) -> torch.Tensor:
    """int64 [n]: odd numbers, SplitMix64 (Steele, Lea, Flood 2014) of the index with a seed per
    stream."""
    at = torch.arange(start + 1, start + 1 + n, dtype=torch.int64, device=device)
    at.mul_(signed(STEP)).add_(_name_key(f"elastic digest {stream}"))
    return mixed_in_place(at).bitwise_or_(1)


@lru_cache(maxsize=1 << 16)
def _name_key(name: str) -> int:
    drawn = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return signed(int.from_bytes(drawn, "little") | 1)
