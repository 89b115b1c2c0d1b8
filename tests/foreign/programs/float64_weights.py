"""A model of a physicist: weights, samples and loss are float64."""

import torch
from torch import nn

import elastic

D = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, D)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.energy = nn.Linear(D, 1)

    def forward(self, places):
        x = self.enter(places)
        for layer in self.layers:
            x = layer(x)
        return self.energy(x)


class Springs(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        places = torch.sin((index + 1) * torch.arange(1, 7, dtype=torch.float64))
        return {"input": places, "target": places.square().sum().view(1) / 2}


program = elastic.Program(
    model=lambda: Energy().double(),
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    dataset=Springs,
    loss=lambda energy, batch: (energy - batch["target"]).square().sum(),
    tp={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
)

EXPECT = {"dp": "equal", "tp": "equal", "cp": "refused: sequence", "pp": "equal"}
