"""Carries out Transfers over the participants' group: bounded chunks, own memory first, a 64-bit sum per chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from elastic.errors import StateLost
from elastic.types import Transfer

CHUNK_BYTES = 8 << 20
SUM_BYTES = 8

Region = Callable[[Transfer], torch.Tensor]


@dataclass(frozen=True)
class Moved:
    """What a participant sent, received and copied in its own memory."""

    sent_bytes: int = 0
    received_bytes: int = 0
    own_bytes: int = 0


def carry_out(transfers: Sequence[Transfer], me: int, read: Region, write: Region, group: dist.ProcessGroup) -> Moved:
    """Moves every region from its source to its destination.

    `read(transfer)` gives the source region, `write(transfer)` the destination region (views). All participants call this
    with the same transfers. At most two chunks per pair of ranks are in memory. Raises StateLost when a chunk's sum is wrong.
    """
    own = 0
    for transfer in transfers:
        if transfer.source == me == transfer.destination:
            write(transfer).copy_(read(transfer))
            own += transfer.n_bytes
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        if transfer.source != transfer.destination and me in (transfer.source, transfer.destination):
            pairs.setdefault((transfer.source, transfer.destination), []).append(transfer)
    streams = {pair: chunks(pieces) for pair, pieces in sorted(pairs.items())}
    sent = received = 0
    for k in itertools.count():
        round_ = {pair: chunk for pair, stream in streams.items() if (chunk := next(stream, None))}
        if not round_:
            break
        s, r = _round(round_, k, me, read, write, group)
        sent, received = sent + s, received + r
    return Moved(sent, received, own)


def _round(
    chunk_of: dict[tuple[int, int], list[Transfer]], k: int, me: int, read: Region, write: Region, group: dist.ProcessGroup
) -> tuple[int, int]:
    """The k-th chunk of each pair; every participant posts its sends and receives before it waits, so none waits in a ring."""
    works: list[dist.Work | None] = []
    incoming: list[tuple[torch.Tensor, list[Transfer], int]] = []
    keep: list[torch.Tensor] = []
    sent = 0
    tag = k % 30000
    for (source, destination), pieces in chunk_of.items():
        if destination == me:
            buffer = torch.empty(_padded(pieces) + SUM_BYTES, dtype=torch.uint8)
            incoming.append((buffer, pieces, source))
            works.append(dist.irecv(buffer, group=group, group_src=source, tag=tag))
    for (source, destination), pieces in chunk_of.items():
        if source == me:
            buffer = pack(pieces, read)
            keep.append(buffer)
            works.append(dist.isend(buffer, group=group, group_dst=destination, tag=tag))
            sent += sum(p.n_bytes for p in pieces)
    for work in works:
        if work is not None:
            work.wait()
    received = 0
    for buffer, pieces, source in incoming:
        unpack(buffer, pieces, write, source)
        received += sum(p.n_bytes for p in pieces)
    return sent, received


def chunks(pieces: Sequence[Transfer], limit: int = CHUNK_BYTES) -> Iterator[list[Transfer]]:
    """Consecutive pieces of at most `limit` bytes together; a larger piece is cut along its first dimension."""
    out: list[Transfer] = []
    size = 0
    for piece in itertools.chain.from_iterable(split(p, limit) for p in pieces):
        if out and size + piece.n_bytes > limit:
            yield out
            out, size = [], 0
        out.append(piece)
        size += piece.n_bytes
    if out:
        yield out


def split(piece: Transfer, limit: int) -> Iterator[Transfer]:
    """The piece in slices along dimension 0 of at most `limit` bytes each (one row at least)."""
    if piece.n_bytes <= limit or not piece.sizes or piece.sizes[0] < 2:
        yield piece
        return
    rows = max(1, limit * piece.sizes[0] // piece.n_bytes)
    for start in range(0, piece.sizes[0], rows):
        n = min(rows, piece.sizes[0] - start)
        yield replace(piece, offsets=(piece.offsets[0] + start, *piece.offsets[1:]), sizes=(n, *piece.sizes[1:]))


def _padded(pieces: Sequence[Transfer]) -> int:
    return -(-sum(p.n_bytes for p in pieces) // 8) * 8


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def pack(pieces: Sequence[Transfer], read: Region) -> torch.Tensor:
    """The pieces' bytes one after the other, padded to 8, then their 64-bit sum."""
    n = _padded(pieces)
    buffer = torch.zeros(n + SUM_BYTES, dtype=torch.uint8)
    at = 0
    for piece in pieces:
        data = _as_bytes(read(piece).cpu())
        buffer[at : at + piece.n_bytes] = data
        at += piece.n_bytes
    buffer[n:].view(torch.int64)[0] = buffer[:n].view(torch.int64).sum()
    return buffer


def unpack(buffer: torch.Tensor, pieces: Sequence[Transfer], write: Region, source: int) -> None:
    """The inverse of `pack`. Raises StateLost when the sum does not agree with the bytes."""
    n = buffer.numel() - SUM_BYTES
    if int(buffer[n:].view(torch.int64)[0]) != int(buffer[:n].view(torch.int64).sum()):
        raise StateLost(f"{n} bytes from participant {source} ({pieces[0].fqn} ...) arrived altered: their 64-bit sums differ")
    at = 0
    for piece in pieces:
        target = write(piece)
        part = buffer[at : at + piece.n_bytes].clone() if at % 8 else buffer[at : at + piece.n_bytes]
        target.copy_(part.view(target.dtype).view(target.shape))
        at += piece.n_bytes
