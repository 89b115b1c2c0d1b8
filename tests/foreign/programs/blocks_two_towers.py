"""The pattern names the layers of two towers that run beside each other."""

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


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = Tower(), Tower(), nn.Linear(D, VOCAB)

    def forward(self, ids):
        return self.head(self.left(ids) * self.right(ids.flip(1)))


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
    blocks="*.layers.*",
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: left|right|layers|forward",
}
