"""Blocks that end in a linear layer with a bias, whose output is then changed in place."""

import torch
from torch import nn

import elastic

D, SEQ = 8, 6


class Data:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < 64:
            raise IndexError(index)
        draw = torch.Generator().manual_seed(index)
        return {name: torch.randn(SEQ, D, generator=draw) for name in ("input", "target")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(4)
        )
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            found = layer(x)
            found += x
            x = found
        return self.head(x)


def init(model: Net) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


program = elastic.Program(
    model=Net,
    init=init,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Data,
    loss=lambda output, batch: (output - batch["target"]).square().sum(),
    count=lambda batch: len(batch["input"]),
    blocks="layers.*",
)
