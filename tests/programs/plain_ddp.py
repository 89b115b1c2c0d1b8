"""A plain DDP script as people have them: started by torchrun, saves to a folder, knows nothing of
elastic.

`python plain_ddp.py FOLDER STEPS [--listen] [--stay-at STEP] [--fail-at STEP] [--alone]`
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 5

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--listen", action="store_true", help="save and leave on SIGTERM")
parser.add_argument("--stay-at", type=int, default=-1, help="of its first start, for SIGTERM")
parser.add_argument("--fail-at", type=int, default=-1)
parser.add_argument("--alone", action="store_true", help="forgets the process group")
parser.add_argument("--step-s", type=float, default=0.1)
given = parser.parse_args()
told: list[int] = []
if given.listen:
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
if given.alone:
    time.sleep(600)
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
newest, begun = given.folder / "state.pt", 0
if newest.exists():
    state = torch.load(newest)
    model.module.load_state_dict(state["model"])
    begun = state["step"]


def save(step: int) -> None:
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, newest.with_suffix(".new"))
        os.replace(newest.with_suffix(".new"), newest)


for step in range(begun + 1, given.steps + 1):
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    mine = rows[rank * 24 // world : (rank + 1) * 24 // world]
    error = (model(mine).squeeze(1) - mine.sum(1)).square().sum() * world / 24
    optimizer.zero_grad()
    error.backward()
    optimizer.step()
    time.sleep(given.step_s)
    until = time.monotonic() + 30.0
    while step == given.stay_at and not begun and not told and time.monotonic() < until:
        time.sleep(0.05)
    shown = torch.stack([error.detach() / world, torch.tensor(float(bool(told)))])
    dist.all_reduce(shown)
    if step == given.fail_at:
        raise ValueError(f"this script's own error at step {step}")
    if step % SAVE_EVERY == 0 or step == given.steps or shown[1]:
        save(step)
    if rank == 0:
        print(f"step {step}: loss {shown[0]:.5f}, {world} workers")
    if shown[1]:
        print(f"rank {rank} leaves after step {step}")
        dist.barrier()
        sys.exit(0)
dist.destroy_process_group()
