"""What context parallelism asks of a program, found out before any step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.places import PROGRAMS
from torch import Tensor, nn

from elastic.data.collate import collate
from elastic.errors import ProgramError, SpecError
from elastic.models.attention import SequenceShard
from elastic.models.llama import tp_plan
from elastic.program import Program, load_program
from elastic.types import Job, Layout
from elastic.types.grid import coordinates
from elastic.worker.parallel.context_parallel import (
    Sequence,
    check_calls,
    check_loss,
    cut,
    largest_cp,
)
from elastic.worker.process_groups.groups import Groups

TINY = load_program(PROGRAMS / "tiny.py")


class Plain(nn.Module):
    """Attention of its own, which knows nothing of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 8), nn.ModuleList([nn.Linear(8, 64)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)[:, None]
        return self.layers[0](F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])


def batch_of(program: Program, n: int = 1) -> dict[str, Tensor]:
    dataset: Any = program.dataset and program.dataset()
    return collate([dataset[i] for i in range(n)])


def test_all_of_the_batch_that_has_the_sequence_is_cut() -> None:
    batch = batch_of(TINY, 2) | {"weight": torch.ones(2, 3), "n": torch.ones(2)}
    mine = cut(TINY, batch, SequenceShard(1, 2, None))
    assert mine["input"].tolist() == [row[4:12] for row in batch["input"].tolist()]
    assert mine["target"].shape == (2, 8)
    assert mine["weight"].shape == (2, 3)
    assert mine["n"].shape == (2,)


def test_model_without_elastic_attention_is_refused() -> None:
    check_calls(TINY, batch_of(TINY), 2)
    with pytest.raises(SpecError, match=r"cp=2, but the model does not call elastic\.attention"):
        check_calls(replace(TINY, model=Plain), batch_of(TINY), 2)


def test_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ProgramError, match="16 positions are no multiple"):
        check_calls(TINY, batch_of(TINY), 3)
    with pytest.raises(ProgramError, match="no tensor of two dimensions"):
        check_calls(replace(TINY, inputs=lambda batch: batch["target"][:, 0]), batch_of(TINY), 2)


def test_loss_that_is_no_sum_over_positions_is_refused() -> None:
    model = TINY.model()
    check_loss(TINY, model, batch_of(TINY), cp=2)

    def shifted(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(
            output[:, :-1].flatten(0, 1), batch["input"][:, 1:].flatten(), reduction="sum"
        )

    with pytest.raises(
        ProgramError, match=r"Program\.loss of one sample is .* targets are shifted in the dataset"
    ):
        check_loss(replace(TINY, loss=shifted), model, batch_of(TINY), cp=2)
    with pytest.raises(
        ProgramError,
        match=r"must return a tensor with the sequence \(16\) as its dim 1, not \[1, 64\]",
    ):
        check_loss(TINY, nn.Sequential(model, Pooled()), batch_of(TINY), cp=2)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_sequence_parallelism_of_a_part_that_is_odd_is_refused() -> None:
    layout = Layout(tp=2)
    program = replace(TINY, tp=tp_plan(sequence=True))
    sequence = Sequence(
        program, layout, coordinates(layout, 0), groups=Groups(1, layout, torch.device("cpu"))
    )
    batch = batch_of(TINY)
    assert sequence.cut(batch) is batch
    with pytest.raises(
        ProgramError, match="tp=2 with sequence parallelism needs a multiple of 2 positions, not 15"
    ):
        sequence.cut({"input": batch["input"][:, :15]})


def test_largest_cp_of_a_job() -> None:
    assert largest_cp(Job(layout="auto")) == 1
    assert largest_cp(Job(layout="cp=4,tp=2")) == 4
    assert largest_cp(Job(layout={"2": "cp=2", "4": "dp_shard=4"})) == 2
