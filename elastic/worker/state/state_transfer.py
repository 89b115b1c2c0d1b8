"""Carries out Transfers over the participants' group: from memory to memory, many messages in
flight, a 64-bit sum of each.

A region that is contiguous is sent from where it lies and received where it belongs; others, and
small ones together, pass through staging buffers of bounded size. Round k is the k-th message of
every pair; a participant waits for round k only when it has posted that round of all its pairs, so
that nobody waits in a ring, and no barrier stands between rounds. The sums of a pair travel in one
message behind its last one.

Where the wire takes CUDA memory (`Sizes.grouped`) a round is several lanes, each one group of
operations with few peers. Every message belongs to one (k, lane), and everyone posts and waits in
the order of these: the first that is not finished has been posted by both ends, or will be. The
host does not wait on the way: sums are added up on the device and read once, at the end.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.distributed as dist

from elastic.errors import StateLost
from elastic.reshard.chunks import (
    ALIGN,
    STAGING_BYTES,
    Sizes,
    chunk_bytes,
    lane,
    message_bytes,
    messages,
    padded,
    sizes_of,
    split,
    staging_bytes,
)
from elastic.types import Transfer

AHEAD = 256  # rounds in flight; what needs no staging takes no memory there
WORD = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Region = Callable[[Transfer], torch.Tensor]
Message = list[Transfer]


@dataclass(frozen=True)
class TransferStats:
    """What a participant sent, received and copied in its own memory, and the most that its staging
    buffers held."""

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
    lane: int = 0
    first: int = 0  # of its messages among those of the exchange, which has a sum of each
    n_summed: int = 0

    def part(self, sums: torch.Tensor) -> torch.Tensor:
        """This stream's sums, a view."""
        return sums[self.first : self.first + len(self.messages)]


@dataclass
class _Flight:
    """A message on its way. `region`: where its bytes lie or belong; None = they pass through
    `buffer`."""

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
    transfers: Sequence[Transfer],
    me: int,
    *,
    read: Region,
    write: Region,
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: Sizes | None = None,
    tick: Callable[[], object] = lambda: None,
) -> TransferStats:
    """Moves every region from its source to its destination.

    `transfers`: those of participant `me` at least; `read(transfer)` gives the source region,
    `write(transfer)` the destination region (views). `device`: what memory the group takes (cpu =
    gloo, cuda = NCCL); others are staged there. `sizes`: those of the device, where they are not
    given; the same for every participant. `tick`: called as messages are posted and come. Raises
    StateLost, naming the chunk, when a sum is wrong.
    """
    sizes = sizes or sizes_of(device.type)
    return _Exchange(transfers, me, read, write, group, device, sizes, tick).run()


# staging buffers in host memory stay for the next move: memory that was touched before is fast
_spare: list[torch.Tensor] = []


def warm_staging() -> None:
    """Takes the staging memory of a small group and touches it, so that the first move need not
    (part of Prepare)."""
    n_bytes = chunk_bytes(2)
    while len(_spare) * n_bytes < STAGING_BYTES:
        _spare.append(torch.zeros(n_bytes, dtype=torch.uint8))


