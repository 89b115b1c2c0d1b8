"""Fills the state of a new generation from where it is: fresh, live or peer memory, a checkpoint;
and proves the content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from elastic.data.streams import STATE, Stream
from elastic.errors import StateLost
from elastic.reshard.rank_boxes import EXTRA, LOSS_SCALE, owned_boxes, state_specs
from elastic.reshard.transfer_plan import check_cover, holders_of, plan_transfers
from elastic.types import Box, DigestPart, TensorSpec, Transfer
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.process.doing import doing
from elastic.worker.process.side_stream import boundary, waitable
from elastic.worker.process_groups.control_tree import ENTERING_TIMEOUT
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.guards import MEMORY
from elastic.worker.session.workplace import EnterOrder, Workplace
from elastic.worker.state.content_digest import digest, digest_of
from elastic.worker.state.host_copy import BufferLease, Flat, HostCopy
from elastic.worker.state.state_transfer import carry_out
from elastic.worker.state.train_state import Held, TrainState, region

# boxes that follow from how the job is run, not from its model
OF_THE_JOB = (EXTRA + MEMORY, EXTRA + STATE, LOSS_SCALE)


@dataclass(frozen=True)
class Taken:
    """What a worker knows after the takeover. `given`: the parts of old boxes that it gave to
    others or kept, one for each transfer, and `before` the boxes that they lie in; `stored_digest`:
    that of the checkpoint that was read, known to rank 0."""

    given: tuple[tuple[Box, torch.Tensor], ...] | None = None
    before: tuple[Held, ...] = ()
    # measured: received by all workers together (or read from storage by this one)
    n_bytes: int = 0
    peak_bytes: int = 0  # measured: of the worker that needed most beyond its new state
    stored_digest: int | None = None
    # on a GPU, behind all that has been done to the boxes in `given`
    behind: torch.cuda.Event | None = None


@dataclass
class Takeover:
    """One worker's part in taking over the state: `make_room`, then the new state is built, then
    `run` fills it."""

    place: Workplace
    order: EnterOrder
    groups: Groups
    state: TrainState | None = None
    _found: dict[int, Held] = field(default_factory=dict)
    _before_bytes: int = 0  # on the device before room was made

    def make_room(self) -> None:
        """Where old and new shard do not fit the device together (`Move.via` = host): the old boxes
        go to a buffer in host memory. Before the new state is built."""
        place, move = self.place, self.order.plan.move
        self._before_bytes = device_bytes(place.held)
        place.wait_for_checks()  # one may still hold boxes of the state before the old one
        if move is not None and move.via == "host":
            if place.copying is not None:
                place.copying.result()
            place.held = [
                one if one.kind != "live" or one.on_host else _to_host(one, place)
                for one in place.held
            ]

    def run(self, state: TrainState | None) -> Taken:
        """Fills `state` (None: this worker only sends). Returns when every worker has what it
        needs. Raises StateLost where a box is not to be had or arrived altered."""
        self.state = state
        self.groups.control.timeout = ENTERING_TIMEOUT
        if state is not None:
            state.read_frozen(self._tick)
        source = self.order.plan.resume.source
        if source == "fresh":
            taken = self._fresh()
        else:
            taken = self._from_storage() if source == "durable" else self._from_memory()
        self.groups.control.barrier()
        return taken

    def _fresh(self) -> Taken:
        if self.state is not None:
            self.state.fill_fresh(self.place.job.seed, self._tick)
            self.place.extra.fresh(self.state.tensors)
        return Taken()

    @doing("copying")
    def _from_storage(self) -> Taken:
        assert self.state is not None
        checkpoint = checkpoint_index.open_checkpoint(self.order.plan.resume.uri)
        specs, tensors = (
            {spec.fqn: spec for spec in state_specs(self.place.profile)},
            self.state.tensors,
        )
        anew = differing(specs, checkpoint.tensors, isinstance(self.place.dataset, Stream))
        self.place.extra.fresh({fqn: held for fqn, held in tensors.items() if fqn in anew})
        for fqn in anew:
            checkpoint.tensors.pop(fqn, None)
        tensors = {fqn: held for fqn, held in tensors.items() if fqn not in anew}
        checkpoint.check(spec for fqn, spec in specs.items() if fqn not in anew)
        told = self.order.me == 0 and "digest" in checkpoint.meta and not anew
        checkpoint.tick = self._tick
        n_bytes = checkpoint.fill(tensors.values())
        return Taken(
            n_bytes=n_bytes, stored_digest=int(checkpoint.meta["digest"]) if told else None
        )

    def _from_memory(self) -> Taken:
        plan, resume, place, me = self.order.plan, self.order.plan.resume, self.place, self.order.me
        assert resume.layout is not None
        step = self._agree_on_step() if resume.source == "live" else resume.step
        if resume.source == "peer":  # NCCL waits for the first message of a pair within the call
            self.groups.control.barrier()
        everyone = self.order.rendezvous.participants
        holders = holders_of(resume, everyone, place.profile.by_owners)
        old, new = (resume.layout, resume.layers), (plan.layout, plan.layers)
        nodes = [worker.node_id for worker in everyone]
        transfers = plan_transfers(place.profile, old, new, holders, nodes, me)
        if self.state is not None:
            check_cover(transfers, [box for box, _ in self.state.tensors.values()], me)

        def read(transfer: Transfer) -> torch.Tensor:
            if transfer.holding not in self._found:
                self._found[transfer.holding] = place.find(
                    resume.generation, transfer.holding, step
                )
            return region(self._found[transfer.holding].tensors, transfer)

        def write(transfer: Transfer) -> torch.Tensor:
            assert self.state is not None
            return region(self.state.tensors, transfer)

        old_bytes = device_bytes(place.held)
        mine = [t for t in transfers if me in (t.source, t.destination)]
        ends = {end for t in mine for end in (t.source, t.destination)}
        group, device = self.groups.wire
        if device.type == "cpu":
            self.groups.connect(self.groups.world, ends - {me})
        moved = carry_out(
            transfers, me, read=read, write=write, group=group, device=device, tick=self._tick
        )
        self.groups.check()
        given = tuple(
            (Box(t.fqn, t.offsets, t.sizes, t.dtype), read(t)) for t in transfers if t.source == me
        )
        here = self.state.tensors if self.state is not None else {}
        new_bytes = storage_bytes(tensor for _, tensor in here.values())
        peak_bytes = max(self._before_bytes - new_bytes, old_bytes + moved.staging_bytes)
        # bytes received by all, and the largest peak; nobody is past this before all are there
        measured = torch.tensor([moved.received_bytes, peak_bytes], dtype=torch.int64)
        received, peaks = self.groups.control.gather(measured).unbind(1)
        return Taken(
            given, tuple(self._found.values()), int(received.sum()), int(peaks.max()),
            behind=boundary(place.device),
        )  # fmt: skip

    def _tick(self) -> None:
        """While bytes come: this worker makes progress, and an abort ends what it does."""
        self.groups.check()
        self.place.at_phase("loading", 0)

    def _agree_on_step(self) -> int:
        """The boundary at which the old generation stopped: all its ranks must have stopped at the
        same one."""
        generation = self.order.plan.resume.generation
        live = [h.step for h in self.place.held if h.kind == "live" and h.generation == generation]
        mine = live[0] if live else -1
        seen = torch.tensor([mine, -mine if mine >= 0 else -(1 << 60)], dtype=torch.int64)
        self.groups.control.all_reduce(seen, dist.ReduceOp.MAX)
        newest, oldest = int(seen[0]), -int(seen[1])
        if newest != oldest or newest < 0:
            raise StateLost(
                f"the ranks of generation {generation} stopped at steps {oldest} to {newest}"
            )
        return newest


# ------------------------------------------------------------------------------------------- memory


def differing(
    mine: Mapping[str, TensorSpec], there: Mapping[str, tuple[tuple[int, ...], str]], stream: bool
) -> set[str]:
    """Boxes OF_THE_JOB that are others in the checkpoint, or in one of the two only: other guards,
    another precision, weights that were imported into a job with a stream. They start over (a
    stream then passes over what its steps have used up). `stream`: the dataset is one; else a box
    of its name is the program's own."""
    found = set()
    for fqn in OF_THE_JOB:
        spec = mine.get(fqn)
        if fqn == EXTRA + STATE and spec is not None and not stream:
            continue
        if (spec and (spec.shape, spec.dtype)) != there.get(fqn):
            found.add(fqn)
    return found


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Memory behind the tensors: the storages that are really there, each counted once."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def device_bytes(held: Iterable[Held]) -> int:
    """Device memory behind the boxes. Peer replicas are in host memory."""
    return storage_bytes(
        t for one in held if one.kind == "live" and not one.on_host for _, t in one.tensors.values()
    )


