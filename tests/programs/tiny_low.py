"""The tiny decoder with a tied head; says no where its blocks do not compute in 16 bits or its
output is not float32."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from elastic.models.llama import Llama, loss_sum
from elastic.program import load_program

TIED = load_program(Path(__file__).with_name("tiny_tied.py"))


def check(module, arguments) -> None:
    found = {parameter.dtype for parameter in module.parameters()} | {arguments[0].dtype}
    low = isinstance(module, FSDPModule) and found in ({torch.bfloat16}, {torch.float16})
    if dist.is_initialized() and not low:  # else: it is looked at before the first plan
        raise TypeError(f"a block computes with {found}")


def model() -> Llama:
    built = TIED.model()
    for layer in built.layers:
        layer.register_forward_pre_hook(check)
    return built


def loss(output, batch):
    if output.dtype != torch.float32:
        raise TypeError(f"the output is {output.dtype}")
    return loss_sum(output, batch)


program = replace(TIED, model=model, loss=loss)
