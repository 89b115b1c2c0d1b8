"""Each block halves the image and doubles the channels: hidden states of unequal shapes."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

CLASSES = 7


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(2, 2 * width),
        )

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(Block(4 * 2**i) for i in range(3))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32, CLASSES))

    def forward(self, images):
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


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
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention|sequence|dim 1|output",
    "pp": "equal",
}
