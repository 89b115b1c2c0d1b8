"""Matrix products of the blocks in float8 (torchao), where the GPU computes in it. Parameters stay
as they are.

Run on one H200 only (docs/gpu.md), not with tensor parallelism, which is refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from elastic.errors import SpecError

LEAST = (8, 9)  # compute capability: Ada, Hopper and later have float8 matrix units
MULTIPLE = 16  # of both sizes of a matrix


def check_float8(device: torch.device) -> None:
    """Raises SpecError where this worker cannot."""
    if device.type != "cuda":
        raise SpecError(
            "float8: true needs a GPU that computes in float8 (H100, H200, B200, L4, L40S), this "
            "worker has none"
        )
    found = torch.cuda.get_device_capability(device)
    if found < LEAST:
        name = torch.cuda.get_device_name(device)
        raise SpecError(
            f"float8: true needs compute capability {LEAST[0]}.{LEAST[1]}, {name} has "
            f"{found[0]}.{found[1]}; take float8: false"
        )
    if importlib.util.find_spec("torchao") is None:
        raise SpecError(
            "float8: true needs the package torchao, which is not installed; install it, or take "
            "float8: false"
        )


def use_float8(blocks: Sequence[nn.Module]) -> None:
    """Linear layers of the blocks whose sizes fit multiply in float8 from now on; names of modules
    and parameters stay."""
    from torchao.float8 import convert_to_float8_training

    def fits(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not (
            module.in_features % MULTIPLE or module.out_features % MULTIPLE
        )

    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=fits)
