"""The same training in one process, as anybody would write it in plain torch: what all losses are
compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic.data.order import sample_ids
from elastic.program import load_program
from elastic.scenarios.limit import Limit
from elastic.version import PACKAGE

PROGRAMS = PACKAGE / "scenarios" / "programs"


def program_file(name: str) -> str:
    return str(PROGRAMS / f"{name}.py")


def losses(program: str, job: Mapping[str, Any], steps: int, *, limit: Limit) -> list[float]:
    """Train loss of each of the first `steps` steps of the built-in `program` under `job`, in this
    process, on the CPU.

    The global batch is one batch; no parallelism, no elastic.worker. Raises OutOfTime.
    """
    made: Any = load_program(program_file(program))
    torch.manual_seed(job["seed"])
    model = made.model()
    torch.manual_seed(job["seed"])
    made.init(model)
    optimizer = made.optimizer(list(model.named_parameters()))
    dataset = made.dataset()
    out = []
    for step in range(steps):
        limit.look("the same steps in one process")
        items = [
            dataset[i]
            for i in sample_ids(len(dataset), job["global_batch"], job["seed"], step=step)
        ]
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        loss = made.loss(model(batch["input"]), batch) / int((batch["target"] != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_grad_norm"])
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def worst_difference(found: Mapping[int, float], alone: list[float]) -> float:
    """Largest difference of a step's loss from that of one process; a step beyond its end counts as
    infinite."""
    gaps = [
        abs(loss - alone[step - 1]) if 1 <= step <= len(alone) else float("inf")
        for step, loss in found.items()
    ]
    return max(gaps, default=float("inf"))
