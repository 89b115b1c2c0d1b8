"""Boxes of the training state that each rank holds under a Layout, from the model's TensorSpecs.
Integers only.

A tensor is cut like `torch.chunk` over tp along `tp_dim`, and that part like `torch.chunk` over
fsdp (= dp_shard x cp, one merged axis) along dimension 0; weights of experts first over ep, then
over the ranks of fsdp that have the same experts. Pieces may be empty. Buffers and 0-dim tensors
are whole on every rank that holds them. What an optimizer keeps that steps whole tensors
is whole, and of each pipeline stage only at the parameter's owner, on any axis.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from elastic.errors import SpecError
from elastic.reshard.owners import FLOP_PER_BYTE, shared_out
from elastic.types import DTYPE_BYTES, Box, Layout, ModelProfile, TensorSpec
from elastic.types.grid import coordinates, stage_ranks
from elastic.types.replacing import follows_from, replace

RNG = "elastic.rng"
LOSS_SCALE = "elastic.loss_scale"
EXTRA = "extra."  # what the names of extra_state's boxes begin with

Span = tuple[int, int]  # offset and size along one dimension
Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Kind = tuple[tuple[int | None, ...], bool, bool, bool, str]


@dataclass(frozen=True)
class Placed:
    """A tensor of the training state and the blocks that need it: its own first, then those of
    tensors tied to it. `of`: the parameter at whose owner it is, '' = it is held as it is cut."""

    spec: TensorSpec
    blocks: tuple[int | None, ...]
    of: str = ""

    @cached_property
    def kind(self) -> Kind:
        """Tensors of equal kind are held by the same ranks, piece by piece."""
        return self.blocks, self.tp_cut, self.fsdp_cut, self.ep_cut, self.of

    @property
    def tp_cut(self) -> bool:
        return self.spec.tp_dim is not None and not self.spec.buffer and bool(self.spec.shape)

    @property
    def fsdp_cut(self) -> bool:
        return not self.spec.buffer and bool(self.spec.shape) and not self.of

    @property
    def ep_cut(self) -> bool:
        return self.spec.by_expert and self.fsdp_cut


def state_specs(model: ModelProfile) -> tuple[TensorSpec, ...]:
    """All of the training state: `model.<fqn>`, `optim.<entry>.<fqn>` (tied ones once),
    `extra.<name>`, `elastic.rng`."""
    return tuple(placed.spec for placed in placements(model))


@follows_from()
def placements(model: ModelProfile) -> tuple[Placed, ...]:
    """The training state with the blocks that need each tensor, in the order of the model's
    specs."""
    out: list[Placed] = []
    for spec, blocks in _canonical(model):
        if spec.reread:
            continue
        out.append(Placed(replace(spec, fqn=f"model.{spec.fqn}"), blocks))
        kept = model.kept_of(spec)
        for entry in kept.entries:
            out.append(Placed(replace(spec, fqn=f"optim.{entry}.{spec.fqn}"), blocks))
        for entry in kept.scalars:
            scalar = TensorSpec(f"optim.{entry}.{spec.fqn}", (), "float32", block=spec.block)
            out.append(Placed(scalar, blocks))
        for owned in kept.owned:
            name = f"optim.{owned.name}.{spec.fqn}"
            whole = TensorSpec(name, owned.shape, owned.dtype, block=spec.block)
            out.append(Placed(whole, blocks, spec.fqn))
    out += [Placed(spec, (None,)) for spec in model.extra]
    out.append(Placed(TensorSpec(RNG, (2,), "int64", trainable=False, buffer=True), (None,)))
    return tuple(out)


@follows_from(kept=16)
def owners(
    model: ModelProfile, layout: Layout, layers: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """Parameter -> the rank that steps it whole, of each place on the pp axis that has it, in
    ascending order; only of those whose optimizer is not element-wise."""
    if not model.by_owners:
        return {}
    costs: dict[int, dict[str, int]] = {}
    for spec, blocks in _canonical(model):
        kept = model.kept_of(spec)
        if kept.form:
            n_bytes = 2 * prod(spec.shape) * DTYPE_BYTES[spec.dtype] + owned_bytes(model, spec)
            for pp in stages_of(blocks, model, layout, layers=layers):
                costs.setdefault(pp, {})[spec.fqn] = int(kept.flop) + FLOP_PER_BYTE * n_bytes
    out: dict[str, tuple[int, ...]] = {}
    for pp in sorted(costs):
        ranks = stage_ranks(layout, pp)
        for fqn, k in shared_out(costs[pp], len(ranks)).items():
            out[fqn] = (*out.get(fqn, ()), ranks[k])
    return out


def owned_bytes(model: ModelProfile, spec: TensorSpec) -> int:
    """Of what the owner of the parameter keeps for it."""
    return sum(prod(one.shape) * DTYPE_BYTES[one.dtype] for one in model.kept_of(spec).owned)


def first_values(model: ModelProfile) -> dict[str, float]:
    """Name in the training state -> what all elements of it begin as, of the optimizers' entries
    that do not begin as 0."""
    return {
        f"optim.{entry}.{spec.fqn}": value
        for spec, _ in _canonical(model)
        for entry, value in model.kept_of(spec).first
    }


def boxes(
    model: ModelProfile,
    layout: Layout,
    layers: tuple[int, ...],
    rank: int,
    *,
    state: Sequence[Placed] = (),
) -> tuple[Box, ...]:
    """What `rank` holds, empty boxes left out; `layers[i]` = number of blocks of stage i. `state`:
    the model's `placements`, where they are known already."""
    placed = state or placements(model)
    return _boxes(model, layout, layers, rank=rank, state=placed, owned_only=False)