def _to_host(held: Held, place: Workplace) -> Held:
    """The same boxes in a leased host buffer. Their storages are given up once all of them are
    copied, whoever still refers to them; where that fails, because the host's memory runs out for
    one, the boxes are still where they were."""
    flat = Flat([box for box, _ in held.tensors.values()])
    lease = place.host_memory.lease(flat.n_bytes)
    views = flat.views(lease.buffer)
    with torch.no_grad(), place.side.behind(boundary(place.device)) as stream:
        for fqn, (_, tensor) in held.tensors.items():
            views[fqn][1].copy_(tensor, non_blocking=stream is not None)
        done = waitable(stream) if stream is not None else None
    if done is not None:
        done.synchronize()
    for fqn, (_, tensor) in list(held.tensors.items()):
        held.tensors[fqn] = views[fqn]
        tensor.untyped_storage().resize_(0)
    return replace(held, on_host=True, lease=lease)


# -------------------------------------------------------------------------------------------- proof


def digest_of_given(place: Workplace, taken: list[Taken], leases: list[BufferLease]) -> int | None:
    """Of what this worker gave, or what was stored; None: neither. The old boxes are let go of as
    soon as they were read. `taken`: the only one, so that whoever called holds it no longer."""
    try:
        one = taken.pop()
        if one.given is None:
            return one.stored_digest
        with place.side.behind(one.behind):
            return digest_of(one.given, _shapes(place))
    finally:
        for lease in leases:
            lease.release()


