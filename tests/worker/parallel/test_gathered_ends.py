"""What is in no block is gathered for all of a step's passes, as the planner counts
(elastic/planner/cost/memory.py: state_parts)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.places import PROGRAMS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from elastic.program import load_program
from elastic.worker.parallel.model_options import ModelOptions
from elastic.worker.parallel.parallelize import parallelize
from elastic.worker.program.model_profile import trace

PROGRAM = load_program(str(PROGRAMS / "tiny.py"))


def test_at_stage_3_only_blocks_are_given_back_in_between() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        groups: Any = SimpleNamespace(
            mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), ep=None
        )
        options = ModelOptions(compute=torch.bfloat16, reduce=torch.float32)
        torch.manual_seed(0)
        model = PROGRAM.model()
        model = parallelize(model, PROGRAM, trace(PROGRAM), groups=groups, options=options)
        batch = PROGRAM.dataset()[0]
        waiting: list[Any] = []
        # of its backward pass, before that of the embedding
        model.get_submodule("layers.0").register_full_backward_hook(
            lambda *_: waiting.append(model.get_parameter("head.weight").grad)
        )
        output = model(batch["input"][None])
        between = gathered(model)
        PROGRAM.loss(output, {key: value[None] for key, value in batch.items()}).backward()
        after = gathered(model)
    finally:
        dist.destroy_process_group()
    assert between == ["embed.weight", "norm.weight", "head.weight"] and after == []
    assert [grad.dtype for grad in waiting] == [torch.bfloat16], "whole, and not yet scattered"


def gathered(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
