"""A training script that enters `elastic.loop`: the model, data and steps of the paced program."""

import time

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum
from elastic.scenarios.programs.paced import PACE_S
from elastic.scenarios.programs.small import LEARNING_RATE, Strides
from elastic.scenarios.programs.unpaced import SHORT

SEED, GLOBAL_BATCH = 7, 48

torch.manual_seed(SEED)
model = Llama(SHORT)
torch.manual_seed(SEED)
init_weights(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
made = elastic.loop(
    model=model,
    optimizer=optimizer,
    dataset=Strides(512),
    steps=1_000_000,
    global_batch=GLOBAL_BATCH,
    seed=SEED,
)
with made as run:
    for batch in run:
        run.backward(loss_sum(run.model(batch["input"]), batch))
        run.step(clip_grad_norm=1.0)
        time.sleep(PACE_S)
