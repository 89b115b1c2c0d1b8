"""Patches from unfold, positions added, the mean of all patches is classified."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

D, CLASSES = 32, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, D)
        self.pos = nn.Parameter(torch.randn(4, D) * 0.02)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, CLASSES))

    def forward(self, images):
        x = self.stem(F.unfold(images, 4, stride=4).transpose(1, 2)) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


TP = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        image = torch.sin(torch.arange(3 * 8 * 8) * (1 + index % 7) / 9.0).view(3, 8, 8)
        return {"input": image, "target": torch.tensor(index % 7)}


def loss(logits, batch):
    return F.cross_entropy(logits, batch["target"], reduction="sum")


program = elastic.Program(
    model=Net,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Images,
    loss=loss,
    tp=TP,
)

EXPECT = {
    "dp": "equal",
    "tp": "equal",
    "cp": "refused: elastic.attention",
    "pp": "refused: pos|mean|unfold|stem|forward",
}