def tell_digests(
    place: Workplace,
    order: EnterOrder,
    old: Future[int | None],
    *,
    gave: bool,
    after: HostCopy | None,
) -> None:
    """Reports this worker's part of layer (c) of promise 5: the digest of what it gave, and of what
    it has now. The transfers cover each new box once, so that the sums over all workers agree,
    replicas included; what was read from storage is compared with the digest that was stored, in
    which each element counts once.

    Runs behind the steps, for seconds where the state is large: of its generation it knows nothing
    but the buffer that it reads, so that device memory of one that has ended is free."""
    profile, plan = place.profile, order.plan
    new, n_bytes = None, 0
    try:
        if after is not None:
            tensors = after.wait()
            mine = [b for b, _ in tensors.values()]
            if not gave:
                mine = list(owned_boxes(profile, plan.layout, plan.layers, order.me))
            new = digest(tensors, _shapes(place), [b.fqn for b in mine])
            n_bytes = sum(b.n_bytes for b in mine)
        n = len(order.rendezvous.participants)
        place.report(DigestPart(plan.generation, order.me, n, old.result(), new, n_bytes))
    finally:
        if after is not None:
            after.release()


def _shapes(place: Workplace) -> dict[str, tuple[int, ...]]:
    return {spec.fqn: spec.shape for spec in state_specs(place.profile)}