def reread_boxes(
    model: ModelProfile, layout: Layout, layers: tuple[int, ...], *, rank: int
) -> tuple[Box, ...]:
    """What `rank` holds besides the training state: frozen weights."""
    frozen = [
        Placed(replace(spec, fqn=f"model.{spec.fqn}"), blocks)
        for spec, blocks in _canonical(model)
        if spec.reread
    ]
    return _boxes(model, layout, layers, rank=rank, state=frozen, owned_only=False)


def owned_boxes(
    model: ModelProfile, layout: Layout, layers: tuple[int, ...], rank: int
) -> tuple[Box, ...]:
    """The part of `boxes` that `rank` answers for: over all ranks every element of the state
    exactly once."""
    return _boxes(model, layout, layers, rank=rank, state=placements(model), owned_only=True)


def stages_of(
    blocks: tuple[int | None, ...], model: ModelProfile, layout: Layout, *, layers: tuple[int, ...]
) -> tuple[int, ...]:
    """Places on the pp axis whose ranks hold a tensor which these blocks need, in ascending
    order."""
    if layout.pp == 1:
        return (0,)
    if None in blocks:
        return tuple(range(layout.pp))
    return tuple(
        sorted(
            {
                _stage_of(block, model.n_blocks, layers) % layout.pp
                for block in blocks
                if block is not None
            }
        )
    )


def check_layers(model: ModelProfile, layout: Layout, layers: tuple[int, ...]) -> None:
    """Raises SpecError unless `layers` spreads all blocks over the stages (one stage needs no
    list)."""
    if layout.pp == 1 and not layers:
        return
    if len(layers) != layout.n_stages or sum(layers) != model.n_blocks or min(layers) < 0:
        stages = f"pp={layout.pp}" + (
            f" with {layout.n_stages} stages" if layout.n_stages > layout.pp else ""
        )
        raise SpecError(
            f"layers per stage {list(layers)} do not fit {stages} and {model.n_blocks} blocks; "
            f"{layout.n_stages} numbers with the sum {model.n_blocks} are needed"
        )


