"""Carries out Transfers over the participants' group: from memory to memory, many messages in flight, a 64-bit sum of each.

A region that is contiguous is sent from where it lies and received where it belongs; others, and small ones together, pass
through staging buffers of bounded size. Round k is the k-th message of every pair; a participant waits for round k only when
it has posted that round of all its pairs, so that nobody waits in a ring, and no barrier stands between rounds.
The sums of a pair travel in one message behind its last one.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist

from elastic.errors import StateLost
from elastic.reshard.chunks import ALIGN, STAGING_BYTES, chunk_bytes, message_bytes, messages, padded, split, staging_bytes
from elastic.types import Transfer

AHEAD = 256  # rounds in flight; what needs no staging takes no memory there
OWN_BYTES = 16 << 20  # of the own memory's copies, between two looks at the wire
WORD = 8

Region = Callable[[Transfer], torch.Tensor]
Message = list[Transfer]


@dataclass(frozen=True)
class Moved:
    """What a participant sent, received and copied in its own memory, and the most that its staging buffers held."""

    sent_bytes: int = 0
    received_bytes: int = 0
    own_bytes: int = 0
    staging_bytes: int = 0


@dataclass
class _Stream:
    """All messages from or to one peer, with their sums."""

    peer: int
    sends: bool
    messages: list[Message]
    sums: list[int] = field(default_factory=list)


@dataclass
class _Flight:
    """A message on its way. `region`: where its bytes lie or belong; None = they pass through `buffer`."""

    stream: _Stream
    message: Message
    n_bytes: int
    region: torch.Tensor | None
    buffer: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def data(self) -> torch.Tensor:
        """The bytes that the wire takes from or writes to."""
        if self.region is not None:
            return self.region
        assert self.buffer is not None
        return self.buffer[: self.n_bytes]


def carry_out(
    transfers: Sequence[Transfer], me: int, read: Region, write: Region, group: dist.ProcessGroup, device: torch.device
) -> Moved:
    """Moves every region from its source to its destination.

    `transfers`: those of participant `me` at least; `read(transfer)` gives the source region, `write(transfer)` the destination
    region (views). `device`: what the wire takes (cpu = gloo, cuda = NCCL); regions elsewhere are staged there. Raises
    StateLost, naming the chunk, when a sum is wrong.
    """
    return _Exchange(transfers, me, (read, write), (group, device)).run()


_spare: list[torch.Tensor] = []  # staging buffers in host memory stay for the next move: memory that was touched before is fast


def warm_staging() -> None:
    """Takes the staging memory of a small group and touches it, so that the first move need not (part of Prepare)."""
    n_bytes = chunk_bytes(2)
    while len(_spare) * n_bytes < STAGING_BYTES:
        _spare.append(torch.zeros(n_bytes, dtype=torch.uint8))


class _Exchange:
    def __init__(
        self,
        transfers: Sequence[Transfer],
        me: int,
        regions: tuple[Region, Region],
        wire: tuple[dist.ProcessGroup, torch.device],
    ) -> None:
        self.me, (self.read, self.write), (self.group, self.device) = me, regions, wire
        n = dist.get_world_size(self.group)
        self.most_staged, self.chunk_bytes = staging_bytes(n), chunk_bytes(n)
        self.streams = _streams(transfers, me, self.chunk_bytes)
        self.spare = _spare if self.device.type == "cpu" else []
        self.own = _own(transfers, me)
        self.own_bytes = self.staged = self.peak_staged = 0

    def run(self) -> Moved:
        flying: deque[list[_Flight]] = deque()
        coming = self._rounds()
        ready = next(coming, None)
        while ready or flying:
            while ready and len(flying) < AHEAD and (not flying or self._fits(ready)):
                self._post(ready)
                flying.append(ready)
                ready = next(coming, None)
            self._copy_own()
            self._finish(flying.popleft())
        while self._copy_own():
            continue
        self._compare_sums()
        sent, received = (
            sum(t.n_bytes for s in self.streams if s.sends is sends for message in s.messages for t in message)
            for sends in (True, False)
        )
        return Moved(sent, received, self.own_bytes, self.peak_staged)

    def _rounds(self) -> Iterator[list[_Flight]]:
        """Receives first, so that what arrives finds its place."""
        streams = sorted(self.streams, key=lambda stream: (stream.sends, (stream.peer - self.me) % (1 << 30)))
        for round_ in zip_longest(*(stream.messages for stream in streams)):
            yield [self._flight(stream, message) for stream, message in zip(streams, round_, strict=True) if message]

    def _flight(self, stream: _Stream, message: Message) -> _Flight:
        region = None
        if len(message) == 1:
            there = (self.read if stream.sends else self.write)(message[0])
            if there.device == self.device and there.is_contiguous():
                region = _as_bytes(there)
        return _Flight(stream, message, message_bytes(message), region)

    def _fits(self, round_: list[_Flight]) -> bool:
        return self.staged + self.chunk_bytes * sum(flight.region is None for flight in round_) <= self.most_staged

    def _staging(self) -> torch.Tensor:
        if self.spare and self.spare[-1].numel() >= self.chunk_bytes:
            return self.spare.pop()
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------------------------------------ the wire

    def _post(self, round_: list[_Flight]) -> None:
        for flight in round_:
            if flight.region is None:
                flight.buffer = self._staging()
                self.staged += self.chunk_bytes
                if flight.stream.sends:
                    pack(flight.message, self.read, flight.buffer)
        self.peak_staged = max(self.peak_staged, self.staged)
        works = self._start([(f.stream, f.data) for f in round_])
        for flight, work in zip(round_, works, strict=True):
            flight.work = work
        for flight in round_:
            if flight.stream.sends:
                flight.stream.sums.append(sum64(flight.data))

    def _start(self, wanted: Sequence[tuple[_Stream, torch.Tensor]]) -> list[dist.Work | None]:
        if self.device.type == "cuda":  # NCCL: in one group, or two peers that start in another order wait for each other
            ops = [dist.P2POp(dist.isend if s.sends else dist.irecv, t, group=self.group, group_peer=s.peer) for s, t in wanted]
            works = dist.batch_isend_irecv(ops) if ops else []
            return [*works, *[None] * (len(wanted) - len(works))]
        return [
            dist.isend(tensor, group=self.group, group_dst=stream.peer)
            if stream.sends
            else dist.irecv(tensor, group=self.group, group_src=stream.peer)
            for stream, tensor in wanted
        ]

    def _finish(self, round_: list[_Flight]) -> None:
        for flight in round_:
            if flight.work is not None:
                flight.work.wait()
            if not flight.stream.sends:
                flight.stream.sums.append(sum64(flight.data))
                if flight.buffer is not None:
                    unpack(flight.buffer, flight.message, self.write)
            if flight.buffer is not None:
                self.staged -= self.chunk_bytes
                if len(self.spare) * self.chunk_bytes < self.most_staged:
                    self.spare.append(flight.buffer)
            flight.buffer = flight.region = None

    def _copy_own(self) -> bool:
        for transfer in self.own:
            self.write(transfer).copy_(self.read(transfer))
            self.own_bytes += transfer.n_bytes
            return True
        return False

    # ------------------------------------------------------------------------------------------ proof

    def _compare_sums(self) -> None:
        """Layer (b) of promise 5."""
        mine = [torch.tensor(stream.sums, dtype=torch.int64, device=self.device) for stream in self.streams]
        theirs = [m if stream.sends else torch.empty_like(m) for stream, m in zip(self.streams, mine, strict=True)]
        for work in self._start(list(zip(self.streams, theirs, strict=True))):
            if work is not None:
                work.wait()
        for stream, seen, told in zip(self.streams, mine, theirs, strict=True):
            if not torch.equal(seen, told):
                raise _altered(stream, next(i for i, (a, b) in enumerate(zip(seen.tolist(), told.tolist())) if a != b))


def _streams(transfers: Sequence[Transfer], me: int, limit: int) -> list[_Stream]:
    pairs: dict[tuple[int, bool], list[Transfer]] = {}
    for transfer in transfers:
        if transfer.source != transfer.destination and me in (transfer.source, transfer.destination):
            sends = transfer.source == me
            pairs.setdefault((transfer.destination if sends else transfer.source, sends), []).append(transfer)
    return [_Stream(peer, sends, list(messages(pieces, limit))) for (peer, sends), pieces in sorted(pairs.items())]


def _own(transfers: Sequence[Transfer], me: int) -> Iterator[Transfer]:
    for transfer in transfers:
        if transfer.source == me == transfer.destination:
            yield from split(transfer, OWN_BYTES)


def _altered(stream: _Stream, k: int) -> StateLost:
    message = stream.messages[k]
    names = message[0].fqn + (f" and {len(message) - 1} more" if len(message) > 1 else f" at {list(message[0].offsets)}")
    return StateLost(
        f"chunk {k + 1} of {len(stream.messages)} from participant {stream.peer} ({names}, {message_bytes(message)} bytes) "
        "arrived altered: its 64-bit sum differs from the sender's"
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, sharing its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _parts(buffer: torch.Tensor, message: Message) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Each piece with its place in the staging buffer."""
    at = 0
    for piece in message:
        yield piece, buffer[at : at + piece.n_bytes]
        at += padded(piece.n_bytes)


