"""A training script that keeps its own loop. Inside `elastic.loop` it is changed live; put your
model, data and loss in the place of these."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elastic

LEARNING_RATE, SEED = 1e-3, 1


class FlippedRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 960

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.rand(8, generator=torch.Generator().manual_seed(index))
        return {"input": x, "target": x.flip(0)}


torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
# how many steps of how many samples: job.yaml says it
with elastic.loop(model=model, optimizer=optimizer, dataset=FlippedRows()) as run:
    for batch in run:  # this rank's share of the step
        # read the model from `run`: it may be rebuilt. The loss is a sum, not a mean
        loss = F.mse_loss(run.model(batch["input"]), batch["target"], reduction="sum")
        run.backward(loss)
        run.step(clip_grad_norm=1.0)
