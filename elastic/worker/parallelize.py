"""Applies tensor parallelism and FSDP2 to a module on the meta device, in that order."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from elastic.program import Program
from elastic.types import ModelProfile
from elastic.worker.model_profile import block_names, tp_styles


def parallelize(model: nn.Module, program: Program, profile: ModelProfile, mesh: DeviceMesh | None) -> nn.Module:
    """Cuts the module's parameters for this rank's stage mesh (axes among dp_replicate, fsdp, tp); None = a single rank."""
    if mesh is None:
        return model
    names = mesh.mesh_dim_names or ()
    blocks = block_names(model, program.blocks)
    if "tp" in names:
        _apply_tp(model, program, mesh["tp"])
        _tie_again(model, profile)
    if "fsdp" in names:
        dp_mesh = mesh["dp_replicate", "fsdp"] if "dp_replicate" in names else mesh["fsdp"]
        for name in blocks:
            block = model.get_submodule(name)
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=dp_mesh)
        fully_shard(model, mesh=dp_mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # plain sums: the loss is divided by the step's global token count after the commit all-reduce
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
    return model


def _apply_tp(model: nn.Module, program: Program, mesh: DeviceMesh) -> None:
    styles: dict[str, ParallelStyle] = {}
    for name, style in tp_styles(model, program).items():
        module = model.get_submodule(name)
        if next(module.parameters(recurse=False), None) is not None:  # a pass-through of another stage has none
            styles[name] = _style(style)
    if styles:
        parallelize_module(model, mesh, styles)


def _style(name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "colwise_gather":
        return ColwiseParallel(output_layouts=Replicate())
    if name == "vocab":
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel()


def _tie_again(model: nn.Module, profile: ModelProfile) -> None:
    """Cutting two tied parameters leaves two tensors: make them one again."""
    present = dict(model.named_parameters(remove_duplicate=False))
    for spec in profile.specs:
        if spec.tied_to and spec.fqn in present and spec.tied_to in present:
            module, _, leaf = spec.fqn.rpartition(".")
            setattr(model.get_submodule(module), leaf, present[spec.tied_to])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a (possibly distributed) tensor, sharing its memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()
