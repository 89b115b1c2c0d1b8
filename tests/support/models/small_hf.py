"""Small models of transformers as programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic.models.huggingface import causal_lm
from elastic.program import Program

transformers = pytest.importorskip(
    "transformers", reason="the models are of transformers (it is in the extra 'test')"
)


def small(kind: str, **more: Any) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "GPT2Config":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
    else:
        sizes["intermediate_size"] = 64
    return getattr(transformers, kind)(**sizes, **more)


def made(config: Any) -> Program:
    return causal_lm(
        config, dataset=list, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
