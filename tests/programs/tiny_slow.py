"""The tiny program with steps long enough that nodes can come and go between them."""

import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from elastic.program import load_program

tiny = load_program(Path(__file__).parent / "tiny.py")
PAUSE_S = float(
    os.environ.get("ELASTIC_TEST_PAUSE_S", 8.0)
)  # at most, while the file is there: the run continues as soon as it is gone
AFTER = int(os.environ.get("ELASTIC_TEST_SLOW_AFTER", 0))  # losses of this rank before that
LEARNING_RATE = 1e-3  # small: over hundreds of steps, rounding must not grow into another run


losses = count()


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    until = time.monotonic() + PAUSE_S
    held = trains() and next(losses) >= AFTER
    while (
        held
        and time.monotonic() < until
        and os.path.exists(os.environ.get("ELASTIC_TEST_SLOW", ""))
    ):
        time.sleep(0.05)
    time.sleep(0.05)
    return tiny.loss(output, batch)


def trains() -> bool:
    """A node that is to come looks at the program and tries its layout out without the others;
    nobody is to wait for that."""
    return dist.is_initialized() and dist.get_backend() != "fake"


def optimizer(named_parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named_parameters], lr=LEARNING_RATE)


program = replace(tiny, loss=loss, optimizer=optimizer)
