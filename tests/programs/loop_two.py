"""The program of tiny_two.py, on good samples, as a script with a loop of its own: two optimizers
and their schedules."""

import sys
from pathlib import Path

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum

sys.path.insert(0, str(Path(__file__).parent))
import tiny
import tiny_two

model = Llama(tiny.CONFIG)
torch.manual_seed(torch.initial_seed())
init_weights(model)
optimizers = tiny_two.optimizers(model.named_parameters())
schedules = {
    name: torch.optim.lr_scheduler.LambdaLR(one, tiny.lr_factor) for name, one in optimizers.items()
}

with elastic.loop(
    model=model,
    optimizer=optimizers,
    dataset=tiny.Strides(512),
    extra_state=schedules,
    steps=8,
    global_batch=12,
    seed=3,
) as run:
    assert run.optimizer is optimizers
    for batch in run:
        run.backward(loss_sum(run.model(batch["input"]), batch))
        run.step()
        for schedule in schedules.values():
            schedule.step()
