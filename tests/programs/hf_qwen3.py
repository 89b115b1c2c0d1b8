"""A tiny Qwen 3 of transformers (norms of single heads, untied), on rows that are padded on the
left."""

import sys
from pathlib import Path

import torch
from transformers import Qwen3Config

from elastic.models.huggingface import causal_lm

sys.path.insert(0, str(Path(__file__).parent))
import tiny

CONFIG = Qwen3Config(
    vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=tiny.SEQ,
    tie_word_embeddings=False,
)  # fmt: skip


class Padded:
    """{"input_ids": int64 [seq], "attention_mask": int64 [seq]}; `left`: of every third sample the
    first tokens are padding."""

    def __init__(self, left: bool) -> None:
        self.left = left

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, mask = tiny.Strides(512)[index]["input"], torch.ones(tiny.SEQ, dtype=torch.int64)
        if index % 3 == 0:
            mask[slice(0, 5) if self.left else slice(-5, None)] = 0
        return {"input_ids": ids * mask, "attention_mask": mask}


program = causal_lm(
    CONFIG,
    dataset=lambda: Padded(left=True),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=2e-3),
)
