"""Applies tensor parallelism and FSDP2 to a module on the meta device, in that order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from elastic.errors import ProgramError
from elastic.models.experts import expert_modules, share_out
from elastic.program import Program
from elastic.types import ModelProfile
from elastic.worker.parallel.model_options import ModelOptions
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import block_names, tp_styles


def parallelize(
    model: nn.Module,
    program: Program,
    profile: ModelProfile,
    *,
    groups: Groups,
    options: ModelOptions,
) -> nn.Module:
    """Cuts the module's parameters for this rank's stage mesh (axes among dp_replicate, fsdp, tp;
    None = a single rank), weights of experts for theirs."""
    mesh = groups.mesh
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    found = [model.get_submodule(name) for name in block_names(model, program.blocks)]
    # without those of other stages
    blocks = [block for block in found if next(block.parameters(), None) is not None]
    if mesh is not None and "tp" in names:
        _apply_tp(model, program, mesh["tp"])
        tie_again(model, profile)
    experts: list[nn.Module] = []
    if groups.ep is not None:
        experts = [model.get_submodule(name) for name in expert_modules(model, program.experts)]
        for module in experts:
            share_out(module, groups.ep)
    options.wrap(blocks)
    if mesh is not None and "fsdp" in names:
        dp_mesh = mesh["dp_replicate", "fsdp"] if "dp_replicate" in names else mesh["fsdp"]
        for module in (*experts, *blocks, model):
            module.register_forward_hook(_whole_output)  # before that of FSDP
        for module in experts:
            assert groups.experts is not None
            _shard(module, groups.experts, options.of_experts())
        for block in blocks:
            _shard(block, dp_mesh, options.of_block())
        _shard(model, dp_mesh, options.of_root())
    return model


def _whole_output(_: nn.Module, args: object, output: Any) -> Any:
    """FSDP gathers weights for the backward pass by a hook on what a module gives. Where that is a
    view, as nn.Linear gives of sequences, and a program changes it in place (`out += x`), the hook
    is lost. Nobody else has what this is a view of, and no gradient asks for its values: it counts
    as a tensor of its own."""
    if type(output) is not torch.Tensor or output._base is None or output.grad_fn is None:
        return output
    made_by = output.grad_fn.next_functions[0][0]
    if output.grad_fn.name() != "ViewBackward0" or made_by is None:
        return output
    if made_by.name() != "AddmmBackward0":
        return output
    return torch.ops.aten._unsafe_view(output, output.shape)


def _shard(module: nn.Module, mesh: DeviceMesh, how: dict[str, Any]) -> None:
    """With plain sums over ranks: the loss is divided by the step's global token count after the
    commit all-reduce."""
    _check_shardable(module)
    fully_shard(module, mesh=mesh, **how)
    assert isinstance(module, FSDPModule)
    module.set_force_sum_reduction_for_comms(True)
    if mesh.size() > 1:  # where a rank is alone, FSDP2 would copy its gradients to divide them by 1
        module.set_gradient_divide_factor(1.0)


def _check_shardable(module: nn.Module) -> None:
    """Raises ProgramError for what FSDP does not take, of the parameters that no module inside has
    for itself."""
    inside = (one for one in module.modules() if isinstance(one, FSDPModule))
    held = {id(p) for one in inside for p in one.parameters()}
    own = [(name, p) for name, p in module.named_parameters() if id(p) not in held]
    for name, p in own:
        if not p.ndim:
            raise ProgramError(
                f"{name} is a scalar, which FSDP cannot shard; make it a tensor of one element "
                "(torch.ones(1))"
            )
    trained = [(name, p) for name, p in own if p.requires_grad]
    for name, p in trained:
        first, other = trained[0]
        if p.dtype != other.dtype:
            raise ProgramError(
                f"{first} is {_type(other)} and {name} {_type(p)}: FSDP shards both in one piece, "
                "which has one type; give them the same"
            )


def _type(p: nn.Parameter) -> str:
    return str(p.dtype).removeprefix("torch.")


def _apply_tp(model: nn.Module, program: Program, mesh: DeviceMesh) -> None:
    named = tp_styles(model, program)
    styles: dict[str, ParallelStyle] = {}
    for name, style in named.items():
        # without those that are whole on each rank, and pass-throughs of other stages
        if style not in WHOLE and next(model.get_submodule(name).parameters(), None) is not None:
            inside = any(
                other.startswith(f"{name}.") and "colwise" in how for other, how in named.items()
            )
            styles[name] = _gather(inside) if style == "gather" else STYLES[style]()
    if styles:
        parallelize_module(model, mesh, styles)


WHOLE = {"summed", "sequence"}  # gradients of these are summed over the tp ranks: see Stepper
SEQUENCE = Shard(1)
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_scatter": lambda: RowwiseParallel(output_layouts=SEQUENCE),
    "vocab_scatter": lambda: RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
    "scatter": lambda: PrepareModuleOutput(
        output_layouts=Replicate(), desired_output_layouts=SEQUENCE
    ),
    "sequence_colwise_gather": lambda: ColwiseParallel(
        input_layouts=SEQUENCE, output_layouts=Replicate()
    ),
    "sequence_colwise_loss": lambda: ColwiseParallel(
        input_layouts=SEQUENCE, output_layouts=Shard(-1), use_local_output=False
    ),
}


def _gather(for_cut_modules: bool) -> ParallelStyle:
    """Modules that are cut by columns take a DTensor: the gradients of their input are then reduced
    and scattered at once."""
    return PrepareModuleInput(
        input_layouts=SEQUENCE,
        desired_input_layouts=Replicate(),
        use_local_output=not for_cut_modules,
    )


def tie_again(model: nn.Module, profile: ModelProfile) -> None:
    """Cutting two tied parameters, or giving a plain module memory, leaves two tensors: make them
    one again."""
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
