"""Saves, commits, removes and loads a checkpoint, killed at every system call of it in turn:
`kill_everywhere.py FOLDER EVERY` prints the points as one line of JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from elastic.reshard.rank_boxes import boxes, owned_boxes, state_specs
from elastic.storage import Storage, open_storage
from elastic.types import Layout, ModelProfile, OptimizerSpec, TensorSpec
from elastic.worker.checkpoint import checkpoint_index
from elastic.worker.checkpoint.checkpoint_format import Damaged
from elastic.worker.checkpoint.checkpoint_index import find, open_checkpoint
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard

MODEL = ModelProfile(
    1,
    0,
    (
        TensorSpec("w", (40, 30), "float32", block=0),
        TensorSpec("big", (300, 400), "float32", block=0),
    ),
    (OptimizerSpec(("m",), ("n",)),),
)


CUT = (Layout(dp_shard=2), (1,))


def save(storage: Storage, step: int) -> str:
    """A state whose every element is `step`."""
    for rank in range(2):
        mine = owned_boxes(MODEL, *CUT, rank)
        write_shard(
            storage,
            step,
            1,
            rank=rank,
            items=[(b, torch.full(b.sizes, step, dtype=getattr(torch, b.dtype))) for b in mine],
        )
    return commit(storage, step, 1, world_size=2, epoch=1, meta={})


def load(uri: str) -> int:
    """The step whose state it is; raises where it is not whole, fails where it is anything else."""
    checkpoint = open_checkpoint(uri)
    checkpoint.check(state_specs(MODEL))
    seen: set[float] = set()
    for rank in range(2):
        items = [
            (b, torch.empty(b.sizes, dtype=getattr(torch, b.dtype)))
            for b in boxes(MODEL, Layout(dp_shard=2), (1,), rank)
        ]
        checkpoint.fill(items)
        seen |= {float(value) for _, tensor in items for value in tensor.unique()}
    assert seen == {checkpoint.step}, f"{uri} is of step {checkpoint.step} and holds {seen}"
    return checkpoint.step


def load_newest(storage: Storage) -> tuple[int, list[str]]:
    """As a run does it: the newest that can be read; -1 = none. And what was wrong with newer
    ones."""
    problems: list[str] = []
    for found in find(storage, problems):
        try:
            return load(found.uri), problems
        except Damaged as error:
            problems.append(str(error))
    return -1, problems


# -------------------------------------------------------------------------------------- as a script


class Points:
    """Where the process may be killed: each call that changes the file system, before it and, where
    it matters, after it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.phase, self.kill_at, self.lock = "save", -1, threading.Lock()

    def reached(self, name: str) -> None:
        with self.lock:
            if self.kill_at == len(self.names):
                os.kill(os.getpid(), signal.SIGKILL)
            self.names.append(f"{self.phase}: {name}")

    def watch(self, owner: Any, name: str, after: bool = False) -> None:
        real = getattr(owner, name)

        def called(*arguments: Any, **more: Any) -> Any:
            if not after:
                self.reached(name)
            done = real(*arguments, **more)
            if after:
                self.reached(f"after {name}")
            return done

        setattr(owner, name, called)

    def watch_all(self) -> None:
        for name in ("fsync", "link", "unlink", "rmdir", "mkdir"):
            self.watch(os, name)
        for name in ("open", "replace", "unlink"):
            self.watch(Path, name)
        self.watch(Path, "replace", after=True)
        self.watch(os, "link", after=True)
        self.watch(torch, "save")


def scenario(points: Points, folder: Path) -> None:
    storage = open_storage(folder)
    points.phase = "save"
    for rank in range(2):
        items = [
            (b, torch.full(b.sizes, 30, dtype=getattr(torch, b.dtype)))
            for b in owned_boxes(MODEL, *CUT, rank)
        ]
        write_shard(storage, 30, 1, rank=rank, items=items)
    points.phase = "commit"
    commit(storage, 30, 1, world_size=2, epoch=1, meta={})
    points.phase = "retention"
    checkpoint_index.remove_copy(storage, storage.uri_of("checkpoints/step-00000010.g0001"), 1)
    checkpoint_index.clean(storage, 1, (30, 1))
    points.phase = "load"
    load_newest(storage)


def main(root: Path, every: int) -> None:
    torch.set_num_threads(1)
    points = Points()
    points.watch_all()
    scenario(points, shutil.copytree(root / "before", root / "warm"))  # imports
    folder = shutil.copytree(root / "before", root / "dry")
    points.names.clear()
    scenario(points, folder)
    names, killed = list(points.names), []
    for at in range(0, len(names), every):
        folder = shutil.copytree(root / "before", root / f"at{at}")
        child = os.fork()
        if child == 0:
            points.kill_at = at
            points.names.clear()
            scenario(points, folder)
            os._exit(3)
        status = os.waitpid(child, 0)[1]
        killed.append(
            (at, names[at], os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
        )
    print(json.dumps(killed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
