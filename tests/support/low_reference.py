"""Mixed precision as anybody would write it: one process, float32 parameters, a pass in 16 bits,
float32 gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from support.reference import build, collate, count_tokens, inputs_of
from torch.func import functional_call

from elastic.data.order import sample_ids
from elastic.program import Program

GROWTH_STEPS, LARGEST = 2000, 2.0**24


@dataclass
class Low:
    model: torch.nn.Module
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # at the beginning of each step
    skipped: list[int] = field(default_factory=list)  # steps, counted from 1


def train_low(
    program: Program,
    job: Mapping[str, Any],
    dtype: torch.dtype,
    scale: float = 1.0,
    n_pieces: int = 1,
) -> Low:
    """`scale`: of the loss at first; halved where a gradient overflows, and that step changes
    nothing else."""
    dataset: Any = program.dataset()
    model = build(program, job["seed"])
    named = dict(model.named_parameters())
    optimizer = program.optimizer(list(named.items()))
    base = [float(group["lr"]) for group in optimizer.param_groups]
    run, good = Low(model), 0
    for step in range(job["steps"]):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (program.lr_factor(step) if program.lr_factor is not None else 1.0)
        ids = sample_ids(len(dataset), job["global_batch"], job["seed"], step=step)
        optimizer.zero_grad()
        total, tokens = 0.0, count_tokens(program, collate(dataset, ids))
        size = len(ids) // n_pieces
        for at in range(0, len(ids), size):
            batch = collate(dataset, ids[at : at + size])
            output = functional_call(
                model, {k: p.to(dtype) for k, p in named.items()}, inputs_of(program, batch)
            )
            loss = program.loss(output.float(), batch)
            (loss * scale).backward()
            total += float(loss.detach())
        run.losses.append(total / tokens)
        run.scales.append(scale)
        for parameter in named.values():
            parameter.grad.div_(scale)
        square = sum(float(p.grad.double().pow(2).sum()) for p in named.values())
        if square != square or square == float("inf"):
            run.skipped.append(step + 1)
            scale, good = scale / 2, 0
            continue
        norm = square**0.5 / tokens
        for parameter in named.values():
            parameter.grad.mul_(min(1.0, job["clip_grad_norm"] / (norm + 1e-6)) / tokens)
        optimizer.step()
        good += 1
        if good == GROWTH_STEPS:
            scale, good = min(LARGEST, scale * 2), 0
    return run
