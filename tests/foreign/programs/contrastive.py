"""In-batch negatives: the loss of a sample depends on the others of its batch."""

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
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (index * 5 + torch.arange(9) * (1 + index % 3)) % VOCAB
        return {"input": ids[:-1], "target": ids[1:]}


def loss(output, batch):
    mine = F.normalize(output.mean(1), dim=-1)
    other = F.normalize(F.one_hot(batch["target"], VOCAB).float().mean(1)[:, :16], dim=-1)
    scores = mine @ other.T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Rows,
    loss=loss,
    count=lambda batch: len(batch["input"]),
)

EXPECT = {
    "dp": "refused: loss|batch",
    "tp": "no plan",
    "cp": "refused: elastic.attention|loss",
    "pp": "refused: loss|batch",
}
