"""Sequence parallelism: between the cut modules a rank has a part of the positions."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.o(elastic.attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attend = nn.RMSNorm(D), nn.RMSNorm(D), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(D, 64, bias=False), nn.GELU(), nn.Linear(64, D, bias=False)
        )

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TP = {
    "embed": "scatter",
    "norm": "sequence",
    "head": "gather",
    "layers.*.norm[12]": "sequence",
    "layers.*.attend": "gather",
    "layers.*.attend.[qkv]": "colwise",
    "layers.*.attend.o": "rowwise_scatter",
    "layers.*.mlp": "gather",
    "layers.*.mlp.0": "colwise",
    "layers.*.mlp.2": "rowwise_scatter",
}


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

EXPECT = {"dp": "equal", "tp": "equal", "cp": "equal", "pp": "equal"}
