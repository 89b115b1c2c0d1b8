"""The program of tiny.py as a script with a loop of its own: same model, data, optimizer and
schedule, so the same losses."""

import argparse
import os
import sys
from pathlib import Path

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum, tp_plan

sys.path.insert(0, str(Path(__file__).parent))
import tiny

parser = argparse.ArgumentParser()
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--own-collective", action="store_true")
parser.add_argument(
    "--starts", help="a file to which each start of this script adds its process id"
)
options = parser.parse_args()
if options.starts:
    with open(options.starts, "a") as file:
        file.write(f"{os.getpid()}\n")

model = Llama(tiny.CONFIG)
torch.manual_seed(torch.initial_seed())  # the seed of the job, set before the script begins
init_weights(model)
optimizer = tiny.optimizer(model.named_parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, tiny.lr_factor)


def evaluate(model, batch):
    return loss_sum(model(batch["input"]), batch)


def body(run, batch):
    return loss_sum(run.model(batch["input"]), batch)


with elastic.loop(
    model=model,
    optimizer=optimizer,
    dataset=tiny.Strides(512),
    validation=tiny.Strides(48, first=512),
    evaluate=evaluate,
    tp=tp_plan(),
    tp_limit=tiny.CONFIG.n_kv_heads,
    extra_state={"scheduler": scheduler},
    steps=12,
    global_batch=12,
    seed=3,
) as run:
    for batch in run:
        run.backward(body(run, batch))
        if options.own_collective and run.world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1))
        run.step(clip_grad_norm=options.clip or None)
        scheduler.step()
