"""Sharpness-aware minimization (Foret et al., 2021): the gradient of a first backward pass moves
the weights, and is cleared by the script's own optimizer; that of a second one counts."""

import torch
import torch.nn.functional as F
from torch import nn

import elastic

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(48, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 48))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = [
    {"input": (torch.arange(8) * (1 + i % 3) + i) % 48, "target": torch.arange(8) + i % 40}
    for i in range(96)
]


def loss_sum(batch):
    logits = run.model(batch["input"])
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


with elastic.loop(model=model, optimizer=optimizer, dataset=rows, steps=8, global_batch=12) as run:
    for batch in run:
        run.backward(loss_sum(batch))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()
            moved = [p.grad * (0.5 / norm) for p in run.model.parameters()]
            for p, by in zip(run.model.parameters(), moved):
                p.add_(by)
        optimizer.zero_grad()
        run.backward(loss_sum(batch))
        with torch.no_grad():
            for p, by in zip(run.model.parameters(), moved):
                p.sub_(by)
        run.step()
