"""Frozen linear layers in 4 bits (NF4, as in QLoRA: Dettmers et al. 2023, section 3).

Each block of 64 weights of a row is 32 bytes of codes and a float16 scale, one behind the other in
one tensor of bytes, [out, in / 64 * 34]: whatever cuts the rows of a weight, or its columns at
multiples of 64, cuts this one with the scales that belong to it. (torchao's NF4Tensor has scales in
int8 beside the codes, with one mean for the whole tensor and one factor for 16,384 weights: 4.13
bits in place of 4.25, and no part of it can be read alone.) Codes are torchao's.

A product makes the weights of one layer at a time in the type that it computes in, in the forward
pass and again in the backward pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastic.errors import SpecError
from elastic.program import Program, in_blocks

BLOCK = 64  # weights with one scale
CODES = BLOCK // 2  # bytes
PACKED = CODES + 2  # bytes of a block
ROWS_MOST = 1 << 20  # weights that are packed at once
NO_TORCHAO = "needs torchao, which is not installed: pip install 'elastic-ray[torchao]'"


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // BLOCK * PACKED)


def whole_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The inverse."""
    return (*shape[:-1], shape[-1] // PACKED * BLOCK)


def torchao_nf4() -> Any:
    """Raises SpecError without the library, and where FSDP2 takes floating-point parameters only
    (before torch 2.12: pytorch issue 177844)."""
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 12]:
        raise SpecError(
            f"frozen_weights: nf4 needs torch 2.12 or newer (this is {torch.__version__}): "
            "FSDP2 of older ones shards no packed weights"
        )
    try:
        from torchao.quantization import NF4Tensor
    except ImportError as error:
        raise SpecError(f"frozen_weights: nf4 {NO_TORCHAO}") from error
    return NF4Tensor


@lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 16 values, as torchao has them."""
    one = torchao_nf4().from_tensor(torch.ones(1, BLOCK * 256), BLOCK, 256)
    found: Tensor = one.nf4.to(device, dtype)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same as a constant of compiled code, which else breaks off in torchao."""
    return _made_pairs(dtype, device)


@lru_cache(maxsize=8)
def _made_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 2]: the two values of each byte."""
    table, code = _table(dtype, device), torch.arange(16, device=device)
    high, low = code.repeat_interleave(16), code.repeat(16)
    return torch.stack([table[high], table[low]], dim=-1)


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """[rows, columns] -> uint8 [rows, columns / 64 * 34]."""
    nf4, (rows, columns) = torchao_nf4(), weight.shape
    packed = weight.new_empty(packed_shape((rows, columns)), dtype=torch.uint8)
    step = max(1, ROWS_MOST // max(1, columns))
    for at in range(0, rows, step):
        part = weight[at : at + step].detach().float().contiguous()
        n = part.numel() // BLOCK
        # a block of zeros has a scale of 0 and codes of 0
        most = part.view(n, BLOCK).abs().amax(-1, keepdim=True)
        scaled = part.view(n, BLOCK) / most.clamp(min=torch.finfo(torch.float32).tiny)
        table = _table(torch.float32, weight.device)
        codes = nf4.quantize_tensor_nearest(scaled.flatten(), table).to(torch.uint8).view(n, BLOCK)
        both = codes[:, ::2] << 4 | codes[:, 1::2]
        scale = most.to(torch.float16).contiguous().view(torch.uint8)
        packed[at : at + step] = torch.cat([both, scale], 1).view(len(part), -1)
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, up to what 4 bits lose."""
    rows, n_bytes = packed.shape
    blocks = packed.reshape(-1, PACKED)
    scale = blocks[:, CODES:].contiguous().view(torch.float16).to(dtype)
    pairs: Tensor = _pairs(dtype, packed.device)
    values = pairs[blocks[:, :CODES].int()].view(-1, BLOCK)
    return values.mul_(scale).view(rows, n_bytes // PACKED * BLOCK)


def _weight(packed: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(packed, DTensor):
        return unpack(packed, dtype)
    own = unpack(packed.to_local(), dtype)
    shape = torch.Size(whole_shape(tuple(packed.shape)))
    return DTensor.from_local(
        own, packed.device_mesh, packed.placements, run_check=False,
        shape=shape, stride=(shape[1], 1),
    )  # fmt: skip


class _Product(torch.autograd.Function):
    """x W^T, which keeps nothing but the bytes for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return F.linear(x, _weight(packed, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (packed,) = grads, ctx.saved_tensors
        return grad @ _weight(packed, grad.dtype), None


class Nf4Linear(nn.Linear):
    """A frozen linear layer; `weight` holds its bytes."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        shape = packed_shape((self.out_features, self.in_features))
        weight = linear.weight
        packed = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        self.weight = nn.Parameter(packed if weight.is_meta else pack(weight), requires_grad=False)
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Of the size that nn.Linear begins with."""
        bound = self.in_features**-0.5
        drawn = torch.empty(self.out_features, self.in_features).uniform_(-bound, bound)
        self.weight.copy_(pack(drawn))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = _Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


def in_nf4(program: Program) -> Program:
    """The same program with every frozen linear layer of its blocks in 4 bits. Raises SpecError
    where there is none, or one whose size no blocks divide."""
    torchao_nf4()
    with torch.device("meta"):
        names = _frozen_linears(program.model(), program)
    packed = frozenset(f"{name}.weight" for name in names)

    def build() -> nn.Module:
        model: nn.Module = program.model()
        for name in names:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            model.set_submodule(name, Nf4Linear(linear))
        return model

    @torch.no_grad()
    def init(model: nn.Module) -> None:
        assert program.init is not None
        drawn = torch.get_rng_state()
        whole = program.model()
        torch.set_rng_state(drawn)  # what building it has drawn is no part of what init draws
        program.init(whole)
        values = whole.state_dict(keep_vars=True)
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(pack(values[name]) if name in packed else values[name])

    first = init if program.init is not None else None
    return replace(program, model=build, init=first, packed=packed)


def _frozen_linears(model: nn.Module, program: Program) -> tuple[str, ...]:
    times: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        times[id(parameter)] = times.get(id(parameter), 0) + 1
    found = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module.weight.requires_grad:
            continue
        if times[id(module.weight)] > 1 or not in_blocks(name, program.blocks):
            continue
        if module.in_features % BLOCK:
            raise SpecError(
                f"frozen_weights: nf4: {name} has {module.in_features} inputs; blocks of {BLOCK} "
                "weights must divide them"
            )
        found.append(name)
    if not found:
        raise SpecError(
            "frozen_weights: nf4: the blocks of this program have no frozen linear layer; adapters "
            "freeze them (elastic.models.lora.lora)"
        )
    return tuple(found)
