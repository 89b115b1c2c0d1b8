"""A first tower reads the source; the blocks of the second attend to it."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend, self.out = (
            nn.LayerNorm(D),
            nn.MultiheadAttention(D, 4, batch_first=True),
            nn.Linear(D, D),
        )

    def forward(self, x, source):
        return x + self.out(
            F.gelu(self.attend(self.norm(x), source, source, need_weights=False)[0])
        )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.tower = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, ids, source):
        memory = self.tower(self.embed(source))
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:], "source": ids[1:6].flip(0)}


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    keywords=lambda batch: {"source": batch["source"]},
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: embed|tower|source|forward",
}
