"""A student that learns from a teacher: the vision transformer of jobs/vit_digits, frozen, and
beside it a network of another kind that is a fifth of its size.

`TEACHER`: a folder that `elastic checkpoint export` has written of a run of jobs/vit_digits.
Without it the teacher keeps the weights that it begins with: that shows how it is done and teaches
nothing.
"""

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import elastic
from elastic.models.distillation import distilled
from elastic.program import load_program

SIDE, WIDTH, N_LAYERS, CLASSES = 8, 48, 4, 10

vit = load_program(Path(__file__).parents[1] / "vit_digits" / "program.py")
folder = os.environ.get("TEACHER")
teacher = replace(vit, weights=elastic.Weights(folder) if folder else None)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Pixels(nn.Linear):
    """[batch, 8, 8] -> [batch, width]."""

    def __init__(self):
        super().__init__(SIDE * SIDE, WIDTH)

    def forward(self, x):
        return super().forward(x.flatten(1))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels = Pixels()
        self.layers = nn.ModuleList(Layer() for _ in range(N_LAYERS))
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.pixels(x)
        for layer in self.layers:
            x = layer(x)
        return self.classes(x)


student = replace(
    vit,
    model=Perceptron,
    init=lambda model: [m.reset_parameters() for m in model.modules() if isinstance(m, nn.Linear)],
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3, weight_decay=0.05),
    tp={"layers.*.up": "colwise", "layers.*.down": "rowwise"},
    tp_limit=4,
)
program = distilled(student, teacher, temperature=3.0, share=0.9)
