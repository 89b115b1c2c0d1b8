"""The finished model on one CPU: built from a checkpoint, to let the program show what it has
learned."""

from __future__ import annotations

import torch
from torch import nn

from elastic.errors import StateLost
from elastic.program import Program
from elastic.types import Box
from elastic.worker.checkpoint.checkpoint_index import open_checkpoint
from elastic.worker.program.model_profile import trace
from elastic.worker.program.weights import fill


def load_model(program: Program, uri: str) -> nn.Module:
    """The plain module with the weights and buffers of the checkpoint at `uri`, in evaluation
    mode."""
    checkpoint = open_checkpoint(uri)
    model: nn.Module = program.model()
    n_read = 0
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fqn = f"model.{name}"
            if fqn in checkpoint.tensors:
                tensor.copy_(checkpoint.read_whole(fqn))
                n_read += 1
        if program.weights is not None:
            specs = trace(program).specs
            frozen = [s for s in specs if s.reread and s.tied_to is None]
            boxes = (Box.whole(f"model.{s.fqn}", s.shape, s.dtype) for s in frozen)
            there = {b.fqn: (b, model.get_parameter(b.fqn.removeprefix("model."))) for b in boxes}
            fill(program, specs, there, seed=0)
    if not n_read:
        raise StateLost(f"{uri}: it holds no tensor of this program's model")
    return model.eval()


def sample_text(program: Program, uri: str) -> str | None:
    """What `Program.sample` says of the finished model; None where the program has none."""
    if program.sample is None:
        return None
    with torch.no_grad():
        return program.sample(load_model(program, uri))
