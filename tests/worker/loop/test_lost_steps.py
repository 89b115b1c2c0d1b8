"""A step that is not committed: the script is told so, and what it makes of it ends no run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from textwrap import indent

import pytest
import torch
from support.loop_reference import ScriptAtLoop, train_script_alone

from elastic.errors import ProgramError
from elastic.text import LOG_MARK
from elastic.worker.loop.loop_model import GenerationAborted
from elastic.worker.program.commit import Commit
from elastic.worker.session.worker_errors import print_error

STEPS = 3
SCRIPT = """
import json, torch, elastic
with open("{log}", "a") as file:
    file.write('["start"]\\n')
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).view(16, 4)
options = dict(steps=3, global_batch=4)
with elastic.loop(model=model, optimizer=optimizer, dataset=data, **options) as run:
    for x in run:
        run.backward(run.model(x).square().sum())
{body}
"""
ASKS = """
        done = run.step()
        with open("{log}", "a") as file:
            seen = (run.step_index, done, run.committed, run.train_loss, run.grad_norm)
            file.write(json.dumps(seen) + "\\n")
"""
DOES_NOT_ASK = """
        run.step()
        text = f"step {{run.step_index}}: loss {{run.train_loss:.4f}}"
        with open("{log}", "a") as file:
            file.write(json.dumps([text]) + "\\n")
"""


def through_a_lost_step(folder: Path, body: str) -> list[list[object]]:
    """What the script has written down: its second step is not committed, and done again."""
    log = folder / "log"
    file = folder / "train.py"
    file.write_text(SCRIPT.format(log=log, body=body.format(log=log)))
    at_loop = ScriptAtLoop.of(file, [], 0, STEPS)
    at_loop.begin()
    for generation, step in ((1, 0), (1, 1), (2, 1), (2, 2)):
        if generation > at_loop.script.calls.generation:
            at_loop.script.leave()
            at_loop.state.step = step
            at_loop.begin(generation)
        at_loop.script.compute(at_loop.batch(step, 0), step, 0)
        if (generation, step) != (1, 1):
            at_loop.script.applied(Commit(16.0, 8.0 + step, 4.0), step + 1)
    at_loop.script.finish(lambda: None, lambda: False)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_what_a_script_is_told_of_a_step_that_was_not_committed(tmp_path: Path) -> None:
    """No loss, least of all that of the step before; and its number is that of the batch."""
    assert through_a_lost_step(tmp_path, ASKS) == [
        ["start"],
        [0, True, True, 2.0, 1.0],
        [1, False, False, None, None],
        [1, True, True, 2.25, 1.0],
        [2, True, True, 2.5, 1.0],
    ]


def test_a_script_that_prints_the_loss_without_asking_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no number to print: it is started again from its top, in the same process."""
    with caplog.at_level(logging.WARNING):
        said = through_a_lost_step(tmp_path, DOES_NOT_ASK)
    steps = ["step 0: loss 2.0000", "step 1: loss 2.2500", "step 2: loss 2.5000"]
    assert said == [["start"], [steps[0]], ["start"], [steps[1]], [steps[2]]]
    assert "train.py, line 14: TypeError" in caplog.text and "was not committed" in caplog.text


def test_an_error_over_a_model_that_gives_zeros_is_no_error_of_the_program(tmp_path: Path) -> None:
    body = "        assert run.model(x).abs().sum() > 0\n        run.step()\n"
    log = tmp_path / "log"
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(log=log, body=body))
    at_loop = ScriptAtLoop.of(file, [], 0, STEPS)
    at_loop.begin()
    at_loop.script.leave()  # from here on calls of the model give zeros
    with pytest.raises(ConnectionError):
        at_loop.script.compute(at_loop.batch(0, 0), 0, 0)
    at_loop.begin(2)
    assert log.read_text().count("start") == 2
    with torch.no_grad():
        for parameter in at_loop.state.model.parameters():
            parameter.zero_()
    with pytest.raises(ProgramError, match="line 12: AssertionError"):
        at_loop.script.compute(at_loop.batch(0, 0), 0, 0)


