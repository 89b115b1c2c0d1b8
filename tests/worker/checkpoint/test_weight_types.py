"""Exports in bfloat16, int8 and float8: transformers loads them, and computes with what they
hold."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.places import PROGRAMS
from support.reference import build
from support.worker.exported import stored, transformers_model

from elastic.errors import SpecError
from elastic.models.huggingface import causal_lm
from elastic.models.lora import lora
from elastic.models.nf4 import pack
from elastic.models.weight_types import in_type
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Box, Job, Layout
from elastic.worker.checkpoint.checkpoint_index import open_checkpoint
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, export_for, import_state
from elastic.worker.checkpoint.checkpoint_writer import commit, write_shard
from elastic.worker.checkpoint.finished_model import load_model
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.job_program import with_frozen
from elastic.worker.program.model_profile import trace
from elastic.worker.state.train_state import TrainState

pytestmark = pytest.mark.slow  # the first of them imports torchao
quantization = pytest.importorskip("torchao.quantization", reason="it is in the extra 'test'")
IDS = torch.arange(24).view(2, 12) * 5 % 64


def export(program: Program, folder: Path, kind: str, **more: Any) -> dict[str, Any]:
    run, out = (open_storage(str(folder / name)) for name in ("run", f"out-{kind}"))
    return export_for(run, None, out, program=program, weights=kind, **more)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def with_matrices_of(loaded: torch.nn.Module, model: torch.nn.Module, off: float) -> Any:
    """The trained model with what the loaded matrices stand for, each at most `off` of its row's
    largest weight away from what was trained."""
    changed = copy.deepcopy(model)
    n = 0
    for name, module in loaded.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "qdata"):
            kept, trained = weight.dequantize().float(), model.get_submodule(name).weight
            assert ((kept - trained).abs() <= off * trained.abs().amax(1, keepdim=True)).all(), name
            changed.get_submodule(name).weight = torch.nn.Parameter(kept)
            n += 1
    assert n == 4 * 7
    return changed


@pytest.mark.parametrize(
    ("kind", "off"), [("int8", 1.01 / 255), ("float8", 1 / 16)], ids=["int8", "float8"]
)
def test_transformers_loads_matrices_of_8_bits(tmp_path: Path, kind: str, off: float) -> None:
    """Also out of several files; tied embeddings stay as they are."""
    program = load_program(PROGRAMS / "hf_tiny.py")
    model = stored(program, tmp_path)
    done = export(program, tmp_path, kind, file_bytes=20_000)
    assert len(done["files"]) > 3 and "config.json" in done["files"]
    loaded = transformers_model(tmp_path / f"out-{kind}")
    inner = loaded.model.layers[0].mlp.up_proj.weight.qdata
    assert inner.dtype == {"int8": torch.int8, "float8": torch.float8_e4m3fn}[kind]
    torch.testing.assert_close(
        logits(loaded), logits(with_matrices_of(loaded, model, off)), atol=1e-4, rtol=1e-4
    )


def adapters_on_4_bits(folder: Path) -> tuple[Program, torch.nn.Module]:
    """A copy in a run of adapters that have learned something, and the model that it is."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "made")
    tiny = load_program(PROGRAMS / "hf_tiny.py")
    base = causal_lm(folder / "made", tiny.dataset, tiny.optimizer)
    job = Job(name="t", steps=1, global_batch=12, frozen_weights="nf4")
    program = with_frozen(lora(base, ("q_proj", "down_proj"), r=4), job)
    groups = Groups(0, Layout(), torch.device("cpu"))
    state = TrainState(
        program, trace(program), groups, layout=Layout(), layers=(4,), rank=0, job=job
    )
    state.read_frozen()
    state.fill_fresh(3)
    for fqn, (_, tensor) in state.tensors.items():
        if ".lora_B." in fqn and fqn.startswith("model."):
            tensor.normal_(std=0.3)
    run = open_storage(str(folder / "run"))
    write_shard(run, 1, 1, rank=0, items=state.tensors.values())
    uri = commit(run, 1, 1, world_size=1, epoch=1, meta={})
    model = load_model(program, uri)
    torch.testing.assert_close(logits(model), logits(state.model), atol=0, rtol=0)
    return program, model


def test_adapters_on_4_bits_are_merged(tmp_path: Path) -> None:
    program, model = adapters_on_4_bits(tmp_path)
    wanted = logits(model)
    with pytest.raises(SpecError, match="--weights int8: of a job with adapters it needs --merged"):
        export(program, tmp_path, "int8")
    export(program, tmp_path, "", merged=True)
    whole = transformers_model(tmp_path / "out-")
    torch.testing.assert_close(logits(whole), wanted, atol=1e-5, rtol=1e-5)
    before = logits(transformers_model(tmp_path / "made"))
    assert (wanted - before).abs().max() > 0.05
    export(program, tmp_path, "bfloat16", merged=True)
    half = transformers_model(tmp_path / "out-bfloat16")
    assert half.dtype == torch.bfloat16
    for (name, one), (_, other) in zip(
        half.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert torch.equal(one, other.bfloat16()), name
    export(program, tmp_path, "int8", merged=True)
    loaded = transformers_model(tmp_path / "out-int8")
    same = with_matrices_of(loaded, whole, 1.01 / 255)
    torch.testing.assert_close(logits(loaded), logits(same), atol=1e-4, rtol=1e-4)


def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = replace(load_program(PROGRAMS / "hf_tiny.py"), files=None)
    with pytest.raises(SpecError, match=r"--weights float8: nothing puts a config.json"):
        export(plain, tmp_path, "float8")
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(
        SpecError, match="^--weights int8 needs torchao, which is not installed: pip"
    ):
        export(load_program(PROGRAMS / "hf_tiny.py"), tmp_path, "int8")


def test_another_type_is_refused() -> None:
    program = load_program(PROGRAMS / "tiny.py")
    with pytest.raises(SpecError, match="weights: 'fp8' is none of bfloat16, int8, float8"):
        in_type("fp8", program, {}, parts=lambda name: iter(()))


def test_what_an_import_brings_to_a_job_in_4_bits(tmp_path: Path) -> None:
    """Weights in float32 are packed on the way, bytes of such a job stay; 8 bits are refused."""
    whole, low = (load_program(PROGRAMS / f"tiny_{name}.py") for name in ("qlora", "nf4"))
    model, (packed, *_) = build(whole, 3), sorted(low.packed)
    folder = tmp_path / "given"
    folder.mkdir()
    save_file(
        {name: p.detach() for name, p in model.named_parameters()}, folder / "model.safetensors"
    )
    request = ImportRequest(trace(low), 3, packed=low.packed)

    def brought(source: str, name: str) -> tuple[str, torch.Tensor]:
        uri = import_state(source, open_storage(str(tmp_path / name)), request)["uri"]
        checkpoint = open_checkpoint(uri)
        shape, dtype = checkpoint.tensors[f"model.{packed}"]
        assert dtype == "uint8"
        return uri, checkpoint.read(Box(f"model.{packed}", (0, 0), shape, dtype))

    uri, first = brought(str(folder), "one")
    assert torch.equal(first, pack(dict(model.named_parameters())[packed].detach()))
    assert torch.equal(brought(uri, "two")[1], first)
    eight = {name: p.detach().to(torch.int8) for name, p in model.named_parameters()}
    save_file(eight, folder / "model.safetensors")
    with pytest.raises(SpecError, match="is int8, without its scales; quantised weights are not"):
        brought(str(folder), "three")
