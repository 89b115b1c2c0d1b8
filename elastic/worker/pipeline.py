"""Cuts a module into pipeline stages and runs a schedule over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from elastic.mesh import stage_blocks
from elastic.program import Program
from elastic.types import ModelProfile
from elastic.worker.model_profile import block_names


class PassThrough(nn.Module):
    """Stands where a module of another stage was: gives its first argument back."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


def cut_stage(model: nn.Module, program: Program, profile: ModelProfile, layers: tuple[int, ...], stage: int) -> nn.Module:
    """Puts pass-through modules in the place of every module that another stage holds; names stay as they were."""
    if len(layers) < 2:
        return model
    mine = set(stage_blocks(layers, stage))
    if stage == 0:
        mine.add(-1)
    if stage == len(layers) - 1:
        mine.add(profile.n_blocks)
    blocks = block_names(model, program.blocks)
    drop = {name for i, name in enumerate(blocks) if i not in mine}
    for spec in profile.specs:
        if spec.block is not None and spec.block not in mine and not 0 <= spec.block < profile.n_blocks:
            drop.add(spec.fqn.rpartition(".")[0])
    for name in drop:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, PassThrough())
    return model


class Pipeline:
    """This rank's stage under a 1F1B schedule (GPipe where there are fewer microbatches than stages)."""

    def __init__(self, stage_module: nn.Module, group: ProcessGroup, n_microbatches: int, device: torch.device) -> None:
        self.stage_index = group.rank()
        self.n_stages = group.size()
        self.group = group
        self.n_microbatches = n_microbatches
        self.module = stage_module
        self.device = device
        self.is_first = self.stage_index == 0
        self.is_last = self.stage_index == self.n_stages - 1
        self._loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
        stage = PipelineStage(stage_module, self.stage_index, self.n_stages, device, group=group)
        kind: type[PipelineScheduleSingle] = Schedule1F1B if n_microbatches >= self.n_stages else ScheduleGPipe
        self.schedule = kind(stage, n_microbatches, loss_fn=self._loss_of, scale_grads=False)

    def _loss_of(self, output: Any, rows: torch.Tensor) -> torch.Tensor:
        assert self._loss is not None
        return self._loss(output, rows)

    def run(self, inputs: Any, n_rows: int, loss: Callable[[Any, torch.Tensor], torch.Tensor], train: bool) -> torch.Tensor:
        """Forward (and backward) of `n_rows` samples; `loss(output, rows)` gets the row numbers of a microbatch.

        Returns the loss sum on the last stage, zero elsewhere.
        """
        self._loss = loss
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.is_first else ()
        call = self.schedule.step if train else self.schedule.eval
        if self.is_last:
            call(*arguments, target=torch.arange(n_rows, device=self.device), losses=losses)
        else:
            call(*arguments)
        total = torch.zeros((), device=self.device)
        for value in losses:
            total = total + value.detach()
        return total
