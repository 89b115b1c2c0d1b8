"""The training state of one rank: model, optimizer, RNG as boxes; what a worker holds for others; digests.

Optimizers get the *local* tensors: they are element-wise, so a rank's part of the parameters is all they need, and their state
is cut exactly like the parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from elastic.errors import InternalError, ProgramError
from elastic.mesh import coordinates, replica_key
from elastic.program import Program
from elastic.reshard.shards import RNG, boxes, owned_boxes
from elastic.types import Box, Holding, Layout, ModelProfile, Transfer, WorkerId
from elastic.worker.groups import Groups
from elastic.worker.model_profile import build_meta
from elastic.worker.parallelize import local, parallelize
from elastic.worker.pipeline import cut_stage

Tensors = dict[str, tuple[Box, torch.Tensor]]


def region(tensors: Mapping[str, tuple[Box, torch.Tensor]], transfer: Transfer) -> torch.Tensor:
    """View of the part that `transfer` names. Raises InternalError when it is not held here."""
    if transfer.fqn not in tensors:
        raise InternalError(f"{transfer.fqn}: a transfer names it, but it is not held here")
    box, view = tensors[transfer.fqn]
    for dim, (offset, size) in enumerate(zip(transfer.offsets, transfer.sizes, strict=True)):
        view = view.narrow(dim, offset - box.offsets[dim], size)
    return view


@dataclass
class Held:
    """Boxes of one rank of one generation after `step` steps, in this process's memory."""

    generation: int
    rank: int
    step: int
    kind: Literal["live", "peer"]
    layout: Layout
    layers: tuple[int, ...]
    tensors: Tensors

    def holding(self, me: WorkerId) -> Holding:
        return Holding(me, self.generation, self.rank, self.step, self.kind)

    def serves(self, generation: int, rank: int, step: int) -> bool:
        """Does it hold the boxes of that rank (its own, or equal ones of a replica)?"""
        return (self.generation, self.step) == (generation, step) and (
            self.rank == rank or replica_key(self.layout, self.rank) == replica_key(self.layout, rank)
        )


class TrainState:
    """Model and optimizer of one rank in one generation, built on the meta device, filled by transfer, file or init."""

    def __init__(self, program: Program, profile: ModelProfile, groups: Groups, place: tuple[Layout, tuple[int, ...], int]):
        self.program, self.profile = program, profile
        self.layout, self.layers, self.rank = place
        self.step = 0
        self.dirty = False  # an optimizer step is under way: the tensors belong to no step
        model = cut_stage(build_meta(program), program, profile, self.layers, coordinates(self.layout, self.rank).pp)
        self.model = parallelize(model, program, profile, groups.mesh)
        self.model.to_empty(device=groups.device)
        _fill_plain_buffers(self.model, program)
        self.parameters = self._present_parameters()
        self.local = {fqn: nn.Parameter(local(p), requires_grad=p.requires_grad) for fqn, p in self.parameters.items()}
        trainable = [(fqn, p) for fqn, p in self.local.items() if p.requires_grad]
        self.optimizer = program.optimizer(trainable)
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.rng = torch.zeros(2, dtype=torch.int64)
        self._make_optimizer_state(trainable)
        self.tensors = self._boxed(boxes(profile, self.layout, self.layers, self.rank))
        owned = {box.fqn for box in owned_boxes(profile, self.layout, self.layers, self.rank)}
        self.owned = owned
        self.owned_parameters = [fqn for fqn, _ in trainable if "model." + fqn in owned]

    def _present_parameters(self) -> dict[str, nn.Parameter]:
        """Canonical fqn -> the module's parameter, of those on this stage."""
        present = dict(self.model.named_parameters(remove_duplicate=False))
        found: dict[str, nn.Parameter] = {}
        for spec in self.profile.specs:
            if not spec.buffer and spec.fqn in present:
                found.setdefault(spec.tied_to or spec.fqn, present[spec.fqn])
        return found

    def _make_optimizer_state(self, trainable: Iterable[tuple[str, nn.Parameter]]) -> None:
        for _, parameter in trainable:
            state: dict[str, Any] = self.optimizer.state[parameter]
            for entry in self.profile.optimizer_scalars:
                state[entry] = torch.zeros((), dtype=torch.float32)
            for entry in self.profile.optimizer_entries:
                state[entry] = torch.zeros_like(parameter, requires_grad=False)

    def _boxed(self, mine: Iterable[Box]) -> Tensors:
        """State fqn -> (box, local tensor). Raises InternalError where torch cut a tensor otherwise than the integers say."""
        have: dict[str, torch.Tensor] = {RNG: self.rng}
        for fqn, parameter in self.local.items():
            have["model." + fqn] = parameter.detach()
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                have[f"optim.{entry}.{fqn}"] = value
        kept = self.model.state_dict()
        for spec in self.profile.specs:
            if spec.buffer and spec.fqn in kept:
                have["model." + spec.fqn] = kept[spec.fqn]
        out: Tensors = {}
        for box in mine:
            tensor = have.get(box.fqn)
            if tensor is None or tuple(tensor.shape) != box.sizes:
                found = "nothing" if tensor is None else list(tensor.shape)
                raise InternalError(
                    f"{box.fqn}: rank {self.rank} of {self.layout} should hold {list(box.sizes)}, torch gave {found}"
                )
            out[box.fqn] = (box, tensor)
        return out

    def fill_fresh(self, seed: int) -> None:
        """Step 0: every rank initialises the whole model on the CPU under the job's seed and keeps its own boxes."""
        torch.manual_seed(seed)
        whole = self.program.model()
        if self.program.init is not None:
            torch.manual_seed(seed)
            self.program.init(whole)
        source = whole.state_dict(keep_vars=True)
        with torch.no_grad():
            for fqn, (box, tensor) in self.tensors.items():
                if fqn.startswith("model."):
                    view = source[fqn.removeprefix("model.")].detach()
                    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                        view = view.narrow(dim, offset, size)
                    tensor.copy_(view)
        self.rng[0], self.rng[1] = seed, 0

    def held(self, generation: int) -> Held:
        """The live boxes, sharing memory with the model."""
        return Held(generation, self.rank, self.step, "live", self.layout, self.layers, self.tensors)

    def snapshot(self) -> Tensors:
        """Host copies of the boxes as they are now."""
        return {fqn: (box, tensor.detach().to("cpu", copy=True)) for fqn, (box, tensor) in self.tensors.items()}

    # ------------------------------------------------------------------------------------------ gradients

    def gradients(self) -> dict[str, torch.Tensor]:
        """Local gradients of this rank, by canonical fqn; parameters that the loss does not reach have none."""
        out = {}
        for fqn, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None:
                placements = getattr(parameter, "placements", None)
                if placements is not None and getattr(grad, "placements", placements) != placements:
                    grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
                out[fqn] = local(grad)
        return out

    def square_norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """Sum of squares over the elements that this rank owns: summed over ranks, each logical element counts once."""
        norms = [torch.linalg.vector_norm(gradients[fqn]) for fqn in self.owned_parameters if fqn in gradients]
        return float(torch.stack(norms).double().square().sum()) if norms else 0.0

    def apply(self, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        """One optimizer step with gradients times `scale`."""
        factor = self.program.lr_factor(self.step) if self.program.lr_factor is not None else 1.0
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * factor
        self.dirty = True
        for fqn, gradient in gradients.items():
            self.local[fqn].grad = gradient.mul_(scale)
        self.optimizer.step()
        self.step += 1
        self.rng[1] = self.step
        self.dirty = False
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters.values(), *self.local.values()):
            parameter.grad = None

    def check_storage(self) -> None:
        """Raises InternalError when torch has moved a parameter to other memory than the optimizer and the boxes see."""
        for fqn, parameter in self.parameters.items():
            if local(parameter).data_ptr() != self.local[fqn].data_ptr():
                raise InternalError(f"{fqn}: torch moved the local shard to other memory after the state was bound to it")


