"""Profiles from dimensions alone: parameters, FLOPs and bytes counted by hand."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from support.planner.pools import LLAMA_8B, LLAMA_70B, LLAMA_405B, QWEN_MOE

from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.published.decoder import Decoder
from elastic.types import Attention

# 2 blocks, hidden 8, 2 heads of 4 (1 for keys and values), ffn 12, 10 words, 6 positions
TINY = Decoder(2, 8, 2, 1, 12, 10, 6)


@pytest.mark.parametrize(
    ("model", "published"),
    [(LLAMA_8B, 8.03e9), (LLAMA_70B, 70.55e9), (LLAMA_405B, 405.85e9), (QWEN_MOE, 30.53e9)],
    ids=["8b", "70b", "405b", "qwen3-30b-a3b"],
)
def test_parameters_are_those_that_are_published(model: Decoder, published: float) -> None:
    assert model.n_params == pytest.approx(published, rel=1e-3)
    work = ModelCost.of(model.profile())
    assert work.parameter_bytes == 4 * model.n_params  # its tensors add up to the same
    assert work.state_bytes == 16 * model.n_params  # parameters, gradients, both moments


def test_parameters_of_a_block() -> None:
    assert TINY.attention_params == 8 * 4 * (2 + 1 + 1 + 2)  # queries, keys, values, out
    assert TINY.mlp_params == 3 * 8 * 12 and replace(TINY, gated=False).mlp_params == 2 * 8 * 12
    assert TINY.n_params == 2 * (192 + 288 + 2 * 8) + 2 * 10 * 8
    assert replace(TINY, tied=True).n_params == TINY.n_params - 10 * 8
    assert replace(TINY, head_dim=8).attention_params == 2 * TINY.attention_params
    some = replace(TINY, experts=4, active=2)
    assert (
        some.mlp_params == 4 * 288 + 8 * 4
        and some.active_params == 2 * (192 + 288 * 2 + 8 * 4 // 2) + 10 * 8
    )


def test_of_active_parameters_only_those_a_token_goes_through() -> None:
    assert QWEN_MOE.active_params == pytest.approx(3.0e9, rel=0.03)  # 3.3e9 with the embedding
    assert LLAMA_8B.active_params == LLAMA_8B.n_params - 128256 * 4096 - 32 * 2 * 4096


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B, LLAMA_405B], ids=["8b", "70b", "405b"])
def test_flop_are_6_per_parameter_and_token_and_those_of_attention(model: Decoder) -> None:
    """6 N s + 6 L s^2 h, half of the scores masked (Kaplan et al. 2020, table 1; Narayanan et al.
    2021, appendix)."""
    s = model.seq
    expected = (
        6.0 * model.active_params * s + 6.0 * model.layers * s * s * model.heads * model.width
    )
    assert model.sample().flop == pytest.approx(expected, rel=1e-9)


def test_flop_of_experts_count_the_active_ones_and_the_whole_router() -> None:
    s, model = 6, replace(TINY, experts=4, active=2)
    products = 2 * s * (8 * 16 + 8 * 8 + 8 * 4 + 2 * 288)  # qkv, out, router, two experts
    expected = 3 * (2 * (products + 4 * s * s / 2 * 8) + 2 * s * 8 * 10)
    assert model.sample().flop == expected


def test_a_window_is_seen_in_every_second_block() -> None:
    one, part = replace(TINY, window=2)._attentions()
    assert (one.count, part.count, part.window) == (0.5, 0.5, 2)
    assert part.flop == 4 * 6 * 2 * 8 and one.flop == 4 * 6 * 3 * 8
    assert len(replace(TINY, window=6)._attentions()) == 1
    assert Attention(6, 6, 2, 1, 4, causal=False).flop == 2 * one.flop


def test_bytes_of_a_sample() -> None:
    sample = TINY.sample()
    assert sample.hidden_bytes == 6 * 8 * 2 and sample.key_value_bytes == 2 * 6 * 4 * 2
    assert sample.ends_bytes == 6 * 10 * 14
    # in both norms, in qkv, in the MLP: 4 x hidden; qkv; attention's output; gate and up, their
    # product
    assert dict(sample.kept_bytes) == {
        "none": 2 * 6 * (4 * 8 + 16 + 8 + 3 * 12),
        "selective": 2 * 6 * (2 * 8 + 16 + 8 + 2 * 12),
        "full": 2 * 6 * 8,
    }
    unfused = dict(replace(TINY, fused=False).sample().kept_bytes)
    # 5 a s^2 (Korthikanti et al. 2022, equation 1)
    assert unfused["none"] - dict(sample.kept_bytes)["none"] == 5 * 2 * 6 * 6


def test_products_are_those_of_the_parameters() -> None:
    assert (
        sum(m.k * m.n for m in LLAMA_8B.sample().matmuls)
        == LLAMA_8B.attention_params + LLAMA_8B.mlp_params
    )
    specs = LLAMA_405B.profile().specs
    assert (
        len(specs) == 126 * 4 + 2 and sum(prod(spec.shape) for spec in specs) == LLAMA_405B.n_params
    )
    assert (
        LLAMA_405B.profile().tp_limit == 8
        and QWEN_MOE.profile().n_expert_params == 48 * QWEN_MOE.mlp_params
    )
