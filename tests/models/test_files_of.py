"""A folder of a script's model for from_pretrained: its weights under its own names, and beside
them what `files_of` says."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.worker.exported import transformers_model

from elastic.api.checkpoint_actions import export
from elastic.api.running.run import JobRun
from elastic.errors import SpecError
from elastic.ledger.run_folder import RunFolder
from elastic.models.huggingface import files_of
from elastic.storage import open_storage
from elastic.worker.checkpoint.checkpoint_verbs import ImportRequest, import_state
from elastic.worker.loop.loop import loop
from elastic.worker.program.model_profile import trace

transformers = pytest.importorskip(
    "transformers", reason="the models are of transformers (it is in the extra 'test')"
)
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def model_of(kind: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Mixtral", {"num_local_experts": 4}),  # stored by experts elsewhere, and so converted
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    ],
)
def test_the_folder_loads(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(kind, **more)
    for parameter in model.parameters():  # not what positions are computed with
        parameter.data = parameter.data.bfloat16()
    model.generation_config.max_new_tokens = 7
    files = files_of(model)
    assert files is not None and set(files()) == {"config.json", "generation_config.json"}
    for name, data in files().items():
        (tmp_path / name).write_bytes(data)
    config = json.loads(files()["config.json"])
    assert (config["architectures"], config["dtype"]) == ([type(model).__name__], "bfloat16")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded = transformers_model(tmp_path).eval()
    ids = torch.arange(8)[None]
    assert type(loaded) is type(model) and loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.generation_config.max_new_tokens == 7


def test_a_model_whose_weights_would_get_other_names_is_refused() -> None:
    """Here as if it were of a type with such names."""
    model = model_of("Llama")
    model.model.block_sparse_moe = torch.nn.ModuleDict({"gate": torch.nn.Linear(2, 2)})
    model.config.model_type = "mixtral"
    files = files_of(model)
    assert files is not None
    with pytest.raises(SpecError, match=r"rename 'model.block_sparse_moe.gate.weight' while"):
        files()


# peft asks transformers so
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "more",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "use_dora": True},
        {"target_modules": ["down_proj"], "added": True},
    ],
)
def test_an_adapter_of_peft_is_exported_as_peft_has_it(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """In a loop, and so in a prepared Trainer."""
    peft = pytest.importorskip("peft", reason="it is in the extra 'test'")
    torch.manual_seed(1)
    base, added = model_of("Llama", tie_word_embeddings=False), more.pop("added", False)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=8, **more)
    if added:
        base.add_adapter(config)
    model = base if added else peft.get_peft_model(base, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    program = loop(
        model=model, optimizer=torch.optim.SGD(trained), dataset=[torch.zeros(2)]
    )._program()
    assert program.files is not None
    run = open_storage(str(tmp_path / "run"))
    RunFolder.of(run).keep_files(program.files())
    with torch.no_grad():  # as training has changed it
        for parameter in trained:
            parameter.normal_(0.0, 0.3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "all.safetensors")
    import_state(
        str(tmp_path / "all.safetensors"),
        run,
        ImportRequest(trace(replace(program, extra_state={})), 3),
    )

    done = export(run, None, str(tmp_path / "out"))
    assert sorted(done["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "out")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        found, want = loaded.eval()(ids).logits, model.eval()(ids).logits
        assert not torch.allclose(want, transformers_model(tmp_path / "base")(ids).logits)
    torch.testing.assert_close(found, want)
    with pytest.raises(SpecError, match="--weights bfloat16: the run trains an adapter of peft"):
        export(run, None, str(tmp_path / "other"), weights="bfloat16")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_of_peft_beside_which_more_is_trained_is_told() -> None:
    peft = pytest.importorskip("peft", reason="it is in the extra 'test'")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(model_of("Llama", tie_word_embeddings=False), config)
    model.base_model.model.lm_head.requires_grad_(True)
    files = files_of(model)
    assert files is not None
    with pytest.raises(SpecError, match=r"lm_head.weight' is trained too, .* in modules_to_save"):
        files()
    model.base_model.model.lm_head.requires_grad_(False)
    assert set(files()) == {"adapter_config.json", "adapter_names.json"}


def test_of_another_model_nothing_is_known() -> None:
    assert files_of(torch.nn.Linear(2, 2)) is None


def test_a_loop_has_them_by_itself(tmp_path: Path) -> None:
    """Or what it is given."""
    model = model_of("Llama")
    given = {"optimizer": torch.optim.SGD(model.parameters()), "dataset": [torch.zeros(2)]}
    files = loop(model=model, **given)._program().files
    assert files is not None and "config.json" in files()
    own = loop(model=model, files=lambda: {"a.txt": b"a"}, **given)._program().files
    assert own is not None and own() == {"a.txt": b"a"}


@pytest.mark.parametrize("script", ["train.py", None])
def test_a_run_keeps_them_or_says_why_not(script: str | None, tmp_path: Path) -> None:
    """Of a Program they are not kept: who exports names its job."""

    def refused() -> dict[str, bytes]:
        raise SpecError("no such thing")

    place, said = RunFolder.of(open_storage(tmp_path)), io.StringIO()
    for files in (lambda: {"config.json": b"{}", "templates/own.txt": b"t"}, refused):
        run = SimpleNamespace(
            spec=SimpleNamespace(script=script), program=SimpleNamespace(files=files),
            options=SimpleNamespace(show=True), place=place, _out=lambda: said,
        )  # fmt: skip
        JobRun._keep_files(run)  # type: ignore[arg-type]
    kept = {"config.json": b"{}", "templates/own.txt": b"t"} if script else {}
    assert place.files() == kept
    note = "note: its checkpoints will be exported without config.json and the like: no such thing"
    assert said.getvalue() == (f"{note}\n" if script else "")
