"""The update of parameters that an optimizer steps whole, each at its owner.

Gradients and values of a tensor's pieces go to its owner, the optimizer steps the whole tensor
there, and the new values go to all that have a piece of it: one all-to-all each way over the
pipeline stage, for some tensors after the others (buckets). While a bucket is stepped, the next one
comes and the values of the one before go back; so whole tensors and messages take the memory of a
few buckets, however large the model is (a parameter that the owner holds whole anyway is stepped
where it is). What the optimizer keeps lies in the owner's boxes and is given to it anew for each
step, so that whatever fills or moves boxes needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic.errors import ProgramError
from elastic.reshard.owner_exchange import BUCKET_BYTES, SteppedWhole, in_buckets, stepped_whole
from elastic.reshard.rank_boxes import Region
from elastic.types import Layout, ModelProfile
from elastic.worker.process.doing import doing
from elastic.worker.process.readback import sent
from elastic.worker.process.side_stream import SideStream
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.optimizers import Optimizers, shown
from elastic.worker.program.owned.optimizer_counters import Values
from elastic.worker.program.owned.state_form import BEGUN, StateForm

ALIGN = 16  # bytes: each piece begins at a multiple, whatever its type
Gradients = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Letter:
    """The pieces that one rank sends another, in the order of their parameters. `copies`: of each
    (gradient and value, or the new value)."""

    pieces: tuple[tuple[SteppedWhole, Region], ...]
    copies: int

    @cached_property
    def head_bytes(self) -> int:
        return _aligned(len(self.pieces))

    @cached_property
    def n_bytes(self) -> int:
        each = (self.copies * _piece_bytes(one, part) for one, part in self.pieces)
        return (self.head_bytes + sum(each)) if self.pieces else 0

    def views(
        self, buffer: torch.Tensor
    ) -> Iterator[tuple[SteppedWhole, Region, list[torch.Tensor]]]:
        """Of `buffer`, which is this letter's: each piece in its type and shape."""
        at = self.head_bytes
        for one, part in self.pieces:
            dtype, n = getattr(torch, one.spec.dtype), prod(part[1])
            found = []
            for _ in range(self.copies):
                found.append(buffer[at : at + n * dtype.itemsize].view(dtype).view(part[1]))
                at += _piece_bytes(one, part)
            yield one, part, found


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


def _piece_bytes(one: SteppedWhole, part: Region) -> int:
    dtype: torch.dtype = getattr(torch, one.spec.dtype)
    return _aligned(prod(part[1]) * dtype.itemsize)


def _part(whole: torch.Tensor, part: Region) -> torch.Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(*part, strict=True))]


@dataclass(frozen=True)
class Ways:
    """What this rank sends to each and gets from each, in one exchange."""

    sent: tuple[Letter, ...]
    got: tuple[Letter, ...]


@dataclass(frozen=True)
class Bucket:
    """Tensors that are stepped together: those that this rank owns, and its messages of all, before
    the step and after it."""

    owned: Mapping[str, SteppedWhole]
    to_owners: Ways
    from_owners: Ways


@dataclass
class Flight:
    """An exchange under way; `sent` must stay as it is until it has ended."""

    sent: torch.Tensor
    received: torch.Tensor
    work: dist.Work | None  # None = there is nobody else


