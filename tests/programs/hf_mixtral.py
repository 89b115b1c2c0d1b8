"""A tiny Mixtral of transformers; `mixture` makes such a program of any config."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import MixtralConfig

import elastic
from elastic.models.huggingface import causal_lm

sys.path.insert(0, str(Path(__file__).parent))
import tiny

SIZES = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": tiny.SEQ, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip


def mixture(config: Any) -> elastic.Program:
    return causal_lm(
        config,
        dataset=lambda: tiny.Strides(512),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3),
    )


program = mixture(MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None))
