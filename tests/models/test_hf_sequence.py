"""Models of transformers over cut sequences: what a batch becomes before it is cut, which attention
runs, what is refused. That they train as one process does is shown by
tests/worker/parallel/test_hf_layouts.py."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.places import PROGRAMS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from support.models.small_hf import made, small

from elastic.data.collate import collate
from elastic.errors import ProgramError, SpecError
from elastic.models.attention import SequenceShard, over
from elastic.models.huggingface import before_cut, causal_lm, count, keywords
from elastic.program import Program, load_program
from elastic.worker.parallel.context_parallel import check_calls, check_loss, cut
from elastic.worker.program.calls import call_model

NO_DROPS = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
IDS = {"input_ids": torch.arange(8)[None]}
REFUSED = [
    ("MistralConfig", {}, "sliding_window=4096: .*; set it to None where no sample is longer"),
    ("Gemma2Config", {}, "attn_logit_softcapping=50.0: its scores are capped"), ("Gemma3TextConfig",
    {}, "sliding_window=4096"), ("GPT2Config", {}, "attn_pdrop=0.1: .* set it to 0"),
    ("LlamaConfig", {"attention_dropout": 0.5}, "attention_dropout=0.5"), ("LlamaConfig",
    {"is_causal": False}, "is_causal=False: its attention is not causal"), ("LlamaConfig",
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    "rope_type=dynamic"), ("Qwen3NextConfig", {}, "layer_types has 'linear_attention'"),
    ("BloomConfig", {"n_head": 4, "n_layer": 2}, "model_type=bloom: it does not attend through"),
    ("GptOssConfig", {"num_local_experts": 2, "layer_types": ["full_attention"] * 2},
    "model_type=gpt_oss: .* 's_aux'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "more", "why"), REFUSED)
def test_what_elastic_attention_does_not_compute_is_refused(
    kind: str, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(SpecError, match=f"^cp.*{why}.*; take cp=1$"):
        check_calls(made(small(kind, **more)), IDS, 2)


def test_an_encoder_is_refused() -> None:
    config = small("LlamaConfig", is_encoder_decoder=True)
    with pytest.raises(
        SpecError, match="is_encoder_decoder=True: the decoder attends to an encoder"
    ):
        check_calls(made(config), IDS, 2)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MistralConfig", {"sliding_window": None}),
        ("LlamaConfig", {"attention_bias": True}),
        ("GPT2Config", NO_DROPS),
    ],
)
def test_what_it_does_compute_is_not_refused(kind: str, more: dict[str, Any]) -> None:
    check_calls(made(small(kind, **more)), IDS, 2)


def test_keywords_of_ones_own_need_a_before_cut_of_ones_own() -> None:
    mine: dict[str, Any] = {"keywords": lambda batch: {}}
    program = causal_lm(small("LlamaConfig"), list, lambda named: torch.optim.SGD(named), **mine)
    with pytest.raises(
        SpecError, match="cp=2, but causal_lm was given keywords without before_cut"
    ):
        check_calls(program, IDS, 2)
    check_calls(replace(program, no_cp=""), IDS, 2)


@pytest.mark.parametrize("name", ["hf_tiny.py", "hf_qwen3.py", "hf_gpt2.py", "hf_packed.py"])
def test_targets_positions_and_loss_of_the_parts_are_those_of_the_whole(name: str) -> None:
    program = load_program(PROGRAMS / name)
    dataset: Any = program.dataset and program.dataset()
    batch = collate([dataset[i] for i in range(6)])
    whole, parts = (
        before_cut(batch),
        [cut(program, batch, SequenceShard(i, 2, None)) for i in range(2)],
    )
    for key in ("target", "position"):
        restored = torch.cat([parts[0][key][:, :4], parts[1][key], parts[0][key][:, 4:]], 1)
        assert torch.equal(restored, whole[key])
    assert sum(int((part["target"] != -100).sum()) for part in parts) == count(batch)
    if "target" not in batch:
        ids, learned = batch["input_ids"], whole["target"][:, :-1] != -100
        assert torch.equal(whole["target"][:, :-1][learned], ids[:, 1:][learned])
    check_loss(program, program.model().eval(), batch, cp=2)


def test_positions_behind_padding_go_on_over_the_edges_of_parts() -> None:
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": mask}
    whole = before_cut(batch)
    assert whole["position"].tolist() == [[0, 0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 5, 5]]
    assert whole["document"].tolist() == mask.tolist()
    assert not {"attention_mask", "labels"} & set(whole)


def packed(program: Program) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    model = program.model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    place = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, 16)
    ids = torch.randint(0, 64, (2, 16))
    return model, {"input": ids, "target": ids, "position": place}


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config", "GPT2Config"])
@torch.no_grad()
def test_documents_see_themselves_only_with_either_attention(kind: str) -> None:
    """Without cp nothing but transformers' own attention runs, also when the other one has run
    before."""
    program = made(small(kind, **(NO_DROPS if kind == "GPT2Config" else {})))
    model, batch = packed(program)
    with over(None) as seen:
        exact = call_model(program, model, before_cut(batch)).logits
        assert model.config._attn_implementation == "elastic" and seen.called
    own = call_model(program, model, batch).logits
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(exact, own, atol=1e-5, rtol=1e-5)
    second = model(batch["input"][:, 6:]).logits
    torch.testing.assert_close(own[:, 6:], second, atol=1e-4, rtol=1e-4)
    assert (model(batch["input"]).logits - own).abs().max() > 0.01
    assert set(keywords(before_cut(batch))) == {"position_ids"}


def test_a_model_that_keeps_documents_apart_only_with_cp_is_refused() -> None:
    """OPT gives transformers a mask of ones, so that positions do not tell it where documents
    begin."""
    program = made(small("OPTConfig", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0))
    model, batch = packed(program)
    with pytest.raises(
        ProgramError, match=r"with the model's own attention, .* with elastic\.attention; take cp=1"
    ):
        check_loss(program, model, batch, cp=2)
    check_loss(program, model, {"input_ids": batch["input"]}, cp=2)
