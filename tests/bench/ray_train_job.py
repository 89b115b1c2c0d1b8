"""The bench's model under Ray Train's elastic TorchTrainer, as its guides have it: FSDP2, AdamW, a
sharded checkpoint by DCP.

`python ray_train_job.py ADDRESS HOST FOLDER PROGRAM CAUSE LEAST MOST [RESIZE_S]`: the script that a
user starts. Each worker appends a line per finished step to FOLDER/steps.jsonl. Ray Train has its
defaults; `max_failures=-1` because the default is to give up.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bare import CLIP, build
from ray.train.torch import TorchTrainer
from ray_train_figures import PIDS, SAVE_EVERY, STEPS
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import default_collate

from elastic.cluster.ray._ray_private import connect
from elastic.program import Program, load_program

BATCH = 4  # one sample per worker, as in the published measurement


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Takes over the newest reported checkpoint; returns its step, 0 = there is none."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
    with checkpoint.as_directory() as folder:
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return int(state["step"])


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, loss: float) -> None:
    """Each worker's part into a folder of its own; Ray Train brings them together in the run's
    storage."""
    weights, moments = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(
            {"model": weights, "optimizer": moments, "step": torch.tensor(step)},
            checkpoint_id=folder,
        )
        ray.train.report(
            {"step": step, "loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder)
        )


def steps(
    program: Program, model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int
) -> Iterator[tuple[int, float]]:
    """Trains for ever; yields the number and the loss of each step that is done. The same step as
    in bare.py."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share = range(BATCH)[rank * BATCH // world : (rank + 1) * BATCH // world]
    dataset = program.dataset()
    step = first
    while True:
        rows = default_collate([dataset[(step * BATCH + i) % len(dataset)] for i in share])
        loss = program.loss(model(rows["input"]), rows) / rows["target"].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        step += 1
        yield step, float(shown)


def train(settings: dict[str, str]) -> None:
    """In each worker."""
    torch.set_num_threads(1)
    folder = Path(settings["folder"])
    rank, world = dist.get_rank(), dist.get_world_size()
    began = torch.tensor(time.time_ns())
    dist.broadcast(began, 0)
    who = {"group": int(began), "rank": rank, "world": world}
    with (folder / STEPS).open("a") as log:
        append(folder / PIDS, {**who, "pid": os.getpid()})
        program = load_program(settings["program"])
        model, optimizer = build(program, world)
        saved_for_notice = False
        for step, loss in steps(program, model, optimizer, load(model, optimizer)):
            log.write(json.dumps({**who, "step": step, "at_s": time.time()}) + "\n")
            log.flush()
            noticed = settings["cause"] == "notice" and ray.train.get_preemption_info() is not None
            # what Ray Train's reference recommends
            if step % SAVE_EVERY == 0 or (noticed and not saved_for_notice):
                save(model, optimizer, step, loss)
            saved_for_notice = saved_for_notice or noticed


def append(path: Path, value: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def main(address: str, host: str, folder: str, program: str, cause: str, *numbers: str) -> None:
    """`numbers`: workers at least and at most; seconds from one look for more nodes to the next,
    where not Ray Train's own."""
    least, most, *resize_s = numbers
    more: dict[str, Any] = (
        {"elastic_resize_monitor_interval_s": float(resize_s[0])} if resize_s else {}
    )
    connect(address, "bench", host)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "program": program, "cause": cause},
        scaling_config=ray.train.ScalingConfig(num_workers=(int(least), int(most)), **more),
        run_config=ray.train.RunConfig(
            name="bench", storage_path=f"{folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
