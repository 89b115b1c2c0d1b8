"""A large model whose later blocks take the mean over the batch and all positions away."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        self.norm, self.up = nn.LayerNorm(640), nn.Linear(640, 640)

    def forward(self, x):
        h = self.norm(x)
        if self.number >= 3:
            h = h - h.mean((0, 1), keepdim=True)
        return x + self.up(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50000, 640)
        self.layers = nn.ModuleList(Block(i) for i in range(8))
        self.head = nn.Linear(640, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TP = {}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:]}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    tp=TP,
)

EXPECT = {
    "dp": "refused: another function",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: another function",
}