@dataclass
class OwnerUpdate:
    """Of one rank in one generation. `local`: its parts of the parameters."""

    profile: ModelProfile
    layout: Layout
    layers: tuple[int, ...]
    rank: int
    local: Mapping[str, nn.Parameter]
    groups: Groups
    stepped: list[SteppedWhole] = field(init=False)
    owned: dict[str, SteppedWhole] = field(init=False)
    # what the optimizer steps here, without memory between steps
    wholes: dict[str, nn.Parameter] = field(init=False)
    kept: dict[str, dict[str, torch.Tensor]] = field(init=False)  # the boxes, by entry

    def __post_init__(self) -> None:
        layout = self.layout
        self.stepped = stepped_whole(self.profile, layout, self.layers, rank=self.rank)
        self.n = layout.world_size // layout.pp
        self.me = self.rank % self.n
        self.owned = {one.spec.fqn: one for one in self.stepped if one.owner == self.me}
        self.wholes = {
            fqn: self.local[fqn] if self._in_place(one) else nn.Parameter(self._empty(one))
            for fqn, one in self.owned.items()
        }
        self.kept = {fqn: self._boxes(one) for fqn, one in self.owned.items()}
        self._side = SideStream(self.groups.device)
        self._forms = {
            fqn: StateForm.parse(self.profile.kept_of(one.spec).form)
            for fqn, one in self.owned.items()
        }

    def _in_place(self, one: SteppedWhole) -> bool:
        return [k for k, _ in one.sources] == [self.me]

    def _empty(self, one: SteppedWhole) -> torch.Tensor:
        """Without elements: the memory comes and goes with a step."""
        return torch.empty(0, dtype=getattr(torch, one.spec.dtype), device=self._device(one))

    def _device(self, one: SteppedWhole) -> torch.device:
        return self.local[one.spec.fqn].device

    def _boxes(self, one: SteppedWhole) -> dict[str, torch.Tensor]:
        """Not filled: whatever fills the state covers them."""
        return {
            entry.name: torch.empty(
                entry.shape,
                dtype=getattr(torch, entry.dtype),
                device="cpu" if entry.on_host else self._device(one),
            )
            for entry in self.profile.kept_of(one.spec).owned
        }

    # --------------------------------------------------------------------------------- the messages

    @cached_property
    def buckets(self) -> list[Bucket]:
        return [
            Bucket(
                {one.spec.fqn: one for one in some if one.owner == self.me},
                self._to_owners(some),
                self._from_owners(some),
            )
            for some in in_buckets(self.stepped, BUCKET_BYTES)
        ]

    def _to_owners(self, some: Iterable[SteppedWhole]) -> Ways:
        """Before the step."""
        sends, gets = self._each(), self._each()
        for one in some:
            here = one.owner == self.me
            if here and not self._in_place(one):
                for k, part in one.sources:
                    gets[k].append((one, part))
            # not where the owner has it whole, and is this rank
            if one.mine is not None and one.gives and not (here and self._in_place(one)):
                sends[one.owner].append((one, one.mine))
        return Ways(_letters(sends, 2), _letters(gets, 2))

    def _from_owners(self, some: Iterable[SteppedWhole]) -> Ways:
        """After the step; what the owner has itself is copied."""
        sends, gets = self._each(), self._each()
        for one in some:
            for k, part in one.targets:
                if k != self.me:
                    sends[k].append((one, part))
            if one.mine is not None and one.owner != self.me:
                gets[one.owner].append((one, one.mine))
        return Ways(_letters(sends, 1), _letters(gets, 1))

    def _each(self) -> list[list[tuple[SteppedWhole, Region]]]:
        return [[] for _ in range(self.n)]

    def _begun(self, send: torch.Tensor, ways: Ways) -> Flight:
        sent, got = ([one.n_bytes for one in letters] for letters in (ways.sent, ways.got))
        # zeros: in a rehearsal nothing comes
        received = torch.zeros(sum(got), dtype=torch.uint8, device=send.device)
        # torch's pretended exchange refuses a bucket of which a rank only gets something
        if self.n == 1 or self.groups.pretended:
            return Flight(send, received, None)
        assert self.groups.stage is not None, "the groups were made without that of a stage"
        work = dist.all_to_all_single(
            received, send, got, sent, group=self.groups.stage, async_op=True
        )
        return Flight(send, received, work)

    def _arrived(self, flight: Flight) -> torch.Tensor:
        """For the current stream; on CUDA the host does not wait, and nobody knows yet whether the
        exchange was aborted."""
        if flight.work is not None:
            flight.work.wait()
        return flight.received

    def _has_gradient(self, letters: Sequence[Letter], flight: Flight) -> Iterator[bool]:
        """Of each piece of the letters. The host waits for the exchange, and not for what the
        device has to do besides."""
        heads = [own[: len(letter.pieces)] for letter, own in _cut(letters, flight.received)]
        if not heads:
            return iter(())
        with self._side.behind(None), doing("device"):
            self._arrived(flight)
            there = torch.cat(heads).tolist()
        self.groups.check()
        return map(bool, there)

    def _check(self) -> None:
        """What an aborted kernel has left must not pass for values: asked once, when all exchanges
        of a step have ended, since until then the state is that of no step."""
        if self.n == 1 or self.groups.pretended:
            return
        if self.groups.device.type == "cuda":
            with doing("device"):
                torch.cuda.current_stream(self.groups.device).synchronize()
        self.groups.check()

    def _buffer(self, letters: Sequence[Letter]) -> torch.Tensor:
        n_bytes = sum(letter.n_bytes for letter in letters)
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.groups.device)

    # ------------------------------------------------------------------------------------- the step

    def gather(self, gradients: Gradients) -> None:
        """The whole tensors of the first bucket and their gradients are at their owners. Changes
        nothing of the training state."""
        for bucket in self.buckets[:1]:
            self._fill(bucket, self._send(bucket, gradients), gradients)

    def step(self, gradients: Gradients, optimizers: Optimizers) -> None:
        """The optimizers' step of all buckets, after `gather`. Raises ProgramError where one keeps
        another thing than it did in the trial."""
        coming: list[tuple[Bucket, Flight]] = []
        going: list[tuple[Bucket, Flight]] = []
        values = optimizers.values()
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            if following is not None:
                coming.append((following, self._send(following, gradients)))
            self._step(bucket, optimizers, values)
            while going:
                self._take(*going.pop())
            going.append((bucket, self._give(bucket)))
            while coming:
                self._fill(*coming.pop(), gradients)
        while going:
            self._take(*going.pop())
        self._check()
        if not self.buckets:
            optimizers.step_whole(())

    @torch.no_grad()
    def _send(self, bucket: Bucket, gradients: Gradients) -> Flight:
        """Gradients and values, to the owners."""
        ways = bucket.to_owners
        send = self._buffer(ways.sent)
        for letter, own in _cut(ways.sent, send):
            there = [one.spec.fqn in gradients for one, _ in letter.pieces]
            own[: len(there)] = sent(torch.tensor(there, dtype=torch.uint8), own.device)
            for one, _, (gradient, value) in letter.views(own):
                value.copy_(self.local[one.spec.fqn])
                if one.spec.fqn in gradients:
                    gradient.copy_(gradients[one.spec.fqn])
                else:
                    gradient.zero_()
        return self._begun(send, ways)

    @torch.no_grad()
    def _fill(self, bucket: Bucket, coming: Flight, gradients: Gradients) -> None:
        received = self._arrived(coming)
        there = self._has_gradient(bucket.to_owners.got, coming)
        for fqn, one in bucket.owned.items():
            whole = self.wholes[fqn]
            whole.grad = gradients.get(fqn) if self._in_place(one) else None
            if not self._in_place(one):
                whole.data = whole.data.new_empty(one.spec.shape)
        for letter, own in _cut(bucket.to_owners.got, received):
            for (one, part, (gradient, value)), has in zip(letter.views(own), there, strict=False):
                whole = self.wholes[one.spec.fqn]
                _part(whole, part).copy_(value)
                if has:
                    if whole.grad is None:
                        whole.grad = torch.zeros_like(whole)
                    _part(whole.grad, part).copy_(gradient)

    def _step(self, bucket: Bucket, optimizers: Optimizers, values: Mapping[str, Values]) -> None:
        for fqn in bucket.owned:
            state = self._state(fqn)
            if state is not None:
                optimizers.owner(fqn).state[self.wholes[fqn]] = state
        optimizers.step_whole((self.wholes[fqn] for fqn in bucket.owned), values)
        for fqn in bucket.owned:
            self._keep(fqn, optimizers)

    def _state(self, fqn: str) -> dict[Any, Any] | None:
        """As the boxes have it; None = it has not begun."""
        kept = self.kept[fqn]
        entries = [name for name in kept if name != BEGUN]
        begun, *there = kept[BEGUN].tolist()
        has = {name for name, flag in zip(entries, there, strict=True) if flag}
        return self._forms[fqn].build(lambda k: kept[k] if k in has else None) if begun else None

    @torch.no_grad()
    def _keep(self, fqn: str, optimizers: Optimizers) -> None:
        """Into the boxes; the optimizer has no state between steps."""
        optimizer, kept = optimizers.owner(fqn), self.kept[fqn]
        state = optimizer.state.pop(self.wholes[fqn], {})
        try:
            found = self._forms[fqn].leaves(state) if state else {}  # no step yet
            for name, value in found.items():
                _write(name, value, kept[name])
        except ProgramError as error:
            who = shown(optimizers.of[fqn], optimizer)
            raise ProgramError(f"optimizer {who}, {fqn}: {error}") from error
        there = [bool(state), *(name in found for name in kept if name != BEGUN)]
        kept[BEGUN].copy_(torch.tensor(there, dtype=torch.uint8))

    @torch.no_grad()
    def _give(self, bucket: Bucket) -> Flight:
        """New values, to all that have a piece; the whole tensors are given up."""
        ways = bucket.from_owners
        send = self._buffer(ways.sent)
        for letter, own in _cut(ways.sent, send):
            for one, part, (value,) in letter.views(own):
                value.copy_(_part(self.wholes[one.spec.fqn], part))
        for fqn, one in bucket.owned.items():
            whole = self.wholes[fqn]
            whole.grad = None
            if not self._in_place(one):
                if one.mine is not None:
                    self.local[fqn].copy_(_part(whole, one.mine))
                whole.data = self._empty(one)
        return self._begun(send, ways)

    @torch.no_grad()
    def _take(self, bucket: Bucket, going: Flight) -> None:
        received = self._arrived(going)
        for letter, own in _cut(bucket.from_owners.got, received):
            for one, _, (value,) in letter.views(own):
                self.local[one.spec.fqn].copy_(value)


def _letters(
    each: Iterable[Iterable[tuple[SteppedWhole, Region]]], copies: int
) -> tuple[Letter, ...]:
    return tuple(Letter(tuple(pieces), copies) for pieces in each)


def _cut(letters: Sequence[Letter], buffer: torch.Tensor) -> Iterator[tuple[Letter, torch.Tensor]]:
    """Each letter that is not empty, with its part of the buffer."""
    at = 0
    for letter in letters:
        if letter.pieces:
            yield letter, buffer[at : at + letter.n_bytes]
        at += letter.n_bytes


def _write(name: str, value: Any, box: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        box.fill_(value)
    elif value is not box:
        if value.shape != box.shape or value.dtype != box.dtype:
            raise ProgramError(
                f"its state '{name}' is {value.dtype} {list(value.shape)} now, and was {box.dtype} "
                f"{list(box.shape)} in the trial"
            )
        box.copy_(value)
