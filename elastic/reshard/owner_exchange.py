"""Which pieces of whole-stepped parameters go between the ranks of a pipeline stage: gradients and
values to the owners, new values back. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from elastic.reshard.rank_boxes import Placed, Region, owners, placements, region
from elastic.types import DTYPE_BYTES, Layout, ModelProfile, TensorSpec
from elastic.types.grid import Coordinates, coordinates, stage_ranks
from elastic.types.replacing import replace

# of whole tensors and their gradients at an owner: long enough to be sent at a link's full rate
BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class SteppedWhole:
    """A parameter as one rank sees it; ranks count within the stage. `mine`: this rank's piece,
    None = it has none. `gives`: is that what the owner gathers? `sources`: at the owner, the pieces
    that it gathers, each from one rank of its own replica; `targets`: who gets which piece back."""

    spec: TensorSpec
    owner: int
    mine: Region | None
    gives: bool
    sources: tuple[tuple[int, Region], ...] = ()
    targets: tuple[tuple[int, Region], ...] = ()

    @property
    def whole_bytes(self) -> int:
        """Of the tensor and its gradient at the owner."""
        return 2 * prod(self.spec.shape) * DTYPE_BYTES[self.spec.dtype]


def in_buckets(stepped: Sequence[SteppedWhole], most_bytes: int) -> list[tuple[SteppedWhole, ...]]:
    """What is gathered, stepped and sent back together, the same on all ranks of the stage. Each
    owner has about the same part of its tensors in each bucket, so that no bucket waits for one of
    them: at most `most_bytes` of tensors and gradients, and one tensor more."""
    totals: Counter[int] = Counter()
    for one in stepped:
        totals[one.owner] += one.whole_bytes
    n = max((-(-total // most_bytes) for total in totals.values()), default=0)
    buckets: list[list[SteppedWhole]] = [[] for _ in range(n)]
    before: Counter[int] = Counter()
    for one in stepped:
        buckets[before[one.owner] * n // max(1, totals[one.owner])].append(one)
        before[one.owner] += one.whole_bytes
    return [tuple(bucket) for bucket in buckets if bucket]


def stepped_whole(
    model: ModelProfile, layout: Layout, layers: tuple[int, ...], *, rank: int
) -> list[SteppedWhole]:
    """The parameters of the rank's stage that are stepped whole, in one order on all of its
    ranks."""
    if not model.by_owners:
        return []
    at = coordinates(layout, rank)
    first = stage_ranks(layout, at.pp)[0]
    here = range(first, first + layout.world_size // layout.pp)
    named = {f"model.{fqn}": who for fqn, who in owners(model, layout, layers).items()}
    out = []
    for placed in placements(model):
        owner = next((r for r in named.get(placed.spec.fqn, ()) if r in here), None)
        if owner is None:
            continue
        top, mine = coordinates(layout, owner), _piece(placed, layout, at)
        spec = replace(placed.spec, fqn=placed.spec.fqn.removeprefix("model."))
        gives = mine is not None and _gives(placed, at, top)
        one = SteppedWhole(spec, owner - first, mine, gives)
        if rank == owner:
            pieces = [
                (r - first, coordinates(layout, r), p) for r, p in _pieces(placed, layout, here)
            ]
            sources = tuple((k, piece) for k, other, piece in pieces if _gives(placed, other, top))
            targets = tuple((k, piece) for k, _, piece in pieces)
            one = replace(one, sources=sources, targets=targets)
        out.append(one)
    return out


def _pieces(placed: Placed, layout: Layout, ranks: range) -> Iterator[tuple[int, Region]]:
    for rank in ranks:
        piece = _piece(placed, layout, coordinates(layout, rank))
        if piece is not None:
            yield rank, piece


def _piece(placed: Placed, layout: Layout, at: Coordinates) -> Region | None:
    fsdp = at.fsdp(layout), layout.dp_shard * layout.cp
    found = region(placed, (at.tp, layout.tp), fsdp, ep=layout.ep)
    return None if 0 in found[1] else found


def _gives(placed: Placed, at: Coordinates, owner: Coordinates) -> bool:
    """Of the owner's replica each piece once: from the ranks that stand where it stands, but on the
    axes that cut the tensor."""
    return (
        at.dp_replicate == owner.dp_replicate
        and (placed.tp_cut or at.tp == owner.tp)
        and (placed.fsdp_cut or (at.dp_shard, at.cp) == (owner.dp_shard, owner.cp))
    )
