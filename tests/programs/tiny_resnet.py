"""A small residual network of plain torch: BatchNorm in the stem, in each block, as a class of its
own and over single values, some with another momentum, one frozen."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

WIDTH, CLASSES, SIZE = 8, 5, 6


class NormAct(nn.BatchNorm2d):
    """A class of its own, as timm has them: it normalizes and does something behind it."""

    def forward(self, x):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        found = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor,
            self.eps,
        )  # fmt: skip
        return F.relu(found)


class Block(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm1 = NormAct(WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(WIDTH, momentum=momentum)

    def forward(self, x):
        # the second one is called twice
        return F.relu(x + self.norm2(self.norm2(self.conv2(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.SyncBatchNorm(WIDTH), nn.ReLU()
        )
        self.layers = nn.Sequential(*(Block(m) for m in (0.1, 0.3, None, 0.1)))
        self.pool, self.flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.layers[3].norm1.eval().requires_grad_(False)

    def forward(self, images):
        return self.head(self.norm(self.flat(self.pool(self.layers(self.stem(images))))))


class Images:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        image = torch.randn(3, SIZE, SIZE, generator=draw) + (index % CLASSES) * 0.3
        return {"input": image, "target": torch.tensor(index % CLASSES)}


program = elastic.Program(
    model=ResNet,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.002, momentum=0.9),
    dataset=Images,
    validation=Images,
    loss=lambda logits, batch: F.cross_entropy(logits, batch["target"], reduction="sum"),
)
