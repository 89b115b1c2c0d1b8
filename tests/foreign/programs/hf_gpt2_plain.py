"""GPT-2 of transformers without causal_lm: its forward is called as it is."""

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import elastic

CONFIG = GPT2Config(
    vocab_size=48,
    n_embd=32,
    n_layer=4,
    n_head=4,
    n_positions=8,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    use_cache=False,
)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % 48
        return {"input": ids[:-1], "target": ids[1:]}


def loss(output, batch):
    return F.cross_entropy(output.logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=lambda: GPT2LMHeadModel(CONFIG),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    blocks="transformer.h.*",
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: wpe|wte|transformer|forward",
}
