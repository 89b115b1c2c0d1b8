"""An import is read once and written in files of a bounded size; tied weights are found under any of
their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from support.places import PROGRAMS

from elastic.errors import SpecError
from elastic.program import Program, load_program
from elastic.reshard.rank_boxes import state_specs
from elastic.storage import open_storage
from elastic.storage.local import LocalStorage
from elastic.types import Box
from elastic.worker.checkpoint import checkpoint_index, checkpoint_verbs
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state
from elastic.worker.checkpoint.foreign_dcp import open_plain
from elastic.worker.program.model_profile import fresh_buffers, trace


def wanted(program: Program) -> ImportRequest:
    profile = trace(program)
    return ImportRequest(profile, 3, buffers=lambda: fresh_buffers(program, 3, profile))


def drawn(name: str) -> tuple[Program, torch.nn.Module]:
    program = load_program(str(PROGRAMS / name))
    model = program.model()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return program, model


def test_a_large_state_is_imported_as_several_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object storage bounds the size of a file, Google's at 335 GB."""
    monkeypatch.setattr(checkpoint_verbs, "PART_BYTES", 1000)
    monkeypatch.setattr(checkpoint_verbs, "SHARD_BYTES", 30_000)
    program, model = drawn("tiny.py")
    save_file({k: v.detach().clone() for k, v in model.named_parameters()}, tmp_path / "in")
    (tmp_path / "in").rename(tmp_path / "in.safetensors")
    run = open_storage(tmp_path / "run")
    done = import_state(str(tmp_path / "in.safetensors"), run, wanted(program))
    shards = sorted(Path(done["uri"]).glob("*.distcp"))
    assert len(shards) > 3 and done["n_bytes"] == sum(s.stat().st_size for s in shards)
    checkpoint, request = checkpoint_index.open_checkpoint(done["uri"]), wanted(program)
    assert checkpoint.verify() == [] and checkpoint_verbs.listed(run)[0].world_size == len(shards)
    checkpoint.check(state_specs(request.profile))
    for name, tensor in model.named_parameters():
        assert torch.equal(checkpoint.read_whole(f"model.{name}"), tensor)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_tied_weight_is_found_under_either_of_its_names(prefix: str, tmp_path: Path) -> None:
    """safetensors.torch.save_model keeps the one that comes first by its letters."""
    program, model = drawn("tiny_tied.py")
    save_model(model, str(tmp_path / "in.safetensors"))
    there = load_file(tmp_path / "in.safetensors")
    (tied,) = checkpoint_verbs.tied_names(trace(program).specs).items()
    weights = {name: tensor for name, tensor in there.items() if name not in tied}
    weights |= {tied[0]: dict(model.named_parameters())[tied[1]].detach().clone()}
    save_file({prefix + k: v for k, v in weights.items()}, tmp_path / "in.safetensors")
    run = open_storage(tmp_path / "run")
    done = import_state(str(tmp_path / "in.safetensors"), run, wanted(program))
    checkpoint = checkpoint_index.open_checkpoint(done["uri"])
    for name, tensor in model.named_parameters():
        assert torch.equal(checkpoint.read_whole(f"model.{name}"), tensor)
    del weights[tied[0]]
    save_file(weights, tmp_path / "in.safetensors")
    with pytest.raises(SpecError, match=rf"it has no tensor {tied[1]} \(and 0 more of"):
        import_state(
            str(tmp_path / "in.safetensors"), open_storage(tmp_path / "other"), wanted(program)
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_large_tensor_of_plain_dcp_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one blob, and is taken over in parts."""
    monkeypatch.setattr(checkpoint_verbs, "PART_BYTES", 1 << 20)
    value = torch.randn(16, 1 << 19)
    other = torch.arange(6000.0).reshape(2, 3000).t()  # its memory is in another order
    dcp.save({"w": value, "t": other}, checkpoint_id=tmp_path / "plain", no_dist=True)
    n_read = 0
    for name in ("read_into", "read_parts"):
        real = getattr(LocalStorage, name)

        def read(
            self: Any, key: str, offset: int, into: memoryview, real: Any = real, **to: Any
        ) -> int:
            nonlocal n_read
            n_read += len(into)
            return int(real(self, key, offset, into, **to))

        monkeypatch.setattr(LocalStorage, name, read)
    checkpoint = open_plain(str(tmp_path / "plain"))
    box = Box.whole("w", (16, 1 << 19), "float32")
    for part in box.in_rows(checkpoint_verbs.PART_BYTES):
        rows = slice(part.offsets[0], part.offsets[0] + part.sizes[0])
        assert torch.equal(checkpoint.read(part), value[rows])
    assert value.nbytes <= n_read <= 1.1 * value.nbytes
    some = Box("w", (3, 100), (2, 7), "float32")
    assert torch.equal(checkpoint.read(some), value[3:5, 100:107])
    assert torch.equal(checkpoint.read_whole("t"), other)
    assert torch.equal(checkpoint.read(Box("t", (1000, 0), (9, 2), "float32")), other[1000:1009])
