"""Exported folders: transformers loads them and says the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support.places import PROGRAMS, TESTS
from support.reference import train_alone
from support.worker.chain import job_of, pass_through
from support.worker.exported import stored, transformers_model
from support.worker.worker_pool import Pool

from elastic.errors import SpecError
from elastic.program import Program, load_program
from elastic.storage import open_storage
from elastic.types import Job, Layout
from elastic.worker.checkpoint import checkpoint_index, checkpoint_writer
from elastic.worker.checkpoint.checkpoint_verbs import PART_BYTES, export, export_for, tied_names
from elastic.worker.checkpoint.finished_model import load_model
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import trace
from elastic.worker.state.train_state import TrainState


@pytest.mark.parametrize("name", ["hf_tiny.py", "hf_qwen3.py", "hf_gpt2.py"])
def test_from_pretrained_loads_what_was_exported(name: str, tmp_path: Path) -> None:
    program = load_program(PROGRAMS / name)
    model = stored(program, tmp_path)
    done = export_for(
        open_storage(str(tmp_path / "run")),
        None,
        open_storage(str(tmp_path / "out")),
        program=program,
    )
    assert set(done["files"]) == {"model.safetensors", "config.json"}
    with safe_open(str(tmp_path / "out" / "model.safetensors"), "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (name == "hf_qwen3.py")  # noqa: SIM118 - tied ones are there once
    loaded = transformers_model(tmp_path / "out").eval()
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", ["journal", "job"])
@pytest.mark.parametrize("name", ["config.json", "vocab.json"])
def test_tied_weights_are_there_once_where_a_library_ties_them(
    given: str, name: str, tmp_path: Path
) -> None:
    """By its config.json; who has none finds each name."""
    program = load_program(PROGRAMS / "hf_gpt2.py")
    assert program.files is not None
    files = {name: program.files()["config.json"]}
    model = stored(program, tmp_path)
    run, out = (open_storage(str(tmp_path / place)) for place in ("run", "out"))
    if given == "job":
        export_for(run, None, out, program=replace(program, files=lambda: files))
    else:
        export(run, None, out, tied=tied_names(trace(program).specs), beside=files)
    with safe_open(str(tmp_path / "out" / "model.safetensors"), "pt") as file:
        found = set(file.keys())
    assert found == model.state_dict().keys() - ({"lm_head.weight"} if "config" in name else set())
    if name == "config.json":
        loaded = transformers_model(tmp_path / "out")
        assert torch.equal(loaded.lm_head.weight, model.get_parameter("lm_head.weight"))


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    base = load_program(PROGRAMS / "hf_tiny.py")
    stored(base, tmp_path)
    (tmp_path / "made" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "made" / "notes.txt").write_text("no")
    from elastic.models.huggingface import causal_lm

    program = causal_lm(tmp_path / "made", base.dataset, base.optimizer)
    done = export_for(
        open_storage(str(tmp_path / "run")),
        None,
        open_storage(str(tmp_path / "out")),
        program=program,
    )
    assert {"tokenizer.json", "generation_config.json", "config.json"} < set(done["files"])
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    with pytest.raises(SpecError, match="has no adapters"):
        export_for(
            open_storage(str(tmp_path / "run")),
            None,
            open_storage(str(tmp_path / "b")),
            program=program,
            merged=True,
        )


# ----------------------------------------------------------------------------------------- adapters


PROGRAM = """
import sys
sys.path.insert(0, {programs!r})
import hf_qwen3
import torch
from elastic.models.huggingface import causal_lm
from elastic.models.lora import lora

adamw = lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-2)
base = causal_lm({weights!r}, dataset=lambda: hf_qwen3.Padded(left=False), optimizer=adamw)
program = lora(base, ("q_proj", "o_proj", "down_proj"), r=4, {scale})
"""


def adapter_job(folder: Path, scale: str) -> dict[str, Any]:
    """A job on the random weights in `folder`/made."""
    torch.manual_seed(2)
    load_program(PROGRAMS / "hf_qwen3.py").model().save_pretrained(
        folder / "made", max_shard_size="20KB"
    )
    (folder / "program.py").write_text(
        PROGRAM.format(programs=str(PROGRAMS), weights=str(folder / "made"), scale=scale)
    )
    return job_of(str(folder / "program.py"), steps=16)


def reference(program: Program, job: dict[str, Any]) -> list[float]:
    """Losses of one process that begins with the same adapters: those of `Weights.fresh`."""
    profile = trace(program)
    groups = Groups(0, Layout(), torch.device("cpu"))
    state = TrainState(
        program, profile, groups, layout=Layout(), layers=(4,), rank=0, job=Job.from_plain(job)
    )
    state.read_frozen()
    state.fill_fresh(job["seed"])

    def build() -> torch.nn.Module:
        model = program.model()
        model.load_state_dict({k: v.detach().clone() for k, v in state.model.state_dict().items()})
        return model

    return train_alone(replace(program, model=build), job, job["steps"])


@pytest.mark.whole
# peft asks transformers so
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("scale", ["alpha=8", "alpha=4, rslora=True"])
def test_adapters_through_layouts_and_out(pool: Pool, tmp_path: Path, scale: str) -> None:
    """The frozen weights are in no checkpoint; transformers and peft read what comes out, alone and
    merged."""
    job = adapter_job(tmp_path, scale) | {"layout": {"4": "dp_shard=2,cp=2"}}
    program = load_program(job["program"])
    run = tmp_path / "run"
    layouts = [Layout(dp_shard=3), Layout(pp=2, tp=2), Layout(cp=2, tp=2), Layout(dp_shard=2, cp=2)]
    steps = pass_through(pool, job, run, layouts, every=3)
    alone = reference(program, job)
    assert max(abs(e.train_loss - loss) for e, loss in zip(steps, alone, strict=True)) < 1e-4
    assert alone[-1] < alone[0] - 0.1
    storage = open_storage(str(run))
    checkpoint_writer.commit(storage, job["steps"], len(layouts), world_size=4, epoch=1, meta={})
    uri = checkpoint_index.find(storage)[0].uri
    kept = [
        fqn for fqn in checkpoint_index.open_checkpoint(uri).tensors if fqn.startswith("model.")
    ]
    assert len(kept) == 4 * 3 * 2 and all(".lora_" in fqn for fqn in kept)
    ids = torch.arange(24).view(2, 12) * 5 % 64
    with torch.no_grad():
        wanted = load_model(program, uri)(ids).logits
        before = transformers_model(tmp_path / "made")(ids).logits
        assert (wanted - before).abs().max() > 0.05
        export_for(
            storage, None, open_storage(str(tmp_path / "merged")), program=program, merged=True
        )
        merged = transformers_model(tmp_path / "merged").eval()
        torch.testing.assert_close(merged(ids).logits, wanted, atol=1e-5, rtol=1e-5)
        done = export_for(storage, None, open_storage(str(tmp_path / "adapter")), program=program)
        assert done["files"] == ["adapter_model.safetensors", "adapter_config.json"] and done[
            "tensors"
        ] == len(kept)
        peft = pytest.importorskip("peft", reason="it is in the extra 'test'")
        base = transformers_model(tmp_path / "made")
        loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
        torch.testing.assert_close(loaded(ids).logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.whole
def test_exporting_needs_a_few_chunks(tmp_path: Path) -> None:
    """A model of about 200 MB; measured in a process of its own."""
    command = [
        sys.executable,
        str(TESTS / "support" / "worker" / "load_peak.py"),
        str(tmp_path),
        "export",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model_bytes"] > 180e6 and 1e6 < found["peak_bytes"] < 2 * PART_BYTES, found