def _fill_plain_buffers(model: nn.Module, program: Program) -> None:
    """Non-persistent buffers are no part of the state: they are taken from a freshly built module."""
    kept = set(model.state_dict())
    names = [name for name, _ in model.named_buffers() if name not in kept]
    if not names:
        return
    source = dict(program.model().named_buffers())
    for name in names:
        if source[name].is_meta:
            raise ProgramError(f"buffer {name}: it is on the meta device after Program.model() on the CPU")
        model.get_buffer(name).copy_(source[name])


# ---------------------------------------------------------------------------------------------- digests

_MASK = (1 << 64) - 1
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROWS = 1 << 18  # elements per pass


def digest(tensors: Mapping[str, tuple[Box, torch.Tensor]], shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> int:
    """Position-keyed 64-bit digest of the named boxes: a sum (mod 2**64) of one hash per element of its logical position
    and its bits, so that any cut of the same logical tensors adds up to the same number."""
    total = 0
    for fqn in names:
        box, tensor = tensors[fqn]
        seed = int.from_bytes(hashlib.blake2b(fqn.encode(), digest_size=8).digest(), "little")
        flat = tensor.detach().cpu().contiguous().view(-1)
        bits = flat.view(_BITS[flat.element_size()]).numpy()
        positions = _positions(box, shapes[fqn])
        for start in range(0, bits.size, ROWS):
            part = bits[start : start + ROWS].astype(np.int64).view(np.uint64)
            at = positions[start : start + ROWS]
            mixed = (at + np.uint64(1)) * _ODD ^ part ^ np.uint64(seed)
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
            mixed ^= mixed >> np.uint64(27)
            mixed *= _ODD
            mixed ^= mixed >> np.uint64(31)
            total = (total + int(np.add.reduce(mixed, dtype=np.uint64))) & _MASK
    return total


def _positions(box: Box, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Flat positions in the logical tensor of the box's elements, in row-major order of the box."""
    at = np.zeros((1,), dtype=np.uint64)
    for offset, size, dim in zip(box.offsets, box.sizes, shape, strict=True):
        index = np.arange(offset, offset + size, dtype=np.uint64)
        at = (at[:, None] * np.uint64(dim) + index[None, :]).reshape(-1)
    return at
