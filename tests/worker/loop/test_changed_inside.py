"""What a script does to weights and gradients inside of its loop: it counts, or is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loop_reference import train_script_alone
from support.worker.loop_case import losses_agree_when_resized
from support.worker.worker_pool import Pool
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.worker.loop.loop_model import GivenModel, LoopModel
from elastic.worker.loop.script_host import capture
from elastic.worker.process.call_log import CallLog
from elastic.worker.program.loop_program import OptimizerFactory, clear_by, module_factory


@pytest.mark.e2e
@pytest.mark.parametrize("script", ["loop_sharpness.py", "loop_gan.py"])
def test_gradients_that_the_script_clears_do_not_count(
    pool: Pool, tmp_path: Path, script: str
) -> None:
    losses_agree_when_resized(pool, tmp_path, script, at_step=3)


@pytest.mark.e2e
def test_what_the_model_has_set_on_its_parameters_is_there_in_each_layout(
    pool: Pool, tmp_path: Path
) -> None:
    losses_agree_when_resized(pool, tmp_path, "loop_marked.py", at_step=3)


def test_zero_grad_clears_the_gradients_of_the_model_that_is_trained() -> None:
    given = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    own = {
        name: torch.optim.SGD(given[i].parameters(), lr=0.1) for i, name in enumerate(("a", "b"))
    }
    factory, trained = OptimizerFactory(given, own), copy.deepcopy(given)
    for optimizer in own.values():  # as a generation has it: they step other tensors
        optimizer.param_groups[0]["params"] = [torch.zeros(2)]
    clear_by(factory, own, trained)
    trained(torch.ones(1, 2)).sum().backward()
    own["a"].zero_grad()
    assert trained[0].weight.grad is None and trained[1].weight.grad is not None
    own["b"].zero_grad(set_to_none=True)
    assert trained[1].weight.grad is None


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)  # type: ignore[index,operator,union-attr]


def clamp(model: nn.Module) -> None:
    """As for a critic of Wasserstein: `.data` raises no version."""
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (clamp, "writes the weight 0.weight of the model that it gave to elastic.loop"),
        (halve, "writes the weight 0.weight of the model that it gave to elastic.loop"),
        (lambda model: model[1].eval(), "changes the mode of 1 of the model that it gave"),
        (lambda model: model.eval(), "changes the mode of the whole model of the model that"),
        (lambda model: model[0].requires_grad_(False), "has frozen 0.weight inside of its loop"),
    ],
)
def test_what_is_changed_of_the_model_that_was_given_is_named(
    change: Callable[[nn.Module], None], says: str
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    given, trained = GivenModel(model), LoopModel(lambda: model, CallLog())
    trained.attach(copy.deepcopy(model))
    given.check(trained)
    change(model)
    with pytest.raises(ProgramError, match=says):
        given.check(trained)


def test_what_lies_in_the_memory_of_what_is_trained_changes_with_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    given, trained = GivenModel(model), LoopModel(lambda: model, CallLog())
    trained.attach(module_factory(model)())
    halve(model)
    given.check(trained)


def test_one_element_that_a_clamp_changes_is_seen_among_many() -> None:
    model = nn.Linear(1000, 100)
    with torch.no_grad():
        model.weight[3, 7] = 0.5
    given, trained = GivenModel(model), LoopModel(lambda: model, CallLog())
    trained.attach(copy.deepcopy(model))
    for _ in range(60):  # now and then it is looked at later too
        given.check(trained)
    for p in model.parameters():
        p.data.clamp_(-0.4, 0.4)
    with pytest.raises(ProgramError, match="writes the weight weight of the model that it gave"):
        for _ in range(100):
            given.check(trained)


def test_a_weight_whose_elements_cannot_be_compared_is_passed_over() -> None:
    """As a frozen base in float8."""
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.to(torch.float8_e4m3fn), requires_grad=False)
    given, trained = GivenModel(model), LoopModel(lambda: model, CallLog())
    trained.attach(nn.Linear(2, 2))
    given.check(trained)
    model.bias.data.add_(1)
    with pytest.raises(ProgramError, match="writes the weight bias of the model that it gave"):
        given.check(trained)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda model: model(torch.ones(1, 2)), "the script calls the model that it gave to"),
        (lambda model: model.state_dict(), "the script asks for the state_dict() of the model"),
    ],
)
def test_what_is_asked_of_the_model_that_was_given_is_refused_while_its_loop_runs(
    ask: Callable[[nn.Module], Any], said: str
) -> None:
    """It would be answered by initial weights. A copy, as the one that is trained, is another."""
    model = nn.Linear(2, 2)
    given = GivenModel(model)
    with pytest.raises(ProgramError, match=re.escape(said)):
        ask(model)
    ask(module_factory(model)())
    given.release()
    ask(model)


SCRIPT = """
import torch, elastic
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).view(16, 4)
options = dict(steps=3, global_batch=4)
model(data)
with elastic.loop(model=model, optimizer=optimizer, dataset=data, **options) as run:
    for x in run:
        run.backward(run.model(x).square().sum())
        run.step()
        {body}
model(data)
"""


def test_a_call_of_the_model_that_was_given_is_told_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(body="pass"))
    train_script_alone(file, [], 0, 3)
    file.write_text(SCRIPT.format(body="model(x)"))
    with pytest.raises(ProgramError, match="train.py, line 12: the script calls the model that"):
        train_script_alone(file, [], 0, 3)
    file.write_text(SCRIPT.format(body="pass").replace("run.backward(run.", "run.backward("))
    with pytest.raises(SpecError, match="train.py, line 10: the script calls the model that"):
        capture(file, [], 0)


def test_what_is_frozen_while_it_is_trained_is_named() -> None:
    trained, model = nn.Linear(2, 2), LoopModel(lambda: nn.Linear(2, 2), CallLog())
    model.attach(trained)
    halve(nn.Sequential(trained))
    model.check_trained()
    trained.bias.requires_grad_(False)
    with pytest.raises(ProgramError, match="has frozen bias inside of its loop"):
        model.check_trained()
    model.attach(trained)  # a generation that has it so
    model.check_trained()
