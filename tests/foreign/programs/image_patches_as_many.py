"""As many patches as tokens: they are cut with the sequence, and a token sees a part of them."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.ask, self.key, self.value = nn.Linear(D, D), nn.Linear(4, D), nn.Linear(4, D)

    def forward(self, x, patches):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(elastic.attention(q, k, v).transpose(1, 2).flatten(2))
        weights = self.ask(self.norm2(x)) @ self.key(patches).transpose(1, 2)
        return x + weights.softmax(-1) @ self.value(patches)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids, patches):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, patches)
        return self.head(self.norm(x))


TP = {"layers.*.[qkv]": "colwise", "layers.*.o": "rowwise"}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {
            "input": ids[:-1],
            "target": ids[1:],
            "patches": (torch.arange(32) * index % 13 / 7).view(8, 4),
        }


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    keywords=lambda batch: {"patches": batch["patches"]},
    tp=TP,
)

EXPECT = {"dp": "equal", "tp": "equal", "cp": "refused: patches|layers|key", "pp": "equal"}
