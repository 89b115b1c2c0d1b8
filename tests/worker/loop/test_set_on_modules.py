"""Modes and numbers that a script sets on modules inside of its loop: they go where the state goes,
and every rank has the same."""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import astuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.loop_case import loop_job, losses_agree_when_resized
from support.worker.plans import live, plan
from support.worker.worker_pool import Pool
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic.errors import ProgramError
from elastic.types import Layout, StepDone, WorkerFailed
from elastic.worker.loop.handoff import Handoff, HandoffMessage
from elastic.worker.loop.loop import OfferedBatch, Outcome, Run
from elastic.worker.loop.loop_model import LoopModel
from elastic.worker.process import call_log
from elastic.worker.process.call_log import CallLog, other_settings
from elastic.worker.process_groups.wire import _encoded
from elastic.worker.program.extra_state import decode, encode
from elastic.worker.program.loop_program import GROUPS, LoopProgram, Settings, no_loss
from elastic.worker.step import optimizer_step


class Counting(nn.Module):
    """Its forward pass changes a number itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.flag = 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), Counting())
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(self.encoder(x))
        return out


def attached() -> tuple[LoopModel, Settings]:
    """As a script's, whose state a generation loads before it has a model."""
    model = LoopModel(Model, CallLog())
    settings = Settings(torch.optim.SGD(Model().parameters(), lr=0.1))
    settings.modules = model.module_numbers
    return model, settings


def moved(state: object) -> object:
    """Through a box, as bytes."""
    return decode(
        GROUPS, torch.frombuffer(bytearray(boxed(encode(GROUPS, state))), dtype=torch.uint8)
    )


def boxed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def set_some(model: LoopModel) -> None:
    model.encoder.eval()
    model.encoder[2].train()
    model.drop.p = 0.0


def check_set(model: Model) -> None:
    modes = {name: one.training for name, one in model.named_modules() if not one.training}
    assert set(modes) == {"encoder", "encoder.0", "encoder.1"} and model.drop.p == 0.0


def test_a_later_generation_has_them_and_so_has_a_worker_that_comes_later() -> None:
    ours, settings = attached()
    ours.attach(Model())
    assert "modules" not in settings.state_dict() and not ours.set_by_script()
    set_some(ours)
    later, newcomer = Model(), Model()
    ours.attach(later)
    check_set(later)
    theirs, other = attached()
    other.load_state_dict(moved(settings.state_dict()))  # type: ignore[arg-type]
    theirs.attach(newcomer)
    check_set(newcomer)
    assert theirs.set_by_script() == ours.set_by_script()
    assert other.state_dict() == settings.state_dict()
    later.encoder.train()
    later.drop.p = 0.1
    assert not ours.set_by_script() and "modules" not in settings.state_dict()


def test_what_a_forward_pass_changes_itself_and_flags_stay_where_they_are() -> None:
    ours, _ = attached()
    ours.attach(Model())
    for step in range(3):
        ours.drop.p = 0.1 * step
        ours(torch.ones(2, 2))
        ours.encoder[2].flag = True
        assert list(ours.set_by_script()) == ([] if step == 1 else ["drop.p"])
    ours.attach(fresh := Model())
    assert (fresh.encoder[2].n, fresh.encoder[2].flag, fresh.drop.p) == (0, False, 0.2)


def test_more_than_goes_along_is_refused() -> None:
    model = LoopModel(Model, CallLog())
    model.attach(many := nn.ModuleList(nn.Dropout(0.1) for _ in range(600)))
    for one in many:
        one.eval()
    assert len(model.set_by_script()) == 600  # with equal names: little
    for one, p in zip(many, torch.rand(600).tolist(), strict=True):
        one.p = p
    with pytest.raises(ProgramError, match="sets modes and numbers on modules of run.model inside"):
        model.set_by_script()


def test_a_rank_that_sets_others_is_named() -> None:
    marks = []
    for settings in ({}, {"encoder.training": False}, {"encoder.training": False}):
        log = CallLog()
        log.note_settings(settings)
        marks.append(log.take_mark())
    assert marks[0] != marks[1] == marks[2]
    same, odd = {"drop.p": 0.0}, {"drop.p": 0.0, "encoder.training": 0.0}
    found = "has set encoder.training = 0 in run.model, rank"
    assert f"rank 2 {found} 0 has not" in other_settings([same, same, odd])
    assert f"rank 0 {found} 1 has not" in other_settings([odd, same, odd])
    assert not other_settings([odd, odd])


