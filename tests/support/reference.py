"""Training as anybody would write it: one process, plain torch, no elastic.worker. What resized
runs are measured by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.data.order import sample_ids
from elastic.program import Program

Batch = dict[str, torch.Tensor]


@dataclass
class Reference:
    """What a plain run left: per step the train loss (before the update), the gradient's norm and
    the token count."""

    model: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """What its optimizer keeps for it."""
        return next(
            (dict(one.state[parameter]) for one in self.optimizers if parameter in one.state), {}
        )


def collate(dataset: Any, ids: Sequence[int]) -> Batch:
    items = [dataset[i] for i in ids]
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


def count_tokens(program: Program, batch: Batch) -> int:
    if program.count is not None:
        return int(program.count(batch))
    if "target" in batch:
        return int((batch["target"] != -100).sum())
    return len(next(iter(batch.values())))


def inputs_of(program: Program, batch: Batch) -> Any:
    if program.inputs is not None:
        return program.inputs(batch)
    return batch["input"] if "input" in batch else batch["input_ids"]


def output_of(program: Program, model: torch.nn.Module, batch: Batch) -> Any:
    return model(
        inputs_of(program, batch),
        **(program.keywords(batch) if program.keywords is not None else {}),
    )


def build(program: Program, seed: int) -> torch.nn.Module:
    """The model on the CPU, initialized under the job's seed."""
    torch.manual_seed(seed)
    model: torch.nn.Module = program.model()
    torch.manual_seed(seed)
    if program.init is not None:
        program.init(model)
    return model.train()


def train_step(
    run: Reference, program: Program, batch: Batch, clip: float | None, update: bool = True
) -> None:
    run.model.zero_grad()
    tokens = count_tokens(program, batch)
    loss = program.loss(output_of(program, run.model, batch), batch)
    (loss / tokens).backward()
    grads = [p.grad for p in run.model.parameters() if p.grad is not None]
    norm = float(torch.stack([g.double().pow(2).sum() for g in grads]).sum().sqrt())
    if clip is not None:
        for grad in grads:
            grad.mul_(min(1.0, clip / (norm + 1e-6)))
    for optimizer in run.optimizers if update else ():
        optimizer.step()
    run.losses.append(float(loss.detach()) / tokens)
    run.grad_norms.append(norm)
    run.tokens.append(tokens)


def train(
    program: Program,
    job: Mapping[str, Any],
    steps: int,
    after_step: Callable[[int, Reference], None] | None = None,
    skipped: Collection[int] = (),
) -> Reference:
    """Train for `steps` optimizer steps under `job` ("seed", "global_batch", "clip_grad_norm"); the
    updates of the steps `skipped` (the first is 1) are left out."""
    dataset: Any = program.dataset()
    model = build(program, job["seed"])
    made: Any = program.optimizer(list(model.named_parameters()))
    run = Reference(model, list(made.values()) if isinstance(made, dict) else [made])
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    base = [float(group["lr"]) for group in groups]
    for step in range(steps):
        factor = program.lr_factor(step) if program.lr_factor is not None else 1.0
        for group, lr in zip(groups, base, strict=True):
            tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.tensor(lr * factor) if tensor else lr * factor
        ids = sample_ids(len(dataset), job["global_batch"], job["seed"], step=step)
        train_step(
            run, program, collate(dataset, ids), job.get("clip_grad_norm"), step + 1 not in skipped
        )
        if after_step is not None:
            after_step(step + 1, run)
    return run


def train_alone(program: Program, job: Mapping[str, Any], steps: int) -> list[float]:
    """Train loss of each step of an undisturbed run in one process."""
    return train(program, job, steps).losses


@torch.no_grad()
def evaluate(program: Program, model: torch.nn.Module, n_samples: int) -> float:
    """Mean validation loss over the first `n_samples` samples."""
    dataset: Any = program.validation() if program.validation is not None else []
    batch = collate(dataset, range(min(n_samples, len(dataset))))
    return float(program.loss(output_of(program, model.eval(), batch), batch)) / count_tokens(
        program, batch
    )
