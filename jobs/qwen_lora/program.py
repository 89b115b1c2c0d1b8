"""Adapters on Qwen 3: the 8B model in $QWEN3, or random weights of a small one, which shows that it
runs."""

import os

import torch
from transformers import Qwen3Config

from elastic.models.huggingface import causal_lm
from elastic.models.lora import lora

FOLDER = os.environ.get("QWEN3")
SMALL = Qwen3Config(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=16, max_position_embeddings=512,
    tie_word_embeddings=True,
)  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def optimizer(named):
    return torch.optim.AdamW([p for _, p in named], lr=2e-4, weight_decay=0.0)


program = lora(
    causal_lm(
        FOLDER or SMALL,
        dataset=None,
        optimizer=optimizer,
        lr_factor=lambda step: min(1.0, (step + 1) / 20),
    ),
    TARGETS,
    r=16,
    alpha=32,
)
