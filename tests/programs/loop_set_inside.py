"""Modes and numbers that are set on modules of run.model once, at a step: a worker that comes later
never comes to that line."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return x * self.scale + (0.1 if self.training else 0.0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inner = nn.Embedding(48, 16), nn.Linear(16, 32)
        self.first, self.second, self.head = Scaled(), Scaled(), nn.Linear(32, 48)

    def forward(self, ids):
        return self.head(self.second(self.first(self.inner(self.embed(ids)))))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = [
    {"input": (torch.arange(8) * (1 + i % 3) + i) % 48, "target": torch.arange(8) + i % 40}
    for i in range(96)
]
with elastic.loop(model=model, optimizer=optimizer, dataset=rows, steps=8, global_batch=12) as run:
    for batch in run:
        if run.step_index == 2:
            run.model.first.scale = 3.0
            run.model.second.eval()
        logits = run.model(batch["input"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")
        run.backward(loss)
        run.step()
