"""The race's model with DDP as one writes it for torchrun or Ray Train: restarts, and a checkpoint
every so many steps.

`torchrun ... peer.py FOLDER STEPS SAVE_EVERY`. Every rank appends a line per finished step to
FOLDER/steps.jsonl. On SIGTERM on any rank all save after the same step and leave, so that a notice
and a growth cost torchrun no step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from elastic.data.order import sample_ids
from elastic.program import Program, load_program

PROGRAM = Path(__file__).resolve().parent / "program.py"
STEPS = "steps.jsonl"
SEED, BATCH = 1, 12
MEET = timedelta(seconds=15)
Model = tuple[torch.nn.Module, torch.optim.Optimizer]


def build(program: Program) -> Model:
    """All ranks hold the same weights."""
    model = program.model()
    with torch.no_grad():
        assert program.init is not None
        program.init(model)
    return model, program.optimizer(list(model.named_parameters()))


def steps(program: Program, built: Model, first: int, last: int) -> Iterator[tuple[int, float]]:
    """Trains steps first+1 .. last; yields the number and the loss of each."""
    model, optimizer = built
    rank, world = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model)
    dataset = program.dataset()
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for step in range(first, last):
        rows = default_collate(
            [dataset[i] for i in sample_ids(len(dataset), BATCH, SEED, step=step)[share]]
        )
        n_tokens = BATCH * rows["target"].shape[1]
        # DDP takes the mean over ranks
        loss = program.loss(wrapped(rows["input"]), rows) * world / n_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        yield step + 1, float(shown)


class Marks:
    """Writes what each rank has finished, and when."""

    def __init__(self, folder: Path) -> None:
        began = torch.tensor(time.time_ns())
        dist.broadcast(began, 0)
        self.who = {"group": int(began), "rank": dist.get_rank(), "world": dist.get_world_size()}
        self.file = (folder / STEPS).open("a")

    def done(self, step: int, train_loss: float) -> None:
        mark = {
            **self.who,
            "step": step,
            "at_s": time.time(),
            "pid": os.getpid(),
            "loss": train_loss,
        }
        self.file.write(json.dumps(mark) + "\n")
        self.file.flush()


def save(path: Path, built: Model, step: int) -> None:
    model, optimizer = built
    new = path.with_suffix(".new")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, new
    )
    os.replace(new, path)


def load(path: Path, built: Model) -> int:
    """Returns the step of the checkpoint; 0 = there is none."""
    if not path.exists():
        return 0
    state = torch.load(path)
    built[0].load_state_dict(state["model"])
    built[1].load_state_dict(state["optimizer"])
    return int(state["step"])


def anybody(told: bool) -> bool:
    flag = torch.tensor(float(told))
    dist.all_reduce(flag)
    return bool(flag)


def under_torchrun(folder: Path, last: int, save_every: int, told: Callable[[], bool]) -> None:
    torch.set_num_threads(1)
    # with the default of 30 minutes a rank that never comes hangs all
    dist.init_process_group("gloo", timeout=MEET)
    program, path = load_program(PROGRAM), folder / "state.pt"
    built = build(program)
    first, marks = load(path, built), Marks(folder)
    for step, train_loss in steps(program, built, first, last):
        marks.done(step, train_loss)
        leave = anybody(told())
        if dist.get_rank() == 0 and (step % save_every == 0 or leave):
            save(path, built, step)
        if leave:
            dist.barrier()
            sys.exit(75)  # any failure makes the other agents meet again
    dist.destroy_process_group()


if __name__ == "__main__":
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    under_torchrun(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), lambda: bool(signals))