def pack(message: Message, read: Region, buffer: torch.Tensor) -> None:
    """The pieces' bytes one after the other, each at a multiple of 8."""
    for piece, part in _parts(buffer, message):
        source = read(piece)
        part.view(source.dtype).view(source.shape).copy_(source)
    if len(message) > 1:
        at = 0
        for piece in message:  # what is between the pieces is summed too
            buffer[at + piece.n_bytes : at + padded(piece.n_bytes)] = 0
            at += padded(piece.n_bytes)


def unpack(buffer: torch.Tensor, message: Message, write: Region) -> None:
    """The inverse of `pack`."""
    for piece, part in _parts(buffer, message):
        target = write(piece)
        target.copy_(part.view(target.dtype).view(target.shape))


def sum64(data: torch.Tensor) -> int:
    """Sum of the bytes as 64-bit words (the last one filled with zeros), mod 2**64, as a signed number."""
    if data.device.type != "cpu":
        words = torch.zeros(padded(data.numel()) // WORD, dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: data.numel()] = data
        return int(words.sum())
    n_words, rest = divmod(data.numel(), WORD)
    total = 0
    if n_words:  # the bytes may start anywhere: no view of the tensor as int64 would be allowed
        memory = (ctypes.c_char * (n_words * WORD)).from_address(data.data_ptr())
        total = int(torch.frombuffer(memory, dtype=torch.int64).sum())
    if rest:
        total += int.from_bytes(bytes(data[-rest:].tolist()), "little")
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


assert ALIGN == WORD
