"""The whole model is one nn.Sequential, blocks in the middle by a name of their own."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build():
    parts = {"embed": nn.Embedding(VOCAB, D), "layers": nn.Sequential(*(Block() for _ in range(4)))}
    return nn.Sequential(OrderedDict(parts, norm=nn.LayerNorm(D), head=nn.Linear(D, VOCAB)))


TP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=build,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    tp=TP,
)

EXPECT = {"dp": "equal", "tp": "equal", "cp": "refused: elastic.attention", "pp": "equal"}
