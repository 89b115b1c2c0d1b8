"""Processes with one gloo group that move made-up states: the part of a takeover that is about
bytes."""

from __future__ import annotations

import importlib
import os
import socket
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from support.worker.forks import FORKS

from elastic.reshard.rank_boxes import boxes, state_specs
from elastic.reshard.transfer_plan import plan_transfers
from elastic.types import DTYPE_BYTES, Layout, ModelProfile, OptimizerSpec, TensorSpec, Transfer
from elastic.worker.state.host_copy import Tensors
from elastic.worker.state.state_transfer import TransferStats, carry_out
from elastic.worker.state.train_state import region

Cut = tuple[Layout, tuple[int, ...]]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A transition. `holders[r]`: participants with the boxes of old rank r; others of no rank are
    idle."""

    model: ModelProfile
    old: Cut
    new: Cut
    holders: dict[int, tuple[int, ...]]
    nodes: tuple[str, ...]

    def transfers(self, me: int | None = None) -> tuple[Transfer, ...]:
        return plan_transfers(self.model, self.old, self.new, self.holders, self.nodes, me)


def decoder(n_blocks: int, hidden: int, vocab: int = 1000) -> ModelProfile:
    """Shapes and cuts of a small llama with AdamW; about 4 x 4 x 12 x hidden**2 bytes per block."""
    specs = [TensorSpec("embed", (vocab, hidden), "float32", 0, -1)]
    for i in range(n_blocks):
        for name, shape, dim in [
            ("wq", (hidden, hidden), 0), ("wk", (hidden, hidden), 0), ("wv", (hidden, hidden), 0),
            ("wo", (hidden, hidden), 1), ("w1", (8 * hidden // 3, hidden), 0), ("w3",
            (8 * hidden // 3, hidden), 0), ("w2", (hidden, 8 * hidden // 3), 1), ("norm1",
            (hidden,), None), ("norm2", (hidden,), None),
        ]:  # fmt: skip
            specs.append(TensorSpec(f"layers.{i}.{name}", shape, "float32", dim, i))
    specs += [
        TensorSpec("norm", (hidden,), "float32", None, n_blocks),
        TensorSpec("head", (vocab, hidden), "float32", 0, n_blocks),
    ]
    return ModelProfile(
        n_blocks,
        0,
        tuple(specs),
        (OptimizerSpec(("exp_avg", "exp_avg_sq"), ("step",)),),
        tp_limit=8,
    )


def empty_state(model: ModelProfile, cut: Cut, rank: int) -> Tensors:
    """Memory that nobody has touched yet."""
    return {
        b.fqn: (b, torch.empty(b.sizes, dtype=getattr(torch, b.dtype)))
        for b in boxes(model, *cut, rank)
    }


def numbered_state(model: ModelProfile, cut: Cut, rank: int) -> Tensors:
    """Every element has bits that tell its tensor and its place in it (modulo what the dtype can
    hold)."""
    starts, at = {}, 1
    for spec in state_specs(model):
        starts[spec.fqn] = (at, spec.shape)
        at += 7919
    out = {}
    for fqn, (box, tensor) in empty_state(model, cut, rank).items():
        start, shape = starts[fqn]
        number = torch.full((1,) * tensor.ndim, start, dtype=torch.int64)
        stride = 1
        for dim in reversed(range(tensor.ndim)):
            index = (
                torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], dtype=torch.int64)
                * stride
            )
            number = number + index.view([-1 if d == dim else 1 for d in range(tensor.ndim)])
            stride *= shape[dim]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
            DTYPE_BYTES[box.dtype]
        ]
        if box.dtype == "bool":
            number = number % 2
        tensor.view(bits).copy_(number.expand(tensor.shape))
        out[fqn] = (box, tensor)
    return out


@dataclass
class Mover:
    """One participant's memory. `held`: old rank -> its boxes."""

    me: int
    group: Any
    held: dict[int, Tensors] = field(default_factory=dict)

    def fill(self, case: Case) -> None:
        ranks = [r for r, who in case.holders.items() if self.me in who]
        self.held = {rank: numbered_state(case.model, case.old, rank) for rank in ranks}

    def move(self, case: Case) -> tuple[TransferStats, Tensors, float]:
        """Into memory that is fresh, from `held`; with the seconds that it took."""
        new = empty_state(case.model, case.new, self.me) if self.me < case.new[0].world_size else {}
        transfers = case.transfers(self.me)

        def read(t: Transfer) -> torch.Tensor:
            return region(self.held[t.holding], t)

        def write(t: Transfer) -> torch.Tensor:
            return region(new, t)

        dist.barrier()
        began = time.perf_counter()
        moved = carry_out(transfers, self.me, read=read, write=write, group=self.group, device=CPU)
        dist.barrier()
        return moved, new, time.perf_counter() - began


def checked_move(mover: Mover, case: Case) -> TransferStats:
    """Moves and compares every bit with what must be there."""
    mover.fill(case)
    moved, new, _ = mover.move(case)
    want = numbered_state(case.model, case.new, mover.me) if new else {}
    for fqn, (box, tensor) in want.items():
        got = new[fqn][1]
        assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), (
            f"{fqn} {box} is wrong"
        )
    return moved


def _serve(me: int, n: int, port: int, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=me == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    dist.init_process_group(
        "gloo", store=store, rank=me, world_size=n, timeout=timedelta(seconds=120)
    )
    mover = Mover(me, dist.group.WORLD)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send(getattr(importlib.import_module(module), name)(mover, *arguments))
        except Exception as error:  # noqa: BLE001 - sent to the test, which expects or raises it
            traceback.print_exc()
            pipe.send(error)


class Movers:
    """`n` processes; `call` runs a function in all of them at once."""

    def __init__(self, n: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for me in range(n):
            mine, theirs = FORKS.Pipe()
            self.processes.append(
                FORKS.Process(target=_serve, args=(me, n, port, theirs), daemon=True)
            )
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(mine)

    def call(self, function: Any, *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
        """What each returned or raised."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__name__, arguments))
        answers = []
        for me, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout_s):
                raise TimeoutError(
                    f"participant {me} did not answer {function.__name__} within {timeout_s} s"
                )
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
