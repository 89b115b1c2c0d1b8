"""What a forward pass does, counted as its operations are dispatched: products, attention, bytes
that all others move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn

from elastic.types import Attention, Matmul
from elastic.worker.program.calls import tensors_in

OPERANDS = {  # first one
    "mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_scaled_mm": 0, "_grouped_mm": 0,
    "_scaled_grouped_mm": 0,
}  # fmt: skip
NOTHING = frozenset(
    {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
)
# read a few rows of the first
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "take", "nll_loss_forward"})


@dataclass
class Counted:
    """In all blocks together, or outside of them; the keys have a count of 1."""

    matmuls: Counter[Matmul] = field(default_factory=Counter)
    attentions: Counter[Attention] = field(default_factory=Counter)
    moved_bytes: int = 0
    n_ops: int = 0

    def mean_matmuls(self, n_blocks: int) -> tuple[Matmul, ...]:
        return tuple(replace(one, count=count / n_blocks) for one, count in self.matmuls.items())

    def mean_attentions(self, n_blocks: int) -> tuple[Attention, ...]:
        return tuple(replace(one, count=count / n_blocks) for one, count in self.attentions.items())

    @property
    def flop(self) -> float:
        """Of products and attention; a causal mask halves the latter."""
        products = sum(one.flop * count for one, count in self.matmuls.items())
        return products + sum(one.flop * count for one, count in self.attentions.items())


@dataclass
class Operations:
    """`cuts`: `n` or `k` by the storage of a parameter that tp cuts (`cuts_of`); `parameters`:
    storages of all of them."""

    cuts: Mapping[int, str]
    parameters: frozenset[int]
    blocks: Counted = field(default_factory=Counted)
    ends: Counted = field(default_factory=Counted)

    def count(self, inside: bool, func: Any, args: tuple[Any, ...], *, out: Any) -> None:
        """One dispatched operation. What is done on real tensors (a table that a model keeps) is
        not the sample's doing."""
        name = func.overloadpacket.__name__
        given, made = list(tensors_in(args)), list(tensors_in(out))
        if func.is_view or name in NOTHING or not all(x.is_meta for x in (*given, *made)):
            return
        place = self.blocks if inside else self.ends
        if name in OPERANDS:
            place.matmuls.update(self._product(*args[OPERANDS[name] : OPERANDS[name] + 2]))
        elif name == "convolution":
            place.matmuls.update(
                _convolution(args[0], args[1], made[0], transposed=args[6], groups=args[8])
            )
        elif given or made:
            place.moved_bytes += _moved(name, given, made)
            place.n_ops += 1

    def attend(
        self, inside: bool, query: Tensor, key: Tensor, *, value: Tensor, causal: bool
    ) -> None:
        """Of one sample: query [1, heads, queries, head_dim], key and value [1, kv_heads, keys,
        head_dim]; values of another size count by the mean of both. Under a mask that is given as a
        tensor, kernels compute all of it: such attention is not causal here and has no window."""
        heads, kv_heads = (prod(x.shape[:-2]) for x in (query, key))
        head_dim = (query.shape[-1] + value.shape[-1]) // 2
        one = Attention(query.shape[-2], key.shape[-2], heads, kv_heads, head_dim, causal)
        (self.blocks if inside else self.ends).attentions[one] += 1

    def _product(self, left: Tensor, right: Tensor) -> dict[Matmul, int]:
        if not self._is_weight(right) and self._is_weight(left):
            left, right = right.mT, left.mT  # of the transposed product
        (rows, k), n, cut = left.shape[-2:], right.shape[-1], self.cuts.get(_storage(right), "")
        if right.ndim == 2:
            return {Matmul(rows, k, n, cut=cut): 1}
        n_matrices = right.shape[0]
        if left.ndim == 2:
            return {Matmul(rows, k, n, cut=cut, experts=n_matrices): 1}
        if self._is_weight(right):
            return {Matmul(rows * n_matrices, k, n, cut=cut, experts=n_matrices): 1}
        return {Matmul(rows, k, n): n_matrices}

    def _is_weight(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self.parameters


def operations_of(model: nn.Module, cut_dims: Mapping[str, int]) -> Operations:
    """`cut_dims`: name of a parameter -> the dimension that tp cuts; a weight is [n, k], as
    nn.Linear has it."""
    named = dict(model.named_parameters(remove_duplicate=False))
    cuts = {
        _storage(named[name]): ("n", "k")[dim]
        for name, dim in cut_dims.items()
        if named[name].ndim == 2
    }
    return Operations(cuts, frozenset(map(_storage, named.values())))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _convolution(
    x: Tensor, weight: Tensor, out: Tensor, *, transposed: bool, groups: int
) -> dict[Matmul, int]:
    """As the product of its patches and its kernels, once per group."""
    of = x if transposed else out
    rows, channels = of.shape[0] * prod(of.shape[2:]), of.shape[1] // groups
    patch = weight.shape[1] * prod(weight.shape[2:])
    return {Matmul(rows, *((channels, patch) if transposed else (patch, channels))): groups}


def _moved(name: str, given: Iterable[Tensor], made: Iterable[Tensor]) -> int:
    """Bytes read and written; of an expanded tensor, those that are there."""
    read, written = [*map(_bytes, given)], sum(map(_bytes, made))
    if name in LOOKUPS:
        read[0] = written
    return sum(read) + written


def _bytes(tensor: Tensor) -> int:
    there: int = tensor.untyped_storage().nbytes()
    whole: int = tensor.numel() * tensor.element_size()
    return min(whole, there)
