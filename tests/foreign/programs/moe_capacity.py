"""An expert takes so many tokens of the batch and drops the others."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

VOCAB, D = 48, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(D), nn.Linear(D, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D)) for _ in range(4)
        )

    def forward(self, x):
        h = self.norm(x)
        scores = self.router(h)
        weights = scores.softmax(-1)
        chosen = scores.argmax(-1, keepdim=True)
        taken = F.one_hot(chosen[..., 0], 4).flatten(0, 1)
        place = (taken.cumsum(0) * taken).sum(-1).view(*h.shape[:2], 1)
        kept = (place <= h.shape[0] * h.shape[1] // 4).to(h.dtype)
        y = sum((chosen == i) * expert(h) for i, expert in enumerate(self.experts))
        return x + kept * weights.gather(-1, chosen) * y


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
        return self.head(self.norm(x))


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
)

EXPECT = {
    "dp": "refused: layers|batch",
    "tp": "no plan",
    "cp": "refused: elastic.attention",
    "pp": "refused: layers|batch|microbatch",
}
