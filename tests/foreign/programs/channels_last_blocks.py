"""Blocks that turn channels to the end and back: the gradient of what they are given lies in memory
in another order."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

WIDTH, CLASSES = 16, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 32),
            nn.Linear(32, WIDTH),
        )

    def forward(self, x):
        x = self.norm(x.permute(0, 2, 3, 1))
        return (x + self.down(F.gelu(self.up(x)))).permute(0, 3, 1, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU())
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.pool, self.flat, self.head = (
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, images):
        return self.head(self.flat(self.pool(self.layers(self.stem(images)))))


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
    tp={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
)

EXPECT = {
    "dp": "equal",
    "tp": "equal",
    "cp": "refused: elastic.attention|norm|sequence|dim 1|output",
    "pp": "equal",
}
