"""The same model as anybody would write it: torchrun's environment, plain FSDP2, no elastic.worker;
and bare messages.

`python -m elastic.certify.reference.bare_torch train STEPS` or `... wire BYTES`, one process per
rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 prints one JSON line: {"step_s":
[...], "losses": [...]} or {"gb_per_s": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.program import load_program
from elastic.scenarios.one_process import program_file

MESSAGE_BYTES = 4 << 20
ROUNDS = 5


def main(mode: str, amount: int) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        rank == 0,
        timedelta(seconds=60),
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    out = (
        train(device, world, amount)
        if mode == "train"
        else {"gb_per_s": wire(device, world, amount)}
    )
    if rank == 0:
        print(json.dumps(out), flush=True)
    part(store, rank, world)


def part(store: Any, rank: int, world: int) -> NoReturn:
    """Ends this rank once all have done their work; rank 0, which holds the store, last. Not by way
    of the interpreter, which was seen to end in std::terminate of one of torch's threads."""
    store.set(f"done-{rank}", b"")
    for other in range(world):
        store.get(f"done-{other}")
    store.set(f"gone-{rank}", b"")
    for other in range(world if rank == 0 else 0):
        store.get(f"gone-{other}")
    os._exit(0)


def train(device: torch.device, world: int, n_steps: int) -> dict[str, Any]:
    """Plain sharded data parallelism over the same global batch."""
    program: Any = load_program(program_file("large"))
    torch.manual_seed(7)
    model: Any = program.model()
    program.init(model)
    model.to(device)
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer: Any = program.optimizer(list(model.named_parameters()))
    dataset: Any = program.dataset()
    rank = dist.get_rank()
    share = range(GLOBAL_BATCH)[rank * GLOBAL_BATCH // world : (rank + 1) * GLOBAL_BATCH // world]
    step_s, losses = [], []
    for step in range(n_steps):
        began = time.perf_counter()
        rows = default_collate([dataset[(step * GLOBAL_BATCH + i) % len(dataset)] for i in share])
        rows = {key: value.to(device) for key, value in rows.items()}
        loss = program.loss(model(rows["input"]), rows) / rows["target"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)  # the loss that a script prints
        losses.append(float(shown) / world)
        step_s.append(time.perf_counter() - began)
    return {"step_s": step_s, "losses": losses}


def wire(device: torch.device, world: int, n_bytes: int) -> float:
    """Every rank sends to its right neighbor at once; GB/s of all together, the median of a few
    rounds."""
    rank = dist.get_rank()
    out = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(ROUNDS):
        # memory that nobody has touched, as in a move
        into = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        _meet()
        began = time.perf_counter()
        works = []
        for at in range(0, n_bytes, MESSAGE_BYTES):
            ops = [
                dist.P2POp(dist.isend, out[at : at + MESSAGE_BYTES], (rank + 1) % world),
                dist.P2POp(dist.irecv, into[at : at + MESSAGE_BYTES], (rank - 1) % world),
            ]
            works += dist.batch_isend_irecv(ops)
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        _meet()
        rates.append(world * n_bytes / (time.perf_counter() - began) / 1e9)
    return median(rates)


def _meet() -> None:
    """A barrier over gloo: dist.barrier would choose a GPU by the rank, and each rank sees only its
    own."""
    dist.all_reduce(torch.zeros(1))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
