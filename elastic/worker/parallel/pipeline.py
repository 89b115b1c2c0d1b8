"""Cuts a module into pipeline stages and runs a schedule over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import P2POp, ProcessGroup, Work, batch_isend_irecv, get_global_rank
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _utils,
    schedules,
)

from elastic.errors import PeerGarbled, ProgramError
from elastic.program import Program
from elastic.types import Layout, ModelProfile
from elastic.types.grid import stage_blocks, stages_at
from elastic.worker.parallel.stages.carried_values import (
    MODEL_INPUT,
    carries,
    cut_carrying,
    with_plain_gradient,
)
from elastic.worker.process_groups import wire
from elastic.worker.process_groups.axis_ranges import STAGE, axis_range
from elastic.worker.program.calls import cut_rows
from elastic.worker.program.model_profile import block_names

Forward = Callable[[range, int], AbstractContextManager[None]]  # of rows, through a stage


def _in_one_batch(p2p_ops: list[P2POp], desc: str | None = None) -> list[Work]:
    return batch_isend_irecv(p2p_ops) if p2p_ops else []


# torch 2.13 sends what goes one way message by message: NCCL would set up another communicator for
# each pair of stages, within a step
schedules._batch_p2p = _in_one_batch


class PassThrough(nn.Module):
    """Stands where a module of another stage was: gives its first argument back."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def cut_stage(
    model: nn.Module,
    program: Program,
    profile: ModelProfile,
    *,
    layers: tuple[int, ...],
    stage: int,
) -> nn.Module:
    """Puts pass-through modules in the place of every module that another stage holds; names stay
    as they were.

    What stands outside of the blocks is preempted as a whole, with what its forward does besides
    its own modules."""
    if len(layers) < 2:
        return model
    if carries(program):
        return cut_carrying(model, program, profile, layers=layers, stage=stage)
    mine = set(stage_blocks(layers, stage))
    if stage == 0:
        mine.add(-1)
    if stage == len(layers) - 1:
        mine.add(profile.n_blocks)
    blocks = block_names(model, program.blocks)
    drop = {name for i, name in enumerate(blocks) if i not in mine}
    of_ends = [spec.fqn for spec in profile.specs if spec.block in {-1, profile.n_blocks} - mine]
    ends = dict(_ends(model, blocks))
    drop |= {name for name in ends if any(fqn.startswith(name + ".") for fqn in of_ends)}
    if program.stage is None:
        plain = {
            name: profile.n_blocks if behind else -1
            for name, behind in ends.items()
            if _is_plain(model, name)
        }
        drop |= {name for name, end in plain.items() if end not in mine}
    for name in drop:
        model.set_submodule(name, PassThrough())
    return model


def _ends(model: nn.Module, blocks: list[str]) -> Iterator[tuple[str, bool]]:
    """The outermost modules with a forward of their own that hold no block and lie in none, and
    whether they are registered behind the first block."""
    behind, outermost = False, ""
    for name, module in model.named_modules():
        if any(name == block or name.startswith(block + ".") for block in blocks):
            behind = True
        elif (
            not name
            or (outermost and name.startswith(outermost + "."))
            or any(b.startswith(name + ".") for b in blocks)
        ):
            continue
        elif type(module).forward is not nn.Module.forward:  # containers have none
            outermost = name
            yield name, behind


def _is_plain(model: nn.Module, name: str) -> bool:
    """Is it a module of torch.nn that has nothing of its own (a dropout, an activation)? Like those
    with parameters, one of the ends has it. Any other class (tables of positions, masks) may be
    what every stage calls."""
    module = model.get_submodule(name)
    plain = type(module).__module__.startswith("torch.nn.modules.")
    return plain and not [*module.parameters(), *module.buffers()]


def _contiguous(module: nn.Module, args: Any, output: Any) -> Any:
    """What is sent must lie in one piece."""
    if isinstance(output, tuple):
        return tuple(_contiguous(module, args, one) for one in output)
    return output.contiguous() if isinstance(output, torch.Tensor) else output


