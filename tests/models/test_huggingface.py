"""Causal language models of transformers as a Program: what is found in the module tree, and the
loss as transformers' own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.small_hf import made, small
from support.places import PROGRAMS

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from elastic.errors import SpecError
from elastic.models.blocks import blocks_of
from elastic.models.huggingface import causal_lm, count, loss_sum, tp_hints
from elastic.program import Program, load_program
from elastic.worker.program.calls import call_model
from elastic.worker.program.model_profile import build_meta, trace


@pytest.fixture(scope="module")
def program() -> Program:
    return load_program(PROGRAMS / "hf_tiny.py")


def test_what_is_found_in_the_module_tree(program: Program) -> None:
    profile = trace(program)
    assert program.blocks == "model.layers.*" and profile.n_blocks == 4
    assert profile.tp_limit == 2 and profile.pipeline
    tied = {spec.fqn: spec.tied_to for spec in profile.specs if spec.tied_to}
    assert tied == {"lm_head.weight": "model.embed_tokens.weight"}
    cut = {spec.fqn: spec.tp_dim for spec in profile.specs}
    assert cut["model.embed_tokens.weight"] == cut["lm_head.weight"] == 0
    assert cut["model.layers.0.self_attn.o_proj.weight"] == 1 and cut["model.norm.weight"] is None


@pytest.mark.parametrize(
    ("kind", "blocks", "limit"),
    [("GPT2Config", "transformer.h.*", 1), ("Qwen3Config", "model.layers.*", 2)],
)
def test_tp_follows_the_models_own_plan(kind: str, blocks: str, limit: int) -> None:
    """GPT-2 has none; Qwen 3 has norms of single heads, whose gradients must be added up."""
    program = made(small(kind))
    assert program.blocks == blocks
    assert trace(program).tp_limit == limit
    assert ("model.layers.*.self_attn.q_norm" in program.tp) == (kind == "Qwen3Config")


def test_untied_embeddings_are_cut_as_the_plan_says() -> None:
    model = build_meta(made(small("LlamaConfig", tie_word_embeddings=False)))
    hints = tp_hints(model)
    assert hints["lm_head"] == "colwise_gather" and hints["model.embed_tokens"] == "vocab"
    assert blocks_of(model) == "model.layers.*"


def test_the_loss_is_transformers_own(program: Program) -> None:
    dataset: Any = program.dataset()
    batch = {key: torch.stack([dataset[i][key] for i in range(6)]) for key in dataset[0]}
    model = program.model()
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"], labels=batch["labels"])
    assert count(batch) == 6 * 15 - 2 * 3
    assert float(loss_sum(output, batch)) / count(batch) == pytest.approx(
        float(output.loss), abs=1e-5
    )
    whole = {"input_ids": batch["input_ids"]}
    assert count(whole) == 6 * 15


def test_a_local_folder_gives_its_weights(tmp_path: Path, program: Program) -> None:
    torch.manual_seed(5)
    there = program.model()
    there.save_pretrained(tmp_path / "model")
    again = causal_lm(tmp_path / "model", program.dataset, program.optimizer)
    assert again.weights is not None and again.weights.path == tmp_path / "model"
    assert all(parameter.is_meta for parameter in build_meta(again).parameters())
    assert trace(again) == trace(program)


def test_bad_input_is_one_line(tmp_path: Path, program: Program) -> None:
    with pytest.raises(
        SpecError,
        match=r"no config.json there; give a local folder \(nothing is fetched\) or a config",
    ):
        causal_lm(tmp_path, program.dataset, program.optimizer)
    with pytest.raises(SpecError, match=r"Program\(zebra=...\): unknown keyword"):
        causal_lm(small("LlamaConfig"), program.dataset, program.optimizer, zebra=1)


@pytest.mark.parametrize(
    "file",
    [
        "pytorch_model.bin",
        "model.safetensors.index.json",
        ".cache/huggingface/download/1f.incomplete",
    ],
)
def test_a_folder_of_other_weights_is_refused(tmp_path: Path, program: Program, file: str) -> None:
    program.model().config.save_pretrained(tmp_path)
    assert causal_lm(tmp_path, program.dataset, program.optimizer).weights is None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(SpecError, match=rf"{Path(file).name}, but no safetensors there; complete"):
        causal_lm(tmp_path, program.dataset, program.optimizer)


def test_other_fields_are_those_of_program(program: Program) -> None:
    made = causal_lm(
        small("LlamaConfig"), program.dataset, program.optimizer, tp={}, validation=program.dataset
    )
    assert made.tp == {} and made.validation is program.dataset
    assert replace(made, blocks="x.*").blocks == "x.*"


@pytest.mark.parametrize(
    ("kind", "possible"),
    [
        ("LlamaConfig", True),
        ("Qwen3Config", True),
        ("GPT2Config", True),
        ("MistralConfig", True),
        ("GraniteConfig", False),
    ],
)
def test_stages_are_possible_where_the_forward_passes_hidden_states_on(
    kind: str, possible: bool
) -> None:
    """Granite scales whatever it is called with: a later stage would do it again."""
    more = {} if possible else {"embedding_multiplier": 2.0}
    assert made(small(kind, **more)).pipeline is possible


def test_padding_on_either_side_gives_the_same_loss() -> None:
    program = made(small("GPT2Config", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    torch.manual_seed(0)
    model, ids, filling = (
        program.model().eval(),
        torch.randint(0, 64, (2, 9)),
        torch.zeros(2, 4, dtype=torch.int64),
    )
    ones = torch.ones_like(ids)
    batches: list[Any] = [
        {"input_ids": ids},
        {
            "input_ids": torch.cat([filling, ids], 1),
            "attention_mask": torch.cat([filling, ones], 1),
        },
        {
            "input_ids": torch.cat([ids, filling], 1),
            "attention_mask": torch.cat([ones, filling], 1),
        },
    ]
    found = []
    for batch in batches:
        output = call_model(program, model, batch)
        found.append(loss_sum(output, batch).item())
        assert count(batch) == 16
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
