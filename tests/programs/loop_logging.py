"""The script of tiny.py with numbers of its own: before the step as a tensor, after it by rank 0
alone."""

import sys
from pathlib import Path

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum

sys.path.insert(0, str(Path(__file__).parent))
import tiny

model = Llama(tiny.CONFIG)
init_weights(model)
optimizer = tiny.optimizer(model.named_parameters())

with elastic.loop(model=model, optimizer=optimizer, dataset=tiny.Strides(512)) as run:
    for batch in run:
        run.log({"half": torch.tensor(run.step_index / 2)})
        run.backward(loss_sum(run.model(batch["input"]), batch))
        if run.step() and run.rank == 0:
            run.log({"loss/again": run.train_loss})