@pytest.mark.parametrize("ends", ["sys.exit(1)", "print('failed')"])
def test_who_catches_an_error_over_zeros_is_started_again_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """It leaves by sys.exit, or at its end, and in another folder than it has begun in."""
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    file, log = tmp_path / "train.py", tmp_path / "log"
    body = "        assert run.model(x).abs().sum() > 0\n        run.step()\n"
    text = indent(SCRIPT.format(log=log, body=body), "    ")
    file.write_text(f"import os, sys\nos.chdir('sub')\ntry:\n{text}except Exception:\n    {ends}\n")
    at_loop = ScriptAtLoop.of(file, [], 0, STEPS)
    at_loop.begin()
    at_loop.script.leave()  # from here on calls of the model give zeros
    with pytest.raises(GenerationAborted):
        at_loop.script.compute(at_loop.batch(0, 0), 0, 0)
    at_loop.begin(2)
    assert log.read_text().count("start") == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise SystemExit(3)", "line 12: SystemExit: 3"),
        ("try: [][1]\n        except IndexError: raise SystemExit(1)", "line 12: IndexError: list"),
    ],
)
def test_of_a_script_that_leaves_by_sys_exit_it_is_said_what_it_has_caught(
    tmp_path: Path, body: str, said: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(log=tmp_path / "log", body=f"        {body}\n"))
    with pytest.raises(ProgramError, match=said):
        train_script_alone(file, [], 0, STEPS)


def test_the_traceback_of_the_scripts_own_error_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(log=tmp_path / "log", body="        raise KeyError('mine')"))
    with pytest.raises(ProgramError, match="line 12: KeyError: 'mine'") as caught:
        train_script_alone(file, [], 0, STEPS)
    printed = capsys.readouterr().err.splitlines()
    frames = print_error(caught.value).splitlines()
    assert frames == [line for line in printed if not line.startswith(LOG_MARK)]
    assert not capsys.readouterr().err, "it was printed where it was raised"
    told = [line for line in printed if not line.startswith(LOG_MARK)]
    assert told[0] == "Traceback (most recent call last):" and told[-1] == "KeyError: 'mine'"
    assert f'File "{tmp_path}/train.py", line 12, in <module>' in told[1], "its own frames alone"
    assert not any("/elastic/" in line for line in told)
    assert any("script_host.py" in line for line in printed), "the whole one stays in the log"


def test_a_model_that_is_gathered_while_a_rank_dies_is_gathered_again(tmp_path: Path) -> None:
    """Behind the loop, in the next generation: by a script that is started from its top."""
    log = tmp_path / "log"
    body = "        run.step()\nrun.model.gather_into(model)\ntorch.save(model.weight, '{0}')\n"
    file, saved = tmp_path / "train.py", tmp_path / "weight.pt"
    file.write_text(SCRIPT.format(log=log, body=body.format(saved)))
    at_loop = ScriptAtLoop.of(file, [], 0, STEPS)
    at_loop.begin()
    for step in range(STEPS):
        at_loop.script.compute(at_loop.batch(step, 0), step, 0)
        at_loop.script.applied(Commit(16.0, 8.0, 4.0), step + 1)
    at_loop.script.leave()
    with pytest.raises(GenerationAborted, match="aborted while it was gathered"):
        at_loop.script.finish(lambda: None, lambda: False)
    assert not saved.exists()
    with torch.no_grad():
        at_loop.state.model.weight.fill_(7.0)
    at_loop.state.step = STEPS
    at_loop.begin(2)
    at_loop.script.finish(lambda: None, lambda: False)
    assert torch.load(saved).flatten().tolist() == [7.0] * 4 and log.read_text().count("start") == 2
