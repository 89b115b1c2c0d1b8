"""What runs in the processes of the reshard bench: live moves, the same bytes over bare gloo, and
DCP by way of a disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.worker.movers import CPU, Case, Cut, Mover, empty_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from elastic.reshard.chunks import CHUNK_BYTES
from elastic.reshard.pieces import Side, bytes_of
from elastic.reshard.rank_boxes import boxes, placements, stages_of
from elastic.reshard.transfer_plan import check_cover
from elastic.types import Transfer
from elastic.types.grid import coordinates
from elastic.worker.state.host_copy import Tensors
from elastic.worker.state.state_transfer import carry_out
from elastic.worker.state.train_state import region

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Took:
    """Of one participant, in seconds and bytes. `peak_bytes`: resident memory beyond what was there
    before."""

    seconds: float
    received_bytes: int = 0
    own_bytes: int = 0
    peak_bytes: int = 0


def fill(mover: Mover, case: Case) -> None:
    """Old boxes, in memory that is there."""
    mover.held = {}
    for rank in (r for r, who in case.holders.items() if mover.me in who):
        mover.held[rank] = {
            k: (b, t.fill_(1)) for k, (b, t) in empty_state(case.model, case.old, rank).items()
        }


@contextmanager
def resident() -> Iterator[Callable[[], int]]:
    """Bytes by which this process's resident memory has grown at most since the start, looked at
    every millisecond."""

    def pages() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    before = most = pages()
    ended = threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, pages())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: (max(most, pages()) - before) * PAGE_BYTES
    finally:
        ended.set()
        thread.join()


def live(mover: Mover, case: Case, only_wire: bool) -> Took:
    """As a worker does it: plan, prove the cover, move, into memory that nobody has touched.
    `only_wire`: own bytes left out, planned before, and without the watch on the memory."""
    me = mover.me
    new: Tensors = empty_state(case.model, case.new, me) if me < case.new[0].world_size else {}
    transfers = case.transfers(me) if only_wire else ()
    if only_wire:
        transfers = tuple(t for t in transfers if t.source != t.destination)
        return _carried(mover, transfers, new)
    dist.barrier()
    with resident() as grown:
        began = time.perf_counter()
        transfers = case.transfers(me)
        check_cover(transfers, [box for box, _ in new.values()], me)
        planned_s = time.perf_counter() - began
        took = _carried(mover, transfers, new)
        return Took(planned_s + took.seconds, took.received_bytes, took.own_bytes, grown())


def _carried(mover: Mover, transfers: tuple[Transfer, ...], new: Tensors) -> Took:
    dist.barrier()
    began = time.perf_counter()
    moved = carry_out(
        transfers,
        mover.me,
        read=lambda t: region(mover.held[t.holding], t),
        write=lambda t: region(new, t),
        group=mover.group,
        device=CPU,
    )
    dist.barrier()
    return Took(time.perf_counter() - began, moved.received_bytes, moved.own_bytes)


def bare(mover: Mover, case: Case, warm: bool) -> Took:
    """isend and irecv of as many bytes between the same pairs, everything posted at once, without a
    sum. The messages have the size that is fastest here. `warm`: into memory that was written to
    before."""
    pairs: dict[tuple[int, int], int] = {}
    for t in case.transfers():
        if t.source != t.destination:
            pairs[t.source, t.destination] = pairs.get((t.source, t.destination), 0) + t.n_bytes
    out = {d: torch.ones(n, dtype=torch.uint8) for (s, d), n in pairs.items() if s == mover.me}
    into = {
        s: (torch.ones if warm else torch.empty)(n, dtype=torch.uint8)
        for (s, d), n in pairs.items()
        if d == mover.me
    }
    dist.barrier()
    began = time.perf_counter()
    works = []
    for at in range(0, max(pairs.values(), default=0), CHUNK_BYTES):
        for peer, data in into.items():
            if at < data.numel():
                works.append(
                    dist.irecv(data[at : at + CHUNK_BYTES], group=mover.group, group_src=peer)
                )
        for peer, data in out.items():
            if at < data.numel():
                works.append(
                    dist.isend(data[at : at + CHUNK_BYTES], group=mover.group, group_dst=peer)
                )
    for work in works:
        if work is not None:
            work.wait()
    dist.barrier()
    return Took(time.perf_counter() - began, sum(data.numel() for data in into.values()))


# --------------------------------------------------------------------------------- by way of a disk


def by_dcp(mover: Mover, case: Case, folder: str) -> Took:
    """dcp.save from the old layout and dcp.load into the new one, of DTensors cut along the same
    axes."""
    old, new = _distributed(case, case.old, mover.me), _distributed(case, case.new, mover.me)
    for tensor in old.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(1)
    path = str(Path(folder) / "copy")
    dist.barrier()
    began = time.perf_counter()
    dcp.save(old, checkpoint_id=path)
    dcp.load(new, checkpoint_id=path)
    dist.barrier()
    return Took(time.perf_counter() - began)


def _distributed(case: Case, cut: Cut, me: int) -> dict[str, Any]:
    layout, layers = cut
    grid = torch.arange(layout.world_size).view(
        layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp, layout.tp
    )
    mesh = DeviceMesh("cpu", grid, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    if me >= layout.world_size:
        return {}
    stage = mesh["dp_replicate", "fsdp", "tp"]
    out: dict[str, Any] = {}
    for placed in placements(case.model):
        spec = placed.spec
        if coordinates(layout, me).pp not in stages_of(
            placed.blocks, case.model, layout, layers=layers
        ):
            continue
        dtype = getattr(torch, spec.dtype)
        if not placed.fsdp_cut:
            out[spec.fqn] = torch.zeros(spec.shape, dtype=dtype)
            continue
        tp = Shard(spec.tp_dim) if placed.tp_cut and spec.tp_dim is not None else Replicate()
        out[spec.fqn] = empty(
            spec.shape, dtype=dtype, device_mesh=stage, placements=[Replicate(), Shard(0), tp]
        )
    return out


# ----------------------------------------------------------------------------------------- integers


def least_bytes(case: Case) -> tuple[int, int]:
    """Bytes that must cross at least: with the ranks where they are, and with the best choice of
    who becomes which rank. By comparing all boxes with all, and trying all orders."""
    have = [
        {b.fqn: b for b in boxes(case.model, *case.old, r)} for r in range(case.old[0].world_size)
    ]
    want = [boxes(case.model, *case.new, r) for r in range(case.new[0].world_size)]
    old_rank = {p: rank for rank, (p,) in case.holders.items()}

    def missing(rank: int, participant: int) -> int:
        mine = have[old_rank[participant]] if participant in old_rank else {}
        return sum(box.n_bytes - _common(box, mine.get(box.fqn)) for box in want[rank])

    everyone = range(len(want))
    cost = [[missing(rank, p) for p in everyone] for rank in everyone]
    placed = sum(cost[rank][rank] for rank in everyone)
    return placed, min(
        sum(cost[rank][p] for rank, p in enumerate(who)) for who in permutations(everyone)
    )


def _common(box: Any, other: Any) -> int:
    if other is None:
        return 0
    n = box.n_bytes // max(1, box.n_elements)
    for start, size, there, length in zip(
        box.offsets, box.sizes, other.offsets, other.sizes, strict=True
    ):
        n *= max(0, min(start + size, there + length) - max(start, there))
    return n


def shards(case: Case, n: int) -> tuple[list[int], list[int]]:
    """Old and new bytes of each participant."""
    old, new = bytes_of(Side(case.model, case.old)), bytes_of(Side(case.model, case.new))
    old_rank = {p: rank for rank, (p,) in case.holders.items()}
    return [old[old_rank[p]] if p in old_rank else 0 for p in range(n)], [
        new[p] if p < len(new) else 0 for p in range(n)
    ]
