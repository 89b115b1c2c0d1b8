"""A model that is built from a checkpoint has exactly the stored weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.places import PROGRAMS

from elastic.errors import SpecError, StateLost
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box
from elastic.worker.checkpoint.checkpoint_verbs import export
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


def test_what_the_optimizer_keeps_of_the_weights_in_their_place(tmp_path: Path) -> None:
    """As an average of them: under their names, beside what is not trained. Where it does not keep
    it of all, nothing is written: averages and weights would stand side by side."""
    wanted = {
        "model.a": torch.ones(2, 3), "model.scale": torch.ones(()), "model.frozen": torch.ones(4),
        "optim.mean.a": torch.full((2, 3), 5.0), "optim.mean.scale": torch.tensor(6.0),
        "optim.step.a": torch.tensor(1.0), "optim.step.scale": torch.tensor(1.0),
    }  # fmt: skip
    store(tmp_path, wanted)
    run = open_storage(tmp_path)
    export(run, None, open_storage(tmp_path / "out"), state="mean")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: float(t.sum()) for name, t in found.items()} == {
        "a": 30.0, "scale": 6.0, "frozen": 4.0
    }  # fmt: skip
    with pytest.raises(SpecError, match="--state step: of a the optimizer keeps mean, step, not"):
        export(run, None, open_storage(tmp_path / "b"), state="step")
    store(tmp_path / "two", {name: t for name, t in wanted.items() if name != "optim.mean.scale"})
    with pytest.raises(SpecError, match="--state mean: of scale the optimizer keeps step, not"):
        export(open_storage(tmp_path / "two"), None, open_storage(tmp_path / "c"), state="mean")
