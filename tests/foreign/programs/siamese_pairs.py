"""Pairs of samples go through one tower, one half of the batch behind the other."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).mean(1)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(8) * (1 + index % 3)) % VOCAB
        same = torch.tensor(float(index % 4 == 0))
        return {"one": ids, "other": (ids + index % 4) % VOCAB, "same": same}


def loss(output, batch):
    one, other = output.chunk(2)
    far = (one - other).square().mean(1)
    return (batch["same"] * far + (1 - batch["same"]) * F.relu(1 - far)).sum()


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    inputs=lambda batch: torch.cat([batch["one"], batch["other"]]),
    count=lambda batch: len(batch["one"]),
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: siamese_pairs",
}
# both outputs have it
MAY_LACK = r"head\.bias"
