"""A script that enters elastic.loop, trained in one process with plain torch: what its resized runs
are measured by.

Its own body computes the loss; batches, gradient scale, clipping and the optimizer step are done
here, not in elastic.worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from support.reference import collate

from elastic.data.order import sample_ids
from elastic.types import Job
from elastic.worker.loop.script_host import Script, ScriptSource
from elastic.worker.program.commit import Commit
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.optimizers import by_name


def train_script_alone(file: Path, args: Sequence[str], seed: int, steps: int) -> list[float]:
    """Train loss of each step of an undisturbed run of the script in one process, on the samples in
    elastic's order."""
    script = Script(ScriptSource(str(file), tuple(args), seed), torch.device("cpu"))
    program = script.start()
    model = program.model().train()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    extra = ExtraState(program.extra_state)
    boxes = {spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8)) for spec in extra.specs()}
    extra.fresh(boxes)
    each = by_name(program.optimizer(named))
    state = SimpleNamespace(
        step=0, rank=0, optimizers=SimpleNamespace(each=each), model=model, tensors=boxes
    )
    script.begin(
        SimpleNamespace(layout=SimpleNamespace(world_size=1)), state, Job(steps=steps), extra=extra
    )  # type: ignore[arg-type]
    losses = []
    for step in range(steps):
        dataset = program.dataset()
        batch = collate(
            dataset, sample_ids(len(dataset), program.settings["global_batch"], seed, step=step)
        )
        torch.manual_seed((seed * 1_000_003 + step) * 65_537)
        loss_sum, tokens = map(float, script.compute(batch, step, 0))
        for _, parameter in named:
            if parameter.grad is not None:
                parameter.grad /= tokens
        if script.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), script.clip_grad_norm)
        for optimizer in each.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss_sum / tokens)
        script.applied(Commit(0.0, loss_sum, float(tokens)), step + 1)
    script.finish(lambda: None, lambda: False)
    return losses
