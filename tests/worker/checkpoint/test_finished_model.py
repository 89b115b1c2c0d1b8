"""A model that is built from a checkpoint has exactly the stored weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.places import PROGRAMS

from elastic.errors import StateLost
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard
from elastic.worker.checkpoint.finished_model import load_model, sample_text

PROGRAM = PROGRAMS / "tiny.py"


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    storage = open_storage(folder)
    items = [
        (Box(name, (0,) * t.ndim, tuple(t.shape), "float32"), t) for name, t in tensors.items()
    ]
    write_shard(storage, 7, 1, rank=0, items=items)
    return commit(storage, 7, 1, world_size=1, epoch=1, meta={})


@pytest.fixture
def program() -> Program:
    return load_program(PROGRAM)


def test_weights_are_those_of_the_checkpoint(program: Program, tmp_path: Path) -> None:
    wanted = {
        f"model.{name}": torch.randn(p.shape) for name, p in program.model().named_parameters()
    }
    uri = store(tmp_path, wanted)
    model = load_model(program, uri)
    assert not model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[f"model.{name}"])
    speaking = replace(
        program, sample=lambda m: f"{sum(float(p.detach().sum()) for p in m.parameters()):.3f}"
    )
    assert sample_text(speaking, uri) == f"{sum(float(t.sum()) for t in wanted.values()):.3f}"
    assert sample_text(replace(program, sample=None), uri) is None


def test_a_checkpoint_of_something_else_is_refused(program: Program, tmp_path: Path) -> None:
    with pytest.raises(StateLost, match="no tensor of this program's model"):
        load_model(program, store(tmp_path, {"model.other": torch.zeros(2)}))
