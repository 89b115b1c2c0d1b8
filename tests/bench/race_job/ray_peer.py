"""The race's model under Ray Train's elastic TorchTrainer: `python ray_peer.py ADDRESS HOST FOLDER
STEPS SAVE_EVERY LEAST MOST`.

Rank 0 reports a checkpoint every so many steps, and once more when `get_preemption_info()` tells of
a notice, as the reference recommends.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import peer
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer

from elastic.cluster.ray._ray_private import connect
from elastic.program import load_program

RESIZE_S = 5.0


def report(built: peer.Model, step: int, train_loss: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if dist.get_rank() == 0:
            peer.save(Path(folder, "state.pt"), built, step)
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step, "loss": train_loss}, checkpoint=checkpoint)


def train(settings: dict[str, Any]) -> None:
    """In each worker."""
    torch.set_num_threads(1)
    program = load_program(peer.PROGRAM)
    built, first = peer.build(program), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            first = peer.load(Path(folder, "state.pt"), built)
    marks, saved_for_notice = peer.Marks(Path(settings["folder"])), False
    for step, train_loss in peer.steps(program, built, first, settings["last"]):
        marks.done(step, train_loss)
        noticed = ray.train.get_preemption_info() is not None
        if step % settings["save_every"] == 0 or (noticed and not saved_for_notice):
            report(built, step, train_loss)
        saved_for_notice = saved_for_notice or noticed


def main(address: str, host: str, folder: str, *numbers: str) -> None:
    last, save_every, least, most = map(int, numbers)
    connect(address, "race", host)
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "last": last, "save_every": save_every},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(least, most), elastic_resize_monitor_interval_s=RESIZE_S
        ),
        run_config=ray.train.RunConfig(
            name="race", storage_path=f"{folder}/storage",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