def test_settings_of_thousands_of_groups_cost_a_step_no_formatting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = {f"optimizer.param_groups[{i}]['lr']": i / 7 for i in range(3000)}
    other = dict(reversed(one.items())) | {"optimizer.param_groups[2999]['lr']": 0.5}
    marks = []
    monkeypatch.setattr(call_log, "repr", None, raising=False)
    for settings in (one, dict(reversed(one.items())), other):
        log = CallLog()
        log.note_settings(settings)
        marks.append(log.take_mark())
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize("equal", [False, True])
def test_unequal_calls_are_named_before_the_numbers_of_thousands_of_groups(
    equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, sent, none = CallLog(), list[int](), (0, True, 0, "", [])
    log.note_settings({f"optimizer.param_groups[{i}]['lr']": 0.5 for i in range(30000)})
    log.begin(0)
    log.add("run.model", sys._getframe())
    mine = [*map(astuple, log.parts())]
    said = [json.dumps(parts).encode() for parts in (mine, mine if equal else [none])]
    monkeypatch.setattr(optimizer_step, "gather_words", lambda mine, control: said)

    def gathered(mine: dict[str, float], control: object) -> list[dict[str, float]]:
        sent.append(_encoded(mine).numel())  # raises where there is too much
        return [mine, mine | {"optimizer.param_groups[7]['lr']": 0.1}]

    monkeypatch.setattr(optimizer_step, "gather_numbers", gathered)
    state = SimpleNamespace(step=0, buffers=SimpleNamespace(take_back=lambda: None))
    one: Any = SimpleNamespace(
        script=SimpleNamespace(calls=log), state=state, groups=SimpleNamespace(commit=None)
    )
    found = "param_groups.7..'lr'. = 0.1, rank 0 has 0.5" if equal else "rank 0 calls run.model at"
    with pytest.raises(ProgramError, match=found):
        optimizer_step.Stepper._refuse_calls(one)
    assert len(sent) == equal


def stepped(rate: Any, betas: Any = (0.9, 0.95)) -> tuple[int, dict[str, float]]:
    """The mark of a step, and what is said of it where another rank has another one."""
    program = LoopProgram(nn.Identity, None, None, no_loss, given=lambda batch: batch["x"])
    module = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    settings = Settings(optimizer)
    run = Run(program, {"all": optimizer})
    run.handoff = Validating(module, settings)
    settings.modules = run.model.module_numbers
    run.model.attach(module)
    run.backward(run.model(next(run)).sum())
    optimizer.param_groups[0].update(lr=rate, betas=betas)
    run.step()
    return run.calls.take_mark(), dict(run.calls.settings)


def test_a_rank_with_another_learning_rate_is_named() -> None:
    mark, settings = stepped(0.05)
    for same in (torch.tensor(0.05), np.float32(0.05), 0.05 * (1 + 1e-12)):
        assert stepped(same, [0.9, 0.95]) == (mark, settings), "as it is once it has travelled"
    other_mark, other = stepped(0.1)
    assert other_mark != mark and other_settings([settings, settings]) == ""
    found = other_settings([settings, settings, other])
    lr = "optimizer['all'].param_groups[0]['lr']"
    assert found.startswith(f"rank 2 has {lr} = 0.1, rank 0 has 0.05: every rank must step with")
    assert stepped(0.05, (0.9, 0.99))[0] != mark


class Rows(nn.Module):
    """Notes how many it was called with; its block is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.count, self.rows = nn.Linear(2, 1), Counting(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = len(x)
        again = lambda x: self.block(self.count(x))  # noqa: E731
        return checkpoint(again, x, use_reentrant=False)  # type: ignore[no-any-return]


class Validating(Handoff):
    """Calls the model in a thread of its own and asks what travels, before it answers."""

    def __init__(self, module: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.module, self.settings = module, settings
        self.travels: list[bool] = []

    def say(self, word: HandoffMessage) -> object:
        thread = threading.Thread(target=self.validate)
        thread.start()
        thread.join()
        batch = {"x": torch.ones(3, 2)}
        return OfferedBatch(batch, 0, 0) if word.kind == "next" else Outcome(committed=True)

    def validate(self) -> None:
        self.module(torch.ones(7, 2))
        self.travels.append("modules" in self.settings.state_dict())


def test_what_a_validation_and_backward_change_is_not_set_by_the_script() -> None:
    program = LoopProgram(nn.Identity, None, None, no_loss, given=lambda batch: batch["x"])
    module = Rows()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run, settings = Run(program, optimizer), Settings(optimizer)
    settings.modules = run.model.module_numbers
    run.handoff = answers = Validating(module, settings)
    run.model.attach(module)
    for _ in range(2):
        run.backward(run.model(next(run)).sum())
        assert not run.model.set_by_script() and module.rows == 3
        assert run.step() and not run.model.set_by_script() and module.rows == 7
    assert module.count.n > 4 and not any(answers.travels)
    module.rows = 5  # after a step, as the script's own line
    next(run)
    assert answers.travels[-1] and list(run.model.set_by_script()) == ["rows"]


@pytest.mark.e2e
def test_losses_are_those_of_one_process_with_a_worker_that_never_came_to_the_line(
    pool: Pool, tmp_path: Path
) -> None:
    losses_agree_when_resized(pool, tmp_path, "loop_set_inside.py", at_step=4)


@pytest.mark.e2e
def test_a_worker_that_counts_from_its_own_first_batch_is_named(pool: Pool, tmp_path: Path) -> None:
    """It has joined after some steps; nothing is stepped with two learning rates."""
    workers = pool.open(loop_job("loop_enumerated.py", steps=40), tmp_path)
    one = plan(1, Layout(dp_replicate=2), workers, 12, n_blocks=0)
    pool.enter(one)
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    pool.enter(plan(2, Layout(dp_replicate=3), workers, 12, resume=live(one), n_blocks=0))
    failed, done = partial(pool.events, WorkerFailed, 2), partial(pool.events, StepDone, 2)
    pool.wait(lambda: len(failed()) == 3 or done(), "failure")
    assert not done()
    (said,) = {e.error for e in failed()}
    lr = re.escape("optimizer.param_groups[0]['lr']")
    found = re.search(rf": rank 2 has {lr} = 0.01, rank 0 has (0.0\d+): every rank", said)
    assert found and float(found[1]) < 0.005, said
