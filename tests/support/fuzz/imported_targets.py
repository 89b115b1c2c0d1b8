"""Readers of weights and checkpoints that others have made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.fuzz import mutating
from support.fuzz.target import Target

from elastic.errors import SpecError
from elastic.storage import open_storage
from elastic.worker.checkpoint.checkpoint_format import METADATA, Damaged
from elastic.worker.checkpoint.foreign_dcp import open_plain
from elastic.worker.program.safetensor_files import (
    INDEX,
    SafetensorFiles,
    safetensor_paths,
    write_files,
)


def dcp_index(folder: Path) -> Target:
    """A pickle, of which nothing is run: what is refused is refused by its name."""
    state = {"model": {"w": torch.ones(3, 2), "b": torch.ones(2)}, "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group stands
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    path = folder / METADATA

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        found = open_plain(str(folder))
        return found.tensors

    return Target("dcp-index", [path.read_bytes()], read, (SpecError, Damaged))


def safetensors(folder: Path) -> list[Target]:
    folder.mkdir()
    tensors = {"a.w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    shapes = {name: (tuple(one.shape), "float32") for name, one in tensors.items()}
    write_files(open_storage(str(folder)), shapes, lambda name: iter([tensors[name]]))
    path = folder / "model.safetensors"
    good = path.read_bytes()

    def read(data: bytes) -> Any:
        path.write_bytes(data)
        found = SafetensorFiles(path)
        try:
            return sorted(found.tensors.items())
        finally:
            found.close()

    def read_names(data: bytes) -> Any:
        path.write_bytes(good)
        (folder / INDEX).write_bytes(data)
        return [path.name for path in safetensor_paths(folder)]

    names = b'{"metadata": {"total_size": 32}, "weight_map": {"a.w": "model.safetensors"}}'
    return [
        Target("safetensors", [good], read, (SpecError,)),
        Target("safetensors-index", [names], read_names, (SpecError,), mutating.as_json),
    ]


def opened(folder: Path) -> list[Target]:
    return [dcp_index(folder / "dcp"), *safetensors(folder / "weights")]
