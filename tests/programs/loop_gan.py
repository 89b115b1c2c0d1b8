"""Two networks that train against each other: what the generator's loss leaves on the discriminator
does not count."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import elastic


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, noise, real=None):
        made = self.generator(noise)
        if real is None:
            return self.judge(made)
        return self.judge(real), self.judge(made.detach())


def loss(logits, target):
    return binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, target), reduction="sum"
    )


torch.manual_seed(0)
model = Pair()
of_generator = torch.optim.Adam(model.generator.parameters(), lr=1e-2)
of_judge = torch.optim.Adam(model.judge.parameters(), lr=1e-2)
samples = torch.randn(96, 2, 2, generator=torch.Generator().manual_seed(1))

with elastic.loop(
    model=model,
    optimizer={"generator": of_generator, "judge": of_judge},
    dataset=samples,
    steps=8,
    global_batch=12,
    seed=3,
) as run:
    for batch in run:
        noise, real = batch.unbind(1)
        run.backward(loss(run.model(noise), 1.0))
        of_judge.zero_grad()
        true, made = run.model(noise, real)
        run.backward(loss(true, 1.0) + loss(made, 0.0))
        run.step()
