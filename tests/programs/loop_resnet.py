"""The network of tiny_resnet.py in a loop of its own, a part of the batch after another.
`--evaluates`: before that it is called in evaluation mode with other images, fewer and more of
them."""

import sys
from pathlib import Path

import torch

import elastic

sys.path.insert(0, str(Path(__file__).parent))
from tiny_resnet import Images, program

model = program.model()
with elastic.loop(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9),
    dataset=Images(),
    steps=22,
    global_batch=24,
    batch_norm={"group": 4},
) as run:
    for batch in run:
        if "--evaluates" in sys.argv:
            modules = [module for module in run.model.modules() if module.training]
            run.model.eval()
            with torch.no_grad():
                for n in (5, 30):
                    run.model(torch.stack([Images()[i]["input"] for i in range(n)]))
            for module in modules:
                module.training = True
        for rows in torch.arange(len(batch["input"])).split(4):
            part = {key: x[rows] for key, x in batch.items()}
            run.backward(program.loss(run.model(part["input"]), part))
        run.step()
