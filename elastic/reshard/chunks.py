"""How the bytes of a pair of participants are cut into messages, and how much memory that takes. Both ends compute it alike.

A piece of at least PACK_BYTES is cut into slices that travel alone: from memory to memory where the region is contiguous.
Smaller pieces travel together, each at a multiple of ALIGN bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from elastic.types import Transfer

CHUNK_BYTES = 2 << 20  # fits the cache: the 64-bit sum costs little there; gloo is fastest between 1 and 8 MiB
PACK_BYTES = 512 << 10  # below it a message of its own costs more than a copy
LEAST_BYTES = 256 << 10
STAGING_BYTES = 32 << 20
ALIGN = 8


def chunk_bytes(n_participants: int) -> int:
    """The most that a message holds: one to and from each peer must fit the staging memory."""
    streams = 2 * max(1, n_participants - 1)
    return max(LEAST_BYTES, min(CHUNK_BYTES, STAGING_BYTES // streams))


def staging_bytes(n_participants: int) -> int:
    """The most that a participant has in staging buffers at any time."""
    return max(STAGING_BYTES, 2 * (n_participants - 1) * LEAST_BYTES)


def padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def message_bytes(message: Sequence[Transfer]) -> int:
    """Bytes of a message on the wire."""
    return message[0].n_bytes if len(message) == 1 else sum(padded(piece.n_bytes) for piece in message)


def messages(pieces: Iterable[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The pieces of one pair in messages of at most `limit` bytes."""
    pack: list[Transfer] = []
    size = 0
    for piece in pieces:
        if piece.n_bytes >= min(PACK_BYTES, limit):
            for part in split(piece, limit):
                yield [part]
            continue
        if pack and size + padded(piece.n_bytes) > limit:
            yield pack
            pack, size = [], 0
        pack.append(piece)
        size += padded(piece.n_bytes)
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
        yield from split(replace(piece, offsets=offsets, sizes=(*piece.sizes[:dim], n, *piece.sizes[dim + 1 :])), limit)
