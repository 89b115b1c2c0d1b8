"""The subjects themselves: each loads, trains one step in one process, and says what is expected of
each layout."""

from __future__ import annotations

import random
import re

import pytest
import torch
from support.foreign import subjects

from elastic.data.collate import collate
from elastic.program import load_program
from elastic.worker.program.calls import call_model, loss_of


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", subjects.names())
def test_the_whole_model_trains_a_step(name: str) -> None:
    found = subjects.module(name)
    program, expect = subjects.load(name)
    assert program is not found.program
    assert load_program(subjects.path_of(name)).blocks == program.blocks
    assert tuple(expect) == subjects.FAMILIES
    for family, said in expect.items():
        reason = said.removeprefix("refused: ")
        assert (
            said == "equal"
            or (said == "no plan" and family == "tp")
            or (reason != said and re.compile(reason).pattern)
        )
    assert bool(program.tp) == (expect["tp"] != "no plan")

    torch.manual_seed(0)
    random.seed(0)
    model = program.model()
    if program.init is not None:
        program.init(model)
    model.train()
    dataset = program.dataset()
    assert len(dataset) >= 64
    first, again = dataset[3], dataset[3]
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    batch = collate([dataset[i] for i in range(4)])
    if getattr(found, "NO_BACKWARD_ON_THE_CPU", False):
        return
    loss = loss_of(program, call_model(program, model, batch), batch)
    assert bool(loss.isfinite()) and loss.item() != 0
    loss.backward()
    may_lack = re.compile(getattr(found, "MAY_LACK", r"\Z\A.")).search
    lacking = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and not may_lack(name)
        and (parameter.grad is None or not bool(parameter.grad.any()))
    ]
    assert lacking == []
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    before = [parameter.detach().clone() for _, parameter in named]
    program.optimizer(named).step()
    assert any(not torch.equal(old, new) for old, (_, new) in zip(before, named))
