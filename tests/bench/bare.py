"""The same model and layout as anybody would write it: torchrun's environment, plain FSDP2 over
gloo, no elastic.worker.

`python bare.py PROGRAM GROUPS STEPS BATCH` in each of max(GROUPS) processes with RANK, MASTER_ADDR
and MASTER_PORT set. GROUPS such as 4,3,4: one process group after the other, over the first so many
processes, STEPS steps each. A change is what any warm recovery must do too: leave the old group,
meet, build and cut the model, first step. Rank 0 prints one JSON line per group: {"world",
"change_s" (null for the first), "steps": [[step, at_s], ...]}. STEPS 0: on and on, and rank 0
prints when each step ended, as a script prints its loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import default_collate

from elastic.program import Program, load_program

CLIP, TIMEOUT = 1.0, timedelta(seconds=60)


def build(program: Program, world: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model: Any = program.model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.fill_(1.0) if parameter.ndim < 2 else local.normal_(0.0, 0.02)
    return model, program.optimizer(list(model.named_parameters()))


def train(
    program: Program, dataset: Any, sizes: tuple[int, int, int, int]
) -> list[tuple[int, float]]:
    """`sizes`: rank, world, steps, global batch. Returns when each step ended."""
    rank, world, n_steps, batch = sizes
    model, optimizer = build(program, world)
    share = range(batch)[rank * batch // world : (rank + 1) * batch // world]
    ends = []
    for step in range(n_steps) if n_steps else count():
        rows = default_collate([dataset[(step * batch + i) % len(dataset)] for i in share])
        loss = program.loss(model(rows["input"]), rows) / rows["target"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)  # the loss that a script prints
        float(shown)
        ends.append((step + 1, time.time()))
        if not n_steps and rank == 0:
            print(f"step {step + 1} ended {ends.pop()[1]!r} loss {float(shown):.4f}", flush=True)
    return ends


def main(path: str, groups: str, n_steps: str, batch: str) -> None:
    torch.set_num_threads(1)
    rank, worlds = int(os.environ["RANK"]), [int(world) for world in groups.split(",")]
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    program = load_program(path)
    dataset = program.dataset()
    left_s: float | None = None
    ordinary_s = 0.0
    for number, world in enumerate(worlds):
        if rank >= world:
            continue
        there = dist.PrefixStore(f"group{number}", store)
        dist.init_process_group("gloo", store=there, rank=rank, world_size=world, timeout=TIMEOUT)
        ends = train(program, dataset, (rank, world, int(n_steps), int(batch)))
        times = [at_s for _, at_s in ends]
        change_s = None if left_s is None else times[0] - left_s - ordinary_s
        left_s = times[-1]
        ordinary_s = sorted(b - a for a, b in zip(times, times[1:]))[len(times) // 2 - 1]
        dist.destroy_process_group()
        if rank == 0:
            print(json.dumps({"world": world, "change_s": change_s, "steps": ends}), flush=True)
    store.set(f"done{rank}", b"")
    if rank == 0:
        # rank 0 holds the store
        store.wait([f"done{other}" for other in range(max(worlds))], TIMEOUT)


if __name__ == "__main__":
    main(*sys.argv[1:])
