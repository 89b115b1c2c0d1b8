"""A learning rate that follows from enumerate(): a worker that comes later counts from 0."""

import torch

import elastic

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.arange(768.0).view(96, 8) / 768
with elastic.loop(model=model, optimizer=optimizer, dataset=rows, steps=40, global_batch=12) as run:
    for it, x in enumerate(run):
        optimizer.param_groups[0]["lr"] = 0.01 / (it + 1)
        run.backward(run.model(x).square().sum())
        run.step()
