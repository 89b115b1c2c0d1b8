"""loop_tiny.py as a script that has a loop over epochs around that over batches, an evaluation of
its own, and what rank 0 alone saves, behind each."""

import sys
from pathlib import Path

import torch

import elastic
from elastic.models.llama import Llama, init_weights, loss_sum

sys.path.insert(0, str(Path(__file__).parent))
import tiny

model = Llama(tiny.CONFIG)
torch.manual_seed(torch.initial_seed())  # the seed of the job, set before the script begins
init_weights(model)
optimizer = tiny.optimizer(model.named_parameters())
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, tiny.lr_factor)
data, held_out = tiny.Strides(512), tiny.Strides(8, first=512)
rows = {name: torch.stack([held_out[i][name] for i in range(8)]) for name in held_out[0]}
own = {"extra_state": {"scheduler": scheduler}, "global_batch": 12, "seed": 3}

run = elastic.loop(model=model, optimizer=optimizer, dataset=data, epochs=1, **own).start()
model = run.model
for epoch in run.epochs():
    model.train()
    for batch in run:
        run.backward(loss_sum(model(batch["input"]), batch))
        run.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        loss = float(loss_sum(model(rows["input"]), rows))
    run.log({"epoch": epoch, "held_out": loss})
    if run.rank == 0:
        state = model.module.state_dict()
        print("saved", epoch, run.step_index, len(state), flush=True)
