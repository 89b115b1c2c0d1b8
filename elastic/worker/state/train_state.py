"""The training state of one rank: model, optimizer, RNG as boxes; what a worker holds for others;
digests.

Optimizers get the *local* tensors where they are element-wise: a rank's part of the parameters is
all they need, and their state is cut exactly like the parameters. Others get whole tensors, each at
its owner (elastic.worker.state.owner_update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from elastic.errors import InternalError, ProgramError
from elastic.models.experts import TokenCounts, exchanges
from elastic.program import Program
from elastic.reshard.rank_boxes import RNG, boxes, first_values, owned_boxes, reread_boxes
from elastic.types import Box, Holding, Job, Layout, ModelProfile, Transfer, WorkerId
from elastic.types.grid import coordinates, replica_key, stages_at
from elastic.worker.parallel.model_options import ModelOptions, needs_fsdp, to_empty
from elastic.worker.parallel.parallelize import WHOLE, local, parallelize, tie_again
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.process.readback import square_norms
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.model_profile import build_meta, fresh_buffers, tp_styles
from elastic.worker.program.optimizers import Optimizers
from elastic.worker.program.weights import cut, fill
from elastic.worker.state.buffers import StepBuffers
from elastic.worker.state.host_copy import BufferLease, Tensors
from elastic.worker.state.owner_update import OwnerUpdate
from elastic.worker.state.reached_parameters import ReachedParameters


def region(tensors: Mapping[str, tuple[Box, torch.Tensor]], transfer: Transfer) -> torch.Tensor:
    """View of the part that `transfer` names. Raises InternalError when it is not held here."""
    if transfer.fqn not in tensors:
        raise InternalError(f"{transfer.fqn}: a transfer names it, but it is not held here")
    box, view = tensors[transfer.fqn]
    for dim, (offset, size) in enumerate(zip(transfer.offsets, transfer.sizes, strict=True)):
        if size != box.sizes[dim]:
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
    on_host: bool = False  # live boxes that made room on the device

    lease: BufferLease | None = None  # of the host buffer that the boxes lie in
    alone: bool = False  # replicas have others: see replica_key

    def holding(self, me: WorkerId) -> Holding:
        return Holding(me, self.generation, self.rank, self.step, self.kind)

    def serves(self, generation: int, rank: int, step: int) -> bool:
        """Does it hold the boxes of that rank (its own, or equal ones of a replica)?"""
        return (self.generation, self.step) == (generation, step) and (
            self.rank == rank
            or replica_key(self.layout, self.rank, self.alone)
            == replica_key(self.layout, rank, self.alone)
        )


class TrainState:
    """Model and optimizers of one rank in one generation, built on the meta device, filled by
    transfer, file or init."""

    def __init__(
        self,
        program: Program,
        profile: ModelProfile,
        groups: Groups,
        *,
        layout: Layout,
        layers: tuple[int, ...],
        rank: int,
        job: Job,
    ) -> None:
        self.program, self.profile = program, profile
        self.layout, self.layers, self.rank = layout, layers, rank
        self.step = 0
        self.dirty = False  # an optimizer step is under way: the tensors belong to no step
        numbers = stages_at(layout, coordinates(layout, rank).pp)
        self.models = [self._stage(number, groups, job) for number in numbers]
        self.model = self.models[0]  # all of it, where there is no pipeline
        self.routed = TokenCounts(self.models)
        self.parameters = self._present_parameters()
        for spec in profile.specs:  # FSDP and tp have put others in their place
            if spec.fqn in self.parameters:
                vars(self.parameters[spec.fqn]).update(spec.attributes)
        styles: dict[str, str] = {}
        for model in self.models if WHOLE & set(program.tp.values()) else ():
            styles |= tp_styles(model, program)
        self.summed = {
            fqn for fqn in self.parameters if styles.get(fqn.rpartition(".")[0]) in WHOLE
        }
        self.local = {
            fqn: nn.Parameter(local(p), requires_grad=p.requires_grad)
            for fqn, p in self.parameters.items()
        }
        trainable = [(fqn, p) for fqn, p in self.local.items() if p.requires_grad]
        whole = {spec.fqn for spec in profile.specs if profile.kept_of(spec).form}
        self.owner_update = OwnerUpdate(profile, layout, layers, rank, self.local, groups)
        cut = [(fqn, p) for fqn, p in trainable if fqn not in whole]
        names = {kept.name for kept in profile.optimizers if kept.form}
        stepped = dict(cut) | self.owner_update.wholes
        counting = {kept.name for kept in profile.optimizers if kept.counters}
        self.optimizers = Optimizers(
            program, profile.specs, stepped, whole=names, counting=counting
        )
        self.extra = {
            spec.fqn: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in profile.extra
        }
        self.rng = torch.zeros(2, dtype=torch.int64)
        # waits until nobody copies the tensors any more
        self.before_change: Callable[[], object] = lambda: None
        self._make_optimizer_state(cut)
        self.tensors = self._boxed(boxes(profile, self.layout, self.layers, self.rank))
        self.frozen = self._boxed(reread_boxes(profile, self.layout, self.layers, rank=self.rank))
        owned = {box.fqn for box in owned_boxes(profile, self.layout, self.layers, self.rank)}
        buffers = {f"model.{spec.fqn}" for spec in profile.specs if spec.buffer}
        watched = [tensor for fqn, (_, tensor) in self.tensors.items() if fqn in buffers]
        self.buffers = StepBuffers(watched, self.models)
        self.owned_parameters = [fqn for fqn, _ in trainable if "model." + fqn in owned]
        trained = [s.fqn for s in profile.specs if s.trainable and not s.buffer and not s.tied_to]
        self.reached = ReachedParameters(
            self.models,
            self.parameters,
            names=trained if layout.dp * layout.cp > 1 else (),
            kept=(layout.pp > 1 or layout.zero_stage == 1) and needs_fsdp(job, layout),
        )

    def _stage(self, stage: int, groups: Groups, job: Job) -> nn.Module:
        """One pipeline stage's module, cut for this rank, with memory."""
        options = replace(
            ModelOptions.of(job, self.layout, self.rank),
            gives_output=stage == self.layout.n_stages - 1,
        )
        model = cut_stage(
            build_meta(self.program), self.program, self.profile, layers=self.layers, stage=stage
        )
        model = parallelize(model, self.program, self.profile, groups=groups, options=options)
        to_empty(model, groups.device, self.layout.offload)
        # FSDP keeps the tie
        if groups.mesh is None or "fsdp" not in (groups.mesh.mesh_dim_names or ()):
            tie_again(model, self.profile)
        _fill_plain_tensors(model, self.program, self.profile.n_params)
        return model

    def taken_routed(self) -> int:
        """Tokens that came to this rank's experts since the last call."""
        return sum(one.taken() for model in self.models for one in exchanges(model))

    def train(self, mode: bool = True) -> None:
        """Training or evaluation mode of all modules."""
        for model in self.models:
            model.train(mode)

    def _present_parameters(self) -> dict[str, nn.Parameter]:
        """Canonical fqn -> the module's parameter, of those on this rank's stages."""
        present = {
            fqn: p
            for model in self.models
            for fqn, p in model.named_parameters(remove_duplicate=False)
        }
        found: dict[str, nn.Parameter] = {}
        for spec in self.profile.specs:
            if not spec.buffer and spec.fqn in present:
                found.setdefault(spec.tied_to or spec.fqn, present[spec.fqn])
        return found

    def _make_optimizer_state(self, trainable: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Not filled: whatever fills the state covers it, and memory that is not touched here costs
        no time."""
        scalars_on = {  # fused kernels read them on the device
            parameter: parameter.device
            for group in self.optimizers.groups
            if group.get("fused") or group.get("capturable")
            for parameter in group["params"]
        }
        kept = {spec.fqn: self.profile.kept_of(spec) for spec in self.profile.specs}
        for fqn, parameter in trainable:
            state: dict[str, Any] = self.optimizers.owner(fqn).state[parameter]
            for entry in kept[fqn].scalars:
                state[entry] = torch.empty(
                    (), dtype=torch.float32, device=scalars_on.get(parameter)
                )
            for entry in kept[fqn].entries:
                state[entry] = torch.empty_like(parameter, requires_grad=False)

    def _boxed(self, mine: Iterable[Box]) -> Tensors:
        """State fqn -> (box, local tensor). Raises InternalError where torch cut a tensor otherwise
        than the integers say."""
        have: dict[str, torch.Tensor] = {RNG: self.rng, **self.extra}
        for fqn, parameter in self.local.items():
            have["model." + fqn] = parameter.detach()
            state = self.optimizers.owner(fqn).state if parameter.requires_grad else {}
            for entry, value in state.get(parameter, {}).items():
                have[f"optim.{entry}.{fqn}"] = value
        for fqn, boxes_of in self.owner_update.kept.items():
            have |= {f"optim.{entry}.{fqn}": value for entry, value in boxes_of.items()}
        kept = {fqn: value for model in self.models for fqn, value in model.state_dict().items()}
        for spec in self.profile.specs:
            if spec.buffer and spec.fqn in kept:
                have["model." + spec.fqn] = kept[spec.fqn]
        out: Tensors = {}
        for box in mine:
            tensor = have.get(box.fqn)
            if tensor is None or tuple(tensor.shape) != box.sizes:
                found = "nothing" if tensor is None else list(tensor.shape)
                raise InternalError(
                    f"{box.fqn}: rank {self.rank} of {self.layout} should hold {list(box.sizes)}, "
                    f"torch gave {found}"
                )
            out[box.fqn] = (box, tensor)
        return out

    def fill_fresh(self, seed: int, tick: Callable[[], object] = lambda: None) -> None:
        """Step 0: every rank reads its own boxes of the program's weights; without any it
        initializes the whole model on the CPU under the job's seed and keeps its own boxes. `tick`:
        called as they are read."""
        self.rng[0], self.rng[1] = seed, 0
        first = first_values(self.profile)
        for fqn, (_, tensor) in self.tensors.items():
            if fqn.startswith("optim."):
                tensor.fill_(first.get(fqn, 0.0))
        if self.program.weights is not None:
            mine = {fqn: held for fqn, held in self.tensors.items() if fqn.startswith("model.")}
            left = fill(self.program, self.profile.specs, mine, seed=seed, tick=tick)
            made = (
                fresh_buffers(self.program, seed, self.profile) if left else {}
            )  # a whole model, on the CPU
            for fqn in left:
                mine["model." + fqn][1].copy_(made[fqn])
            return
        torch.manual_seed(seed)
        whole = self.program.model()
        if self.program.init is not None:
            torch.manual_seed(seed)
            self.program.init(whole)
        source = whole.state_dict(keep_vars=True)
        with torch.no_grad():
            for fqn, (box, tensor) in self.tensors.items():
                if fqn.startswith("model."):
                    tensor.copy_(cut(source[fqn.removeprefix("model.")].detach(), box))

    def read_frozen(self, tick: Callable[[], object] = lambda: None) -> None:
        """What no other rank sends: frozen weights, from where they lie. `tick`: called as they are
        read."""
        if self.frozen:
            fill(self.program, self.profile.specs, self.frozen, seed=0, tick=tick)

    def release_frozen(self) -> None:
        """Gives up the memory of the frozen weights, whoever still refers to them: nobody takes
        them over, and the next generation reads its own while this model is not yet collected. No
        forward after that."""
        for _, tensor in self.frozen.values():
            tensor.untyped_storage().resize_(0)

    def fill_zeros(self) -> None:
        """For a rehearsal: numbers that mean nothing and break nothing."""
        for _, tensor in (*self.tensors.values(), *self.frozen.values()):
            tensor.zero_()

    def held(self, generation: int) -> Held:
        """The live boxes, sharing memory with the model."""
        return Held(
            generation, self.rank, self.step, "live", self.layout, self.layers, self.tensors,
            alone=self.profile.by_owners,
        )  # fmt: skip

    def snapshot(self) -> Tensors:
        """Host copies of the boxes as they are now."""
        return {
            fqn: (box, tensor.detach().to("cpu", copy=True))
            for fqn, (box, tensor) in self.tensors.items()
        }

    # ------------------------------------------------------------------------------------ gradients

    def gradients(self) -> dict[str, torch.Tensor]:
        """Local gradients of this rank, by canonical fqn; parameters that the loss does not reach
        have none."""
        out = {}
        for fqn, parameter in self.parameters.items():
            grad = parameter.grad
            if grad is not None:
                placements = getattr(parameter, "placements", None)
                if placements is not None and getattr(grad, "placements", placements) != placements:
                    grad = grad.redistribute(placements=placements)  # type: ignore[attr-defined]
                out[fqn] = local(grad)
        return out

    def square_norms(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float64 [owned parameters that have a gradient], on the gradients' device: the sums of
        squares of those parts that this rank owns. Their sum, over all ranks too, counts each
        logical element once."""
        return square_norms([gradients[fqn] for fqn in self.owned_parameters if fqn in gradients])

    def by_block(
        self, gradients: Mapping[str, torch.Tensor], squares: Sequence[float]
    ) -> list[float]:
        """`squares`: elements of `square_norms`. Their sums: what stands before the blocks, each
        block, what stands after."""
        block = {spec.fqn: spec.block for spec in self.profile.specs}
        sums = [0.0] * (self.profile.n_blocks + 2)
        found = [fqn for fqn in self.owned_parameters if fqn in gradients]
        for fqn, square in zip(found, squares, strict=True):
            sums[(block[fqn] or 0) + 1] += square
        return sums

    def apply(
        self,
        gradients: Mapping[str, torch.Tensor],
        scale: float,
        routed: Sequence[torch.Tensor] = (),
    ) -> None:
        """One step of all optimizers with gradients times `scale`. `routed`: what the mixtures are
        balanced by, see TokenCounts; () = a rehearsal, where nothing balances them."""
        self.before_change()
        if self.program.lr_factor is not None:
            self.optimizers.set_factor(self.program.lr_factor(self.step))
        if gradients:
            torch._foreach_mul_(list(gradients.values()), scale)
        if self.profile.by_owners:
            self.owner_update.gather(gradients)  # where it is broken off, nothing has changed yet
        self.dirty = True
        if self.profile.by_owners:
            self.owner_update.step(gradients, self.optimizers)
        for fqn, gradient in gradients.items():
            self.local[fqn].grad = gradient
        self.optimizers.step()
        self.buffers.keep()
        for mixture, counts in zip(self.routed.mixtures, routed, strict=False):
            mixture.rebalance(counts)
        self.step += 1
        self.rng[1] = self.step
        self.dirty = False
        self.clear_gradients()

    def skip(self) -> None:
        """A step that changes neither parameters nor optimizers, nor buffers: what its forward did
        to them is taken back."""
        self.before_change()
        self.buffers.leave_out()
        self.step += 1
        self.rng[1] = self.step
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in (*self.parameters.values(), *self.local.values()):
            parameter.grad = None

    def check_storage(self) -> None:
        """Raises InternalError when torch has moved a parameter to other memory than the optimizer
        and the boxes see."""
        for fqn, parameter in self.parameters.items():
            if local(parameter).data_ptr() != self.local[fqn].data_ptr():
                raise InternalError(
                    f"{fqn}: torch moved the local shard to other memory after the state was "
                    "bound to it"
                )


MOST_BUILT = 1 << 27  # parameters of a whole model that is built for tensors beside its state
_built: dict[str, Any] = {}  # of the program that was asked for last


def _fill_plain_tensors(model: nn.Module, program: Program, n_params: int) -> None:
    """Non-persistent buffers, and tensors that modules have as plain attributes, are no part of the
    state: they are taken from a freshly built module."""
    kept = set(model.state_dict())
    names = [name for name, _ in model.named_buffers() if name not in kept]
    if names and program.buffers is not None and program.buffers(model):
        names = []
    attributes = [at for at, tensor in _attributes(model) if tensor.is_meta]
    if n_params > MOST_BUILT:
        attributes = []
    if not names and not attributes:
        return
    if _built.get("of") is not program:  # a whole model is built for them: once
        whole = program.model()
        state = {x.untyped_storage()._cdata for x in (*whole.parameters(), *whole.buffers())}
        own = {  # those that are a view of the state have other values by now
            at: x for at, x in _attributes(whole) if x.untyped_storage()._cdata not in state
        }
        _built.update(of=program, buffers=dict(whole.named_buffers()), attributes=own)
    for name in names:
        value = _built["buffers"][name]
        if value.is_meta:
            raise ProgramError(
                f"buffer {name}: it is on the meta device after {program.builds} on the CPU"
            )
        model.get_buffer(name).copy_(value)
    for name, key in attributes:
        if (value := _built["attributes"].get((name, key))) is not None:
            setattr(model.get_submodule(name), key, value.clone())


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Module and name of each tensor that a module has as a plain attribute."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if type(value) is torch.Tensor:
                yield (name, key), value
