"""May the blocks of several groups be spread over pipeline stages? Each stage is called as it would
be, one behind the other, and gives in the end what the whole model gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from elastic.program import Program
from elastic.types import ModelProfile
from elastic.user_frames import told
from elastic.worker.equivalence.blocks_in_stages import even, in_two_stages
from elastic.worker.equivalence.forward_trace import Batch, eager_flex_attention, shape_of
from elastic.worker.equivalence.small_copy import whole_model
from elastic.worker.equivalence.stages.unit_flow import flow_of
from elastic.worker.parallel.pipeline import cut_stage
from elastic.worker.parallel.stages.carried_values import MODEL_INPUT
from elastic.worker.program.calls import inputs_of, keywords_of

STAGES = 4  # tried, so that a group is cut too and not only parted from the next


def groups_in_stages(program: Program, profile: ModelProfile, batch: Batch, *, here: Batch) -> str:
    """'' = they may. `batch`: of one sample, on the CPU; `here`: where the model is followed."""
    if problem := in_two_stages(profile):
        return problem
    inputs = inputs_of(program, here)
    if not isinstance(inputs, torch.Tensor):
        return (
            f"the model's input is a {type(inputs).__name__}; give it one tensor, and what it "
            "takes besides by Program.keywords"
        )
    flow = flow_of(program, profile, batch)
    if isinstance(flow, str):
        return flow
    return _stages(program, replace(profile, flow=flow), here)


def _stages(program: Program, profile: ModelProfile, batch: Batch) -> str:
    device = next(iter(batch.values())).device.type
    layers, start = even(profile.n_blocks, min(profile.n_blocks, STAGES)), 0
    inputs, given = inputs_of(program, batch), (inputs_of(program, batch),)
    with torch.no_grad(), eager_flex_attention():
        whole: Any = whole_model(program, device)(inputs, **keywords_of(program, batch))
        for stage, n_blocks in enumerate(layers):
            model = cut_stage(
                whole_model(program, device), program, profile, layers=layers, stage=stage
            )
            keywords = {**keywords_of(program, batch), MODEL_INPUT: inputs}
            try:
                given = model(*given, **keywords)
            except Exception as error:  # noqa: BLE001 - the user's model
                where = f"blocks {start} to {start + n_blocks - 1}"
                return f"as a pipeline stage ({where}), without the others, it raises {told(error)}"
            start += n_blocks
    if shape_of(given) != shape_of(whole):
        return (
            "as the last pipeline stage it returns something of another shape than the whole model"
        )
    return ""
