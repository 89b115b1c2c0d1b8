"""How the bytes of a pair of participants are cut into messages, and how much memory that takes.
Both ends compute it alike.

A piece of at least `Sizes.pack_bytes` is cut into slices that travel alone: from memory to memory
where the region is contiguous. Smaller pieces travel together, each at a multiple of ALIGN bytes.

How large messages are depends on what carries them. On a CPU (gloo) they should fit the cache. On
CUDA (NCCL) each message costs launches and Python, the memory is fast enough to pack everything,
and the host must not wait for single messages. There a round is one group of operations with few
peers, so that large messages fit the staging memory whatever the number of peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from elastic.types import Transfer

# fits the cache: the 64-bit sum costs little there; gloo is fastest between 1 and 8 MiB
CHUNK_BYTES = 2 << 20
PACK_BYTES = 512 << 10  # below it a message of its own costs more than a copy
LEAST_BYTES = 256 << 10
STAGING_BYTES = 32 << 20
ALIGN = 8
LEAST_S = 0.02  # of a move, whatever its bytes: agreement on the step, sums, last answers


@dataclass(frozen=True)
class Sizes:
    """Bytes of a move by what its wire takes. `chunk_bytes`: the most that a message holds; with
    many participants less, but `least_bytes` at least. `pack_bytes`: smaller pieces travel
    together. `own_bytes`: of the own memory's copies, between two looks at the wire. `grouped`: a
    round is one group of operations with few peers, and the sums of the messages stay on the device
    until the end."""

    chunk_bytes: int
    pack_bytes: int
    least_bytes: int
    staging_bytes: int
    own_bytes: int
    grouped: bool


CPU_SIZES = Sizes(
    CHUNK_BYTES, PACK_BYTES, LEAST_BYTES, STAGING_BYTES, own_bytes=16 << 20, grouped=False
)
CUDA_SIZES = Sizes(128 << 20, 64 << 20, 128 << 20, 1 << 30, own_bytes=1 << 30, grouped=True)


def sizes_of(device_type: str) -> Sizes:
    """Of a wire that takes memory of this kind of device, such as cpu or cuda."""
    return CPU_SIZES if device_type == "cpu" else CUDA_SIZES


def chunk_bytes(n_participants: int, sizes: Sizes = CPU_SIZES) -> int:
    """The most that a message holds: those of one round must fit the staging memory."""
    return max(
        sizes.least_bytes,
        min(sizes.chunk_bytes, sizes.staging_bytes // _streams(n_participants, sizes)),
    )


def staging_bytes(n_participants: int, sizes: Sizes = CPU_SIZES) -> int:
    """The most that a participant has in staging buffers at any time."""
    return max(sizes.staging_bytes, _streams(n_participants, sizes) * sizes.least_bytes)


def _streams(n_participants: int, sizes: Sizes) -> int:
    """Messages of one round that a participant sends and receives."""
    return 2 * max(1, min(n_participants - 1, peers_at_once(n_participants, sizes)))


def peers_at_once(n_participants: int, sizes: Sizes = CPU_SIZES) -> int:
    """Peers to which a participant sends, and from which it receives, in one round. Grouped: as
    many as let two rounds fit the staging memory, so that one is packed while the other is under
    way."""
    return (
        max(1, sizes.staging_bytes // (4 * sizes.chunk_bytes)) if sizes.grouped else n_participants
    )


def lane(source: int, destination: int, n_participants: int, sizes: Sizes = CPU_SIZES) -> int:
    """The part of a round to which the messages of a pair belong. The same at both ends, and each
    participant has at most `peers_at_once` pairs each way in it: pairs go by their distance around
    the ring of participants."""
    return ((destination - source) % n_participants - 1) // peers_at_once(n_participants, sizes)


def padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def message_bytes(message: Sequence[Transfer]) -> int:
    """Bytes of a message on the wire."""
    return (
        message[0].n_bytes if len(message) == 1 else sum(padded(piece.n_bytes) for piece in message)
    )


def messages(
    pieces: Iterable[Transfer], limit: int, sizes: Sizes = CPU_SIZES
) -> Iterator[list[Transfer]]:
    """The pieces of one pair in messages of at most `limit` bytes."""
    pack: list[Transfer] = []
    size, alone = 0, min(sizes.pack_bytes, limit)
    for piece in pieces:
        cut = piece.n_bytes >= alone
        for part in split(piece, limit) if cut else (piece,):
            if cut and (part.n_bytes >= alone or not sizes.grouped):
                yield [part]
                continue
            if pack and size + padded(part.n_bytes) > limit:
                yield pack
                pack, size = [], 0
            pack.append(part)
            size += padded(part.n_bytes)
    if pack:
        yield pack


def split(piece: Transfer, limit: int) -> Iterator[Transfer]:
    """The piece in slices of at most `limit` bytes, along its first dimension that can be cut."""
    dim = next((d for d, size in enumerate(piece.sizes) if size > 1), None)
    if piece.n_bytes <= limit or dim is None:
        yield piece
        return
    step = max(1, limit * piece.sizes[dim] // piece.n_bytes)
    for start in range(0, piece.sizes[dim], step):
        n = min(step, piece.sizes[dim] - start)
        offsets = (*piece.offsets[:dim], piece.offsets[dim] + start, *piece.offsets[dim + 1 :])
        yield from split(
            replace(piece, offsets=offsets, sizes=(*piece.sizes[:dim], n, *piece.sizes[dim + 1 :])),
            limit,
        )
