"""Parameters that say by how much their steps are longer, which the optimizer reads, and by how
much they are pulled to nothing, which the body reads."""

import torch
from torch import nn

import elastic


class Scaled(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * p.lr_mul)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))
for i, p in enumerate(model.parameters()):
    p.lr_mul, p.pull = 1.0 + i, 0.01 * i
samples = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))

with elastic.loop(
    model=model,
    optimizer=Scaled(model.parameters(), lr=0.05),
    dataset=samples,
    steps=8,
    global_batch=12,
    seed=3,
) as run:
    for x in run:
        pull = sum(p.pull for p in run.model.parameters())
        run.backward((1.0 + pull) * (run.model(x) - x[:, :2]).square().sum())
        run.step()
