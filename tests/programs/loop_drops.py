"""The network of tiny_drops.py in a loop of its own. `--calls`: with the batch, with parts of it one
after another, twice with all of it, or with rows that are not those of the batch; `--double`: in
float64."""

import argparse
import sys
from pathlib import Path

import torch

import elastic

sys.path.insert(0, str(Path(__file__).parent))
import tiny
import tiny_drops

parser = argparse.ArgumentParser()
parser.add_argument("--calls", default="whole")
parser.add_argument("--double", action="store_true")
options = parser.parse_args()


def loss_sum(logits, target):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="sum"
    )


model = tiny_drops.model()
torch.manual_seed(torch.initial_seed())  # the seed of the job, set before the script begins
tiny_drops.program.init(model)
model = model.double() if options.double else model
optimizer = tiny.optimizer(model.named_parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, tiny.lr_factor)
with elastic.loop(
    model=model,
    optimizer=optimizer,
    extra_state={"scheduler": scheduler},
    dataset=tiny.Strides(512),
    tp=tiny.program.tp,
    tp_limit=2,
    steps=14,
    global_batch=12,
    seed=7,
) as run:
    for batch in run:
        x, target = batch["input"], batch["target"]
        torch.rand(1)  # of the script's own
        if options.calls == "whole":
            run.backward(loss_sum(run.model(x), target))
        elif options.calls == "parts":
            half = len(x) // 2
            for part in (slice(0, half), slice(half, None)):
                run.backward(loss_sum(run.model(x[part]), target[part]))
        elif options.calls == "twice":
            first, second = run.model(x), run.model(x)
            assert not torch.equal(first, second)
            run.backward((loss_sum(first, target) + loss_sum(second, target)) / 2)
        else:  # two views of each sample
            both = run.model(torch.cat([x, x]))
            run.backward(loss_sum(both, torch.cat([target, target])) / 2)
        run.step()
        scheduler.step()