def _contiguous_gradient(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(map(with_plain_gradient, args))


class _Stage(PipelineStage):
    """torch calls a stage once with memory as it finds it, to learn the shapes of what it gives;
    guards in a model that raise for what is not finite must not see that. It tells the stages
    before and behind it those shapes with pickle; here they go by `wire`."""

    around: Forward | None = None  # of this step, with the rows of each microbatch
    rows: Sequence[range] = ()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        around: AbstractContextManager[None] = nullcontext()
        if self.around is not None:
            around = self.around(self.rows[fwd_chunk_id], self.stage_index)
        with around, axis_range(f"{STAGE} {self.stage_index} forward"):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and not self.has_backward:  # torch keeps it, as for a backward pass
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with axis_range(f"{STAGE} {self.stage_index} backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def _to_tensor(self, arg: Any) -> torch.Tensor:
        found: torch.Tensor = super()._to_tensor(arg)
        if isinstance(arg, torch.Tensor):  # given: the same memory
            return found
        with torch.no_grad():
            return found.zero_()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        behind = dst_stage > self.stage_index
        self._tell(meta.forward_metas if behind else meta.backward_metas, dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        behind = src_stage > self.stage_index
        heard = self._hear(src_stage, or_none=behind)
        metas: Any = tuple(
            meta and _utils._TensorMeta(torch.Size(meta.shape), *meta[1:]) for meta in heard
        )
        return _utils._StageBackwardMeta(metas) if behind else _utils._StageForwardMeta(metas)

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """torch 2.11 has this instead: it sends nothing to stages of the same rank, and so to none
        here."""
        before, behind = self.stage_index - 1, self.stage_index + 1
        ranks, mine = self.stage_index_to_group_rank, self.group_rank
        if not self.is_first and ranks[before] != mine:
            heard = self._hear(before, or_none=False)
            args = tuple(
                torch.empty_strided(m.shape, m.stride, dtype=m.dtype, device="meta")
                for m in heard
                if m
            )
        self.stage_index_to_group_rank = dict.fromkeys(ranks, mine)
        try:
            outputs = super()._shape_inference(args, kwargs)  # type: ignore[misc]
        finally:
            self.stage_index_to_group_rank = ranks
        if self.is_last or ranks[behind] == mine:
            return outputs
        self._tell(outputs, behind)
        return ()

    def _tell(self, tensors: Sequence[Any], stage: int) -> None:
        """`tensors`: themselves, or torch's metadata of them; None = no gradient."""
        if any(hasattr(t, "placements") for t in tensors):
            raise ProgramError(
                f"stage {self.stage_index} hands a DTensor to stage {stage}: call `.to_local()` "
                "on it"
            )
        rank, group = self._peer(stage)
        wire.send_metas([_meta_of(tensor) for tensor in tensors], rank, group, device=self.device)

    def _hear(self, stage: int, *, or_none: bool) -> tuple[wire.TensorMeta | None, ...]:
        rank, group = self._peer(stage)
        metas = wire.receive_metas(rank, group, self.device)
        if None in metas and not or_none:
            raise PeerGarbled(f"rank {rank} announced no tensor where one must come")
        return metas

    def _peer(self, stage: int) -> tuple[int, ProcessGroup]:
        assert self.group is not None
        return get_global_rank(self.group, self.stage_index_to_group_rank[stage]), self.group


def _meta_of(tensor: Any) -> wire.TensorMeta | None:
    if tensor is None:
        return None
    stride = tensor.stride() if isinstance(tensor, torch.Tensor) else tensor.stride
    return wire.TensorMeta(tuple(tensor.shape), tuple(stride), tensor.dtype, tensor.requires_grad)


class Pipeline:
    """This rank's stages under the layout's schedule: 1F1B (GPipe where there are fewer
    microbatches than stages), GPipe, or interleaved 1F1B, where a rank has several stages
    (Narayanan et al. 2021, section 2.2). `n`: microbatches; all of one shape for as long as the
    pipeline lives. `carrying`: the stages are those of several groups of blocks."""

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        group: ProcessGroup,
        layout: Layout,
        *,
        n: int,
        device: torch.device,
        carrying: bool = False,
    ) -> None:
        me = group.rank()
        self.device, self.carrying = device, carrying
        self.is_first = me == 0
        self.is_last = me == layout.pp - 1
        self._loss: Callable[[Any, range], torch.Tensor] | None = None
        numbers = stages_at(layout, me)
        for module in stage_modules:
            if _contiguous not in module._forward_hooks.values():
                module.register_forward_pre_hook(_contiguous_gradient)
                module.register_forward_hook(_contiguous)
        self.n = n
        stages = [
            _Stage(module, number, layout.n_stages, device, group=group)
            for number, module in zip(numbers, stage_modules, strict=True)
        ]
        self.stages = stages
        self.schedule: ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B
        if len(stages) > 1:
            self.schedule = ScheduleInterleaved1F1B(
                list(stages), n, loss_fn=self._loss_of, scale_grads=False
            )
        else:
            kind = ScheduleGPipe if layout.schedule == "gpipe" or n < layout.pp else Schedule1F1B
            self.schedule = kind(stages[0], n, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, output: Any, rows: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        numbers = rows.tolist()
        return self._loss(output, range(numbers[0], numbers[-1] + 1))

    def run(
        self,
        inputs: Any,
        keywords: dict[str, Any],
        n_rows: int,
        *,
        loss: Callable[[Any, range], torch.Tensor],
        train: bool,
        forward: Forward | None = None,
    ) -> torch.Tensor:
        """Forward (and backward) of `n_rows` samples; `inputs`: the first stage's, `keywords`:
        every stage's arguments; `loss(output, rows)` gets the row numbers of a microbatch. They
        stay on the host: the loss is computed inside of the schedule, where waiting for the device
        would be a bubble. `forward`: around each stage's forward pass of a microbatch.

        Returns the loss sum on the last stage, zero elsewhere: a scalar tensor on the device.
        """
        self._loss = loss
        for stage in self.stages:
            stage.around = forward
            stage.rows = cut_rows(n_rows, self.n) if forward is not None else ()
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.is_first else ()
        if self.carrying:
            keywords = {**keywords, MODEL_INPUT: inputs}
        call = self.schedule.step if train else self.schedule.eval
        if self.is_last:
            target = torch.arange(n_rows, device="cpu")
            keywords = {**keywords, "target": target, "losses": losses}
        with axis_range("pp schedule"):
            call(*arguments, return_outputs=False, **keywords)
        total = torch.zeros((), device=self.device)
        for value in losses:
            total = total + value.detach()
        return total
