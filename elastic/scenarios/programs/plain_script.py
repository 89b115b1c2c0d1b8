"""A plain DDP script, as torchrun would start it: saves to the folder that it is given, knows
nothing of elastic.

`python plain_script.py FOLDER`. `losses(n)` are those of its first steps in one process, whatever
the ranks.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, LEARNING_RATE, SAVE_EVERY, PACE_S = 24, 8, 0.02, 5, 0.1


def rows_of(step: int) -> torch.Tensor:
    """[row, feature] of a step, on every rank the same."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_sum(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    errors: torch.Tensor = model(rows).squeeze(1) - rows.sum(1)
    return errors.square().sum()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def losses(n: int) -> list[float]:
    model, optimizer = made()
    out = []
    for step in range(1, n + 1):
        loss = loss_sum(model, rows_of(step)) / ROWS
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, optimizer = made()
    model, saved, step = DistributedDataParallel(plain), folder / "state.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        plain.load_state_dict(state["model"])
        step = state["step"]
    while True:
        step += 1
        mine = rows_of(step)[rank * ROWS // world : (rank + 1) * ROWS // world]
        loss = loss_sum(model, mine) * world / ROWS  # DDP takes the mean over the ranks
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % SAVE_EVERY == 0:
            torch.save({"model": plain.state_dict(), "step": step}, folder / "state.new")
            os.replace(folder / "state.new", saved)
        if rank == 0:
            print(f"step {step}: loss {float(shown):.6f}", flush=True)
        time.sleep(PACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
