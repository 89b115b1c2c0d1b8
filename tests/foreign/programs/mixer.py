"""MLP-Mixer: a patch module with a reshape, mixing over positions, mean pooling."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

D, CLASSES = 32, 7


class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, D, 2, 2)

    def forward(self, images):
        return self.conv(images).flatten(2).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.layers = Patches(), nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, CLASSES)

    def forward(self, images):
        x = self.patches(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


TP = {
    f"layers.*.{name}.{i}": style
    for name in ("tokens", "channels")
    for i, style in ((0, "colwise"), (2, "rowwise"))
}


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
    "pp": "refused: patches|mean|forward",
}