@dataclass
class _Exchange:
    """What `carry_out` does."""

    transfers: Sequence[Transfer]
    me: int
    read: Region
    write: Region
    group: dist.ProcessGroup
    device: torch.device
    sizes: Sizes
    tick: Callable[[], object]

    def __post_init__(self) -> None:
        transfers, me, sizes = self.transfers, self.me, self.sizes
        n = dist.get_world_size(self.group)
        self.most_staged, self.chunk_bytes = staging_bytes(n, sizes), chunk_bytes(n, sizes)
        self.streams = _streams(transfers, me, n, limit=self.chunk_bytes, sizes=sizes)
        self.own = (
            part
            for transfer in transfers
            if transfer.source == me == transfer.destination
            for part in split(transfer, sizes.own_bytes)
        )
        self.own_bytes = self.staged = self.peak_staged = 0
        self.spare = _spare if self.device.type == "cpu" and not sizes.grouped else []
        if sizes.grouped:
            self.chunk_bytes = max(
                (message_bytes(m) for stream in self.streams for m in stream.messages), default=0
            )
        for before, stream in pairwise(self.streams):
            stream.first = before.first + len(before.messages)
        n_messages = sum(len(stream.messages) for stream in self.streams)
        self.sums = torch.zeros(n_messages, dtype=torch.int64, device=self.device)

    def run(self) -> TransferStats:
        flying: deque[list[_Flight]] = deque()
        coming = self._rounds()
        ready = next(coming, None)
        while ready or flying:
            self.tick()
            while ready and len(flying) < AHEAD and (not flying or self._fits(ready)):
                self._post(ready)
                flying.append(ready)
                ready = next(coming, None)
            self._copy_own()
            self._finish(flying.popleft())
        while self._copy_own():
            continue
        self._compare_sums()
        moved = {True: 0, False: 0}
        for stream in self.streams:
            moved[stream.sends] += sum(t.n_bytes for message in stream.messages for t in message)
        return TransferStats(moved[True], moved[False], self.own_bytes, self.peak_staged)

    def _rounds(self) -> Iterator[list[_Flight]]:
        """Receives first, so that what arrives finds its place."""
        lanes = self._lanes()
        for k in range(max((len(stream.messages) for stream in self.streams), default=0)):
            for streams in lanes:
                if round_ := [
                    self._flight(stream, stream.messages[k])
                    for stream in streams
                    if k < len(stream.messages)
                ]:
                    yield round_

    def _lanes(self) -> list[list[_Stream]]:
        """All streams, in the order in which their messages of a round are posted."""
        streams = sorted(
            self.streams,
            key=lambda stream: (stream.lane, stream.sends, (stream.peer - self.me) % (1 << 30)),
        )
        return [list(streams) for _, streams in groupby(streams, key=lambda stream: stream.lane)]

    def _flight(self, stream: _Stream, message: Message) -> _Flight:
        region = None
        if len(message) == 1:
            there = (self.read if stream.sends else self.write)(message[0])
            if there.device == self.device and there.is_contiguous():
                region = there.reshape(-1).view(torch.uint8)  # its bytes, where they lie
        return _Flight(stream, message, message_bytes(message), region)

    def _fits(self, round_: list[_Flight]) -> bool:
        return (
            self.staged + self.chunk_bytes * sum(flight.region is None for flight in round_)
            <= self.most_staged
        )

    # ------------------------------------------------------------------------------------- the wire

    def _post(self, round_: list[_Flight]) -> None:
        for flight in round_:
            if flight.region is None:
                if self.spare and self.spare[-1].numel() >= self.chunk_bytes:
                    flight.buffer = self.spare.pop()
                else:
                    flight.buffer = torch.empty(
                        self.chunk_bytes, dtype=torch.uint8, device=self.device
                    )
                self.staged += self.chunk_bytes
                if flight.stream.sends:
                    pack(flight.message, self.read, flight.buffer, together=self.sizes.grouped)
        self.peak_staged = max(self.peak_staged, self.staged)
        works = self._start([(f.stream, f.data) for f in round_])
        for flight, work in zip(round_, works, strict=True):
            flight.work = work
        for flight in round_:
            if flight.stream.sends:
                self._sum(flight)

    def _start(self, wanted: Sequence[tuple[_Stream, torch.Tensor]]) -> list[dist.Work | None]:
        # NCCL: in one group, or two peers that start in another order wait for each other
        if self.sizes.grouped:
            ops = [
                dist.P2POp(
                    dist.isend if s.sends else dist.irecv, t, group=self.group, group_peer=s.peer
                )
                for s, t in wanted
            ]
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
                self._sum(flight)
                if flight.buffer is not None:
                    unpack(flight.buffer, flight.message, self.write, together=self.sizes.grouped)
            if flight.buffer is not None:
                self.staged -= self.chunk_bytes
                if len(self.spare) * self.chunk_bytes < self.most_staged:
                    self.spare.append(flight.buffer)
            flight.buffer = flight.region = None

    def _copy_own(self) -> bool:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        n_bytes = 0
        for transfer in self.own:
            pairs.append((self.write(transfer), self.read(transfer)))
            n_bytes += transfer.n_bytes
            if not self.sizes.grouped or n_bytes >= self.sizes.own_bytes:
                break
        copy_all(pairs, self.sizes.grouped)
        self.own_bytes += n_bytes
        return bool(pairs)

    def _sum(self, flight: _Flight) -> None:
        stream = flight.stream
        at = stream.first + stream.n_summed
        stream.n_summed += 1
        if self.sizes.grouped:
            sum_into(self.sums[at], flight.data)
        else:
            self.sums[at] = sum64(flight.data)

    # ---------------------------------------------------------------------------------------- proof

    def _compare_sums(self) -> None:
        """Layer (b) of promise 5."""
        theirs = self.sums.clone()
        for streams in self._lanes():
            wanted = [
                (stream, stream.part(self.sums if stream.sends else theirs)) for stream in streams
            ]
            for work in self._start(wanted):
                if work is not None:
                    work.wait()
        seen, told = torch.stack((self.sums, theirs)).tolist()  # the host waits here, once
        for stream in self.streams:
            for k in range(len(stream.messages)):
                if seen[stream.first + k] != told[stream.first + k]:
                    raise _altered(stream, k)


