"""The program of tiny_counting_steps.py as a script with a loop of its own."""

import sys
from pathlib import Path

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum

sys.path.insert(0, str(Path(__file__).parent))
import tiny
import tiny_counting_steps

model = Llama(tiny.CONFIG)
torch.manual_seed(torch.initial_seed())
init_weights(model)

with elastic.loop(
    model=model,
    optimizer=tiny_counting_steps.optimizers(model.named_parameters()),
    dataset=tiny.Strides(512),
    steps=14,
    global_batch=12,
    seed=3,
) as run:
    for batch in run:
        run.backward(loss_sum(run.model(batch["input"]), batch))
        run.step()
