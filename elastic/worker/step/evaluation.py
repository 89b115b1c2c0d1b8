"""Forward passes that leave no trace: evaluation mode, numbers drawn from a seed, buffers and modes
as they were afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn

from elastic.types import Job
from elastic.worker.state.train_state import TrainState


@contextmanager
def modes_kept(models: list[nn.Module]) -> Iterator[None]:
    """Each module is in training or evaluation mode afterwards as it was before: what the program
    has frozen stays so."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def drawing(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """What is drawn meanwhile follows from the seed, and what is drawn afterwards does not know of
    it."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def evaluating(state: TrainState, job: Job, device: torch.device) -> Iterator[None]:
    """Of a generation's own model, without gradients; the same kernels as ever but for a job that
    compiles them."""
    buffers = state.buffers.watched
    before = [buffer.clone() for buffer in buffers]
    eager = torch.compiler.set_stance("force_eager") if job.compile else nullcontext()
    try:
        with modes_kept(state.models), drawing(job.seed, device), torch.no_grad(), eager:
            state.train(False)
            yield
    finally:
        with torch.no_grad():
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)