def _streams(
    transfers: Sequence[Transfer], me: int, n: int, *, limit: int, sizes: Sizes
) -> list[_Stream]:
    """`n`: participants; `limit`: the most bytes of a message."""
    pairs: dict[tuple[int, bool], list[Transfer]] = {}
    for transfer in transfers:
        if transfer.source != transfer.destination and me in (
            transfer.source,
            transfer.destination,
        ):
            sends = transfer.source == me
            pairs.setdefault(
                (transfer.destination if sends else transfer.source, sends), []
            ).append(transfer)
    return [
        _Stream(
            peer,
            sends,
            list(messages(pieces, limit, sizes)),
            lane(*((me, peer) if sends else (peer, me)), n, sizes),
        )
        for (peer, sends), pieces in sorted(pairs.items())
    ]


def _altered(stream: _Stream, k: int) -> StateLost:
    message = stream.messages[k]
    names = message[0].fqn + (
        f" and {len(message) - 1} more" if len(message) > 1 else f" at {list(message[0].offsets)}"
    )
    return StateLost(
        f"chunk {k + 1} of {len(stream.messages)} from participant {stream.peer} ({names}, "
        f"{message_bytes(message)} bytes) "
        "arrived altered: its 64-bit sum differs from the sender's"
    )


def _parts(buffer: torch.Tensor, message: Message) -> Iterator[tuple[Transfer, torch.Tensor]]:
    """Each piece with its place in the staging buffer."""
    at = 0
    for piece in message:
        yield piece, buffer[at : at + piece.n_bytes]
        at += padded(piece.n_bytes)


def pack(message: Message, read: Region, buffer: torch.Tensor, *, together: bool = False) -> None:
    """The pieces' bytes one after the other, each at a multiple of 8. `together`: as of `copy_all`;
    then what is between the pieces stays as it is, and goes along."""
    pairs = ((part, read(piece)) for piece, part in _parts(buffer, message))
    copy_all(
        [(part.view(source.dtype).view(source.shape), source) for part, source in pairs], together
    )
    if len(message) > 1 and not together:
        at = 0
        for piece in message:  # what is between the pieces is summed too
            buffer[at + piece.n_bytes : at + padded(piece.n_bytes)] = 0
            at += padded(piece.n_bytes)


def unpack(
    buffer: torch.Tensor, message: Message, write: Region, *, together: bool = False
) -> None:
    """The inverse of `pack`."""
    pairs = ((write(piece), part) for piece, part in _parts(buffer, message))
    copy_all(
        [(target, part.view(target.dtype).view(target.shape)) for target, part in pairs], together
    )


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], together: bool) -> None:
    """Copies the second of each pair into the first; they are of one shape and dtype. `together`:
    in few kernels where both are contiguous and on one device, and without the host's waiting for
    any of them; else one by one."""
    alike: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        if (
            together
            and source.device == target.device
            and source.is_contiguous()
            and target.is_contiguous()
        ):
            size = source.element_size()
            for tensor, found in zip(
                (target, source), alike.setdefault(size, ([], [])), strict=True
            ):
                found.append(tensor.reshape(-1).view(_BITS[size]))
        else:
            target.copy_(source, non_blocking=together)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)


def sum_into(total: torch.Tensor, data: torch.Tensor) -> None:
    """The same as `sum64`, written to `total` (int64, no dimension) on the data's device: nobody
    waits for it."""
    end = data.numel() // WORD * WORD
    words = data[:end]
    # no view of it as words would be allowed
    if data.data_ptr() % WORD or data.storage_offset() % WORD:
        words = words.clone()
    torch.sum(words.view(torch.int64), dim=0, out=total)
    if end < data.numel():
        last = torch.zeros(WORD, dtype=torch.uint8, device=data.device)
        last[: data.numel() - end] = data[end:]
        total += last.view(torch.int64)[0]


def sum64(data: torch.Tensor) -> int:
    """Sum of the bytes as 64-bit words (the last one filled with zeros), mod 2**64, as a signed
    number."""
    if data.device.type != "cpu":
        on_device = torch.zeros((), dtype=torch.int64, device=data.device)
        sum_into(on_device, data)
        return int(on_device)
    n_words, rest = divmod(data.numel(), WORD)
    total = 0
    if n_words:  # the bytes may start anywhere: no view of the tensor as int64 would be allowed
        memory = (ctypes.c_char * (n_words * WORD)).from_address(data.data_ptr())
        total = int(torch.frombuffer(memory, dtype=torch.int64).sum())
    if rest:
        total += int.from_bytes(bytes(data[-rest:].tolist()), "little")
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


assert ALIGN == WORD
