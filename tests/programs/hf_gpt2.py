"""A tiny GPT-2 of transformers (learned positions, tied head), on rows that are padded on the
right."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config

from elastic.models.huggingface import causal_lm

sys.path.insert(0, str(Path(__file__).parent))
import hf_qwen3
import tiny

CONFIG = GPT2Config(
    vocab_size=tiny.VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=tiny.SEQ,
    attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip
program = causal_lm(
    CONFIG,
    dataset=lambda: hf_qwen3.Padded(left=False),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3),
)
