"""A denoising U-Net: time embedding by keyword, skips by concatenation."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic


class Block(nn.Module):
    def __init__(self, width_in, width, scale):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(1, width_in), nn.Conv2d(width_in, width, 3, padding=1)
        self.time, self.scale = nn.Linear(8, width), scale

    def forward(self, x, time):
        x = F.interpolate(x, scale_factor=self.scale)
        return F.silu(self.conv(self.norm(x)) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            (Block(8, 16, 1), Block(16, 16, 0.5), Block(16, 16, 2), Block(32, 8, 1))
        )
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x, t):
        time = torch.sin(t[:, None] * torch.arange(1, 9, device=t.device))
        first = self.layers[0](self.stem(x), time)
        x = self.layers[2](self.layers[1](first, time), time)
        return self.out(self.layers[3](torch.cat((x, first), 1), time))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        t = torch.tensor((index % 10) / 10)
        return {"input": torch.ones(3, 8, 8) * (1 - t) + noise * t, "t": t, "noise": noise}


def loss(output, batch):
    return ((output - batch["noise"]) ** 2).mean((1, 2, 3)).sum()


program = elastic.Program(
    model=UNet,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Noisy,
    loss=loss,
    keywords=lambda batch: {"t": batch["t"]},
)

EXPECT = {
    "dp": "equal",
    "tp": "no plan",
    "cp": "refused: elastic.attention|sequence|dim 1|output|loss",
    "pp": "refused: layers|cat|forward",
}
