"""Activation checkpointing: blocks that are computed again in the backward pass, behind the forward
pass of another micro-batch too."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.program import Program
from elastic.types import Job, Layout
from elastic.worker.equivalence import layout_check
from elastic.worker.equivalence.compare_values import FAMILIES, Compared, compare
from elastic.worker.equivalence.passes.recomputed_blocks import recomputed_blocks
from elastic.worker.equivalence.small_copy import ROWS, SmallCopy, job_of_copy
from elastic.worker.program.model_profile import trace

WIDTH = 6
IDS = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 1, 0], [2, 2, 4]])  # two halves, of other masks
BATCH = {"input": IDS, "target": IDS}


class Block(nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared, self.inner = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.shared.mask if mask is None else mask
        return x + self.inner(torch.tanh(x)) * mask


class ReadsArgument(nn.Module):
    """Its blocks take the mask as their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(mask=None)
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def block(self) -> nn.Module:
        return Block(self.shared)

    def given(self, mask: Tensor) -> tuple[Tensor, ...]:
        return (mask,)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        given, x = self.given(mask), self.embed(ids)
        for layer in self.layers:
            x = layer(x, *given)
        found: Tensor = self.head(x)
        return found


class ReadsObject(ReadsArgument):
    """It stands on an object that all blocks read."""

    def given(self, mask: Tensor) -> tuple[Tensor, ...]:
        self.shared.mask = mask
        return ()


class Alternates(Block):
    """Each forward pass of it is another one than the one before."""

    odd = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.odd = not self.odd
        return super().forward(x * (2.0 if self.odd else 1.0), mask)


class HasAlternating(ReadsArgument):
    def block(self) -> nn.Module:
        return Alternates(self.shared)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="sum")


def small_of(model: Callable[[], nn.Module]) -> SmallCopy:
    program: Program = Program(
        model=model,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dataset=lambda: [{key: x[i] for key, x in BATCH.items()} for i in range(ROWS)],
        loss=loss,
        blocks="layers.*",
        keywords=lambda batch: {"mask": (batch["input"] % 2)[..., None].float()},
    )
    return SmallCopy(program, trace(program))


def test_what_a_block_reads_besides_its_arguments_is_of_another_micro_batch_on_a_stage() -> None:
    found = recomputed_blocks(small_of(ReadsObject), BATCH)
    assert "after the forward pass of another micro-batch" in found
    assert "layers.0" in found or "embed" in found
    # that one is another function each time, whatever comes between
    for model in (ReadsArgument, HasAlternating):
        assert not recomputed_blocks(small_of(model), BATCH)


@pytest.mark.parametrize("model", [ReadsObject, ReadsArgument])
def test_the_verdict_closes_checkpointing_with_pp_alone(
    model: type[ReadsArgument], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_of(model)
    monkeypatch.setattr(layout_check, "compare", lambda *_, **__: Compared("pp=2"))
    asked = layout_check.CheckRequest(Job(global_batch=ROWS), axes=["pp"])
    found = layout_check._compared(
        asked, small.program, small.profile, batch=BATCH, found=layout_check.Verdict()
    )
    profile, full = found.apply(small.profile), {"activation_checkpointing": "full"}
    refused = profile.refusal(Layout(pp=2, **full))  # type: ignore[arg-type]
    if model is ReadsArgument:
        assert not refused
    else:
        assert refused.startswith("no activation_checkpointing with pp: the gradient of ")
        assert "\n" not in refused and len(refused) < 500
    open_to_all = [Layout(pp=2), Layout(dp_shard=2, **full)]  # type: ignore[arg-type]
    assert not any(map(profile.refusal, open_to_all))
    trusted = layout_check._trusted(found.structure, ["pp"])
    assert not trusted.no_pp_checkpointing and bool(trusted.notes) == bool(refused)


@pytest.mark.e2e
@pytest.mark.parametrize(("model", "right"), [(ReadsObject, False), (ReadsArgument, True)])
def test_two_stages_that_compute_blocks_again_find_the_same(
    model: type[ReadsArgument], right: bool
) -> None:
    """What one process finds is what two of them do."""
    small = small_of(model)
    job = job_of_copy(Job(global_batch=ROWS))
    assert not compare(small, job, BATCH, layout=FAMILIES["pp"]).problem
    again = Layout(pp=2, activation_checkpointing="full")
    assert bool(compare(small, job, BATCH, layout=again).problem) is not right