def chunk(size: int, n: int, index: int) -> Span:
    """Offset and size of part `index` when `torch.chunk` cuts `size` elements into `n` parts (late
    ones may be empty)."""
    step = -(-size // n)
    start = min(index * step, size)
    return start, min(step, size - start)


def fsdp_chunk(size: int, n: int, index: int, *, ep: int) -> Span:
    """Offset and size of part `index` of the n that fsdp cuts `size` elements into. With ep > 1
    neighbors have other experts: it is a part of those that the rank has with others."""
    start, mine = chunk(size, ep, index % ep)
    at, length = chunk(mine, n // ep, index // ep)
    return start + at, length


def region(placed: Placed, tp: tuple[int, int], fsdp: tuple[int, int], *, ep: int) -> Region:
    """Offsets and sizes of the piece at index tp[0] of tp[1] and fsdp[0] of fsdp[1]."""
    shape = placed.spec.shape
    offsets, sizes = [0] * len(shape), list(shape)
    if placed.tp_cut and placed.spec.tp_dim is not None:
        dim = placed.spec.tp_dim
        offsets[dim], sizes[dim] = chunk(shape[dim], tp[1], tp[0])
    if placed.fsdp_cut:
        start, size = fsdp_chunk(sizes[0], fsdp[1], fsdp[0], ep=ep if placed.ep_cut else 1)
        offsets[0], sizes[0] = offsets[0] + start, size
    return tuple(offsets), tuple(sizes)


def meet(one: Region, two: Region) -> Region | None:
    """What two regions of a tensor have in common; None when that is empty."""
    offsets, sizes = [], []
    for offset, size, other, length in zip(*one, *two, strict=True):
        start, end = max(offset, other), min(offset + size, other + length)
        if start >= end:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return tuple(offsets), tuple(sizes)


def _boxes(
    model: ModelProfile,
    layout: Layout,
    layers: tuple[int, ...],
    *,
    rank: int,
    state: Iterable[Placed],
    owned_only: bool,
) -> tuple[Box, ...]:
    check_layers(model, layout, layers)
    at = coordinates(layout, rank)
    tp, fsdp = (at.tp, layout.tp), (at.fsdp(layout), layout.dp_shard * layout.cp)
    owner = owners(model, layout, layers)
    out = []
    for placed in state:
        stages = stages_of(placed.blocks, model, layout, layers=layers)
        if at.pp not in stages:
            continue
        if placed.of:
            if rank not in owner[placed.of][: 1 if owned_only else None]:
                continue
        elif owned_only and (
            at.dp_replicate
            or at.pp != stages[0]
            or (at.tp and not placed.tp_cut)
            or (fsdp[0] and not placed.fsdp_cut)
        ):
            continue
        offsets, sizes = region(placed, tp, fsdp, ep=layout.ep)
        if 0 not in sizes:
            out.append(Box(placed.spec.fqn, offsets, sizes, placed.spec.dtype))
    return tuple(out)


def _canonical(model: ModelProfile) -> list[tuple[TensorSpec, tuple[int | None, ...]]]:
    """Untied specs with the blocks of those that are tied to them."""
    blocks: dict[str, list[int | None]] = {}
    root: dict[str, str] = {}
    for spec in model.specs:
        if spec.tied_to is None:
            root[spec.fqn] = spec.fqn
            blocks[spec.fqn] = [spec.block]
        elif spec.tied_to in root:
            root[spec.fqn] = root[spec.tied_to]
            blocks[root[spec.fqn]].append(spec.block)
        else:
            raise SpecError(
                f"{spec.fqn} is tied to {spec.tied_to}, which no earlier tensor of the model is "
                "named"
            )
    return [
        (spec, tuple(dict.fromkeys(blocks[spec.fqn])))
        for spec in model.specs
        if spec.tied_to is None
    ]


def _stage_of(block: int, n_blocks: int, layers: tuple[int, ...]) -> int:
    if block < 0:
        return 0
    if block >= n_blocks:
        return len(layers) - 1
    return bisect_right(tuple(accumulate(layers)), block)
