"""What a model is to the cost formulas: sums over its tensors, made once, since a search asks for
them thousands of times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from elastic.reshard.rank_boxes import owned_bytes
from elastic.types import DTYPE_BYTES, ModelProfile, SampleProfile, TensorSpec

NF4_BYTES = 34 / 64  # of a weight: elastic/models/nf4.py
UNPACKED_BYTES = 6  # of a weight: its value, and a half of an index into the table of values


@dataclass(frozen=True)
class TpBytes:
    """Of some tensors: `cut`: of those that tp cuts; `whole`: of those that are whole on each of
    its ranks."""

    cut: float = 0.0
    whole: float = 0.0

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> TpBytes:
        found = [0.0, 0.0]
        for spec in specs:
            found[spec.tp_dim is None] += _bytes(spec)
        return cls(*found)

    @property
    def total(self) -> float:
        return self.cut + self.whole

    def on(self, tp: int) -> float:
        """Of one of so many ranks."""
        return self.cut / tp + self.whole

    def __add__(self, other: TpBytes) -> TpBytes:
        return TpBytes(self.cut + other.cut, self.whole + other.whole)

    def __truediv__(self, n: int) -> TpBytes:
        return TpBytes(self.cut / n, self.whole / n)


@dataclass(frozen=True, eq=False)
class ModelCost:
    """Bytes as the parameters are stored. `block`, `experts`: of a mean block, without and with
    experts only; `first`, `last`: before and behind the blocks, a tied matrix in both; `tied`: of
    `last`, what a single stage has only once. `trained`: the share of the parameters that is
    trained; `entries`: optimizer entries of the parameter's shape, on average over those. Of
    parameters that are stepped whole, at owners: `whole`, `whole_flop` of all steps, `most_flop` of
    one. `packed`: the share of the bytes that are frozen weights in 4 bits, `most_packed`: of the
    largest of these. `reread`: of what is no part of the training state."""

    model: ModelProfile
    n_blocks: int
    block: TpBytes
    experts: TpBytes
    first: TpBytes
    last: TpBytes
    tied: TpBytes
    trained: float
    entries: float
    whole: float = 0.0
    whole_flop: float = 0.0
    most_flop: float = 0.0
    packed: float = 0.0
    most_packed: float = 0.0
    reread: float = 0.0

    @classmethod
    def of(cls, model: ModelProfile) -> ModelCost:
        specs = [spec for spec in model.specs if not spec.buffer]
        own = [spec for spec in specs if spec.tied_to is None]
        n_blocks = max(1, model.n_blocks)
        if not own:
            every = float(model.n_params * 4)
            entries = float(max((len(kept.entries) for kept in model.optimizers), default=0))
            block, no = TpBytes(every / n_blocks), TpBytes()  # nobody knows what tp would leave
            return cls(model, n_blocks, block, no, no, no, no, 1.0, entries)
        total = sum(map(_bytes, own))
        first = TpBytes.of(spec for spec in own if spec.block == -1)
        ends = [s for s in own if s.block is not None and s.block >= n_blocks]
        named = {spec.fqn: spec for spec in own}
        tied = TpBytes.of(
            named[spec.tied_to] for spec in specs if spec.tied_to in named and spec.block != -1
        )
        trained = sum(_bytes(spec) for spec in own if spec.trainable)
        entries = sum(
            _bytes(spec) * len(model.kept_of(spec).entries) + owned_bytes(model, spec)
            for spec in own
            if spec.trainable
        )
        stepped = [spec for spec in own if model.kept_of(spec).form]
        flop = [model.kept_of(spec).flop for spec in stepped]
        last, behind = TpBytes.of(ends), {spec.fqn for spec in ends}
        inside = TpBytes.of(s for s in own if s.block != -1 and s.fqn not in behind)
        block, experts = _split(model, own, inside)
        packed = [_bytes(spec) for spec in own if _is_packed(spec)]
        return cls(
            model, n_blocks, block / n_blocks, experts / n_blocks, first, last + tied, tied,
            trained / max(1, total), entries / max(1, trained), sum(map(_bytes, stepped)),
            sum(flop), max(flop, default=0.0), sum(packed) / max(1, total),
            max(packed, default=0.0), sum(_bytes(spec) for spec in own if spec.reread),
        )  # fmt: skip

    def computed(self, compute_bytes: int) -> float:
        """Bytes of the parameters in the type of a pass, of a stored byte: packed ones stay
        packed."""
        plain = compute_bytes / max(1.0, self.element_bytes)
        return self.packed + (1 - self.packed) * plain

    @property
    def sample(self) -> SampleProfile | None:
        return self.model.sample

    def loads(self, products_s: float, moved_s: float) -> tuple[float, ...]:
        """What each block takes, in mean blocks; () = all are alike. The arguments: seconds of a
        mean one, in products and attention, and in what only moves bytes."""
        sample = self.sample
        if sample is None or not sample.block_flop or products_s + moved_s <= 0:
            return ()
        flop = sum(sample.block_flop) / len(sample.block_flop) or 1.0
        moved = sum(sample.block_moved_bytes) / len(sample.block_moved_bytes) or 1.0
        found = [
            products_s * f / flop + moved_s * b / moved
            for f, b in zip(sample.block_flop, sample.block_moved_bytes, strict=True)
        ]
        mean = sum(found) / len(found)
        return tuple(one / mean for one in found)

    @cached_property
    def parameter_bytes(self) -> float:
        """Of all parameters, tied ones once."""
        ends = self.first.total + self.last.total - self.tied.total
        return self.n_blocks * (self.block.total + self.experts.total) + ends

    @property
    def gradient_bytes(self) -> float:
        return self.parameter_bytes * self.trained

    @cached_property
    def state_bytes(self) -> float:
        """Of parameters, gradients and optimizer entries."""
        return self.parameter_bytes * (1 + self.trained * (1 + self.entries))

    @property
    def copied_bytes(self) -> float:
        """Of parameters and optimizer entries: what a copy of the training state holds."""
        return self.parameter_bytes * (1 + self.trained * self.entries) - self.reread

    @cached_property
    def element_bytes(self) -> float:
        """Of a parameter as it is stored, where it is not packed."""
        n_packed = int(self.packed * self.parameter_bytes / NF4_BYTES)
        return self.parameter_bytes * (1 - self.packed) / max(1, self.model.n_params - n_packed)

    @property
    def unpacked_bytes(self) -> float:
        """What the product with the largest packed weight makes, for that time."""
        return self.most_packed / NF4_BYTES * UNPACKED_BYTES


def _split(
    model: ModelProfile, own: Sequence[TensorSpec], inside: TpBytes
) -> tuple[TpBytes, TpBytes]:
    """Of all blocks, those of experts apart. Which of the tensors are experts' may not be known,
    unless they are stacked: of what tp leaves whole they have then no more than they must."""
    share = model.n_expert_params / max(1, model.n_params)
    experts = min(inside.total, share * sum(map(_bytes, own)))
    stacked = sum(_bytes(spec) for spec in own if spec.by_expert and spec.tp_dim is None)
    whole = min(experts, inside.whole, max(stacked, inside.whole - (inside.total - experts)))
    cut = experts - whole
    return TpBytes(inside.cut - cut, inside.whole - whole), TpBytes(cut, whole)


def _is_packed(spec: TensorSpec) -> bool:
    return spec.dtype == "uint8" and not spec.trainable


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPE_BYTES.get(spec.dtype, 4)
