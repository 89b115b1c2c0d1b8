"""Llama 3 of 8 billion parameters: from the folder in $LLAMA3_8B, or from random weights of the
same shape."""

import os

import torch
from transformers import LlamaConfig

from elastic.models.huggingface import causal_lm

CONFIG = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, rms_norm_eps=1e-5,
    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
)  # fmt: skip


def optimizer(named):
    return torch.optim.AdamW(
        [p for _, p in named], lr=2e-5, betas=(0.9, 0.95), fused=torch.cuda.is_available()
    )


program = causal_lm(
    os.environ.get("LLAMA3_8B") or CONFIG,
    dataset=None,
    optimizer=optimizer,
    lr_factor=lambda step: min(1.0, (step + 1) / 100),
)
