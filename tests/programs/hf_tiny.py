"""A tiny Llama of transformers with tied embeddings, on the sequences of tiny.py."""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig

from elastic.models.huggingface import causal_lm

sys.path.insert(0, str(Path(__file__).parent))
import tiny

CONFIG = LlamaConfig(
    vocab_size=tiny.VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=tiny.SEQ,
    tie_word_embeddings=True,
)


class Samples:
    """{"input_ids": int64 [seq], "labels": int64 [seq]}; every third sample has its last tokens
    left out."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = tiny.Strides(512)[index]
        labels = torch.cat([item["input"][:1], item["target"][:-1]])
        return {"input_ids": item["input"], "labels": labels}


program = causal_lm(
    CONFIG,
    dataset=Samples,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3),
)
