"""GPT-2 of transformers by causal_lm."""

import torch
from transformers import GPT2Config

from elastic.models.huggingface import causal_lm

CONFIG = GPT2Config(
    vocab_size=48,
    n_embd=32,
    n_layer=4,
    n_head=4,
    n_positions=8,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"input_ids": (index * 5 + torch.arange(8) * (1 + index % 3)) % 48}


program = causal_lm(
    CONFIG, dataset=Rows, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3)
)

EXPECT = {"dp": "equal", "tp": "no plan", "cp": "equal", "pp": "equal"}
