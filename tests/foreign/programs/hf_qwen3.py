"""Qwen 3 of transformers by causal_lm, with norms of single heads."""

import torch
from transformers import Qwen3Config

from elastic.models.huggingface import causal_lm

CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=8,
    head_dim=8,
    tie_word_embeddings=False,
)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"input_ids": (index * 5 + torch.arange(8) * (1 + index % 3)) % 48}


program = causal_lm(
    CONFIG, dataset=Rows, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)
)

EXPECT = {"dp": "equal", "tp": "equal", "cp": "equal", "pp": "equal"}
