"""`for epoch in run.epochs(): for batch in run:`, a script's loop over epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.loop_reference import ScriptAtLoop
from support.worker.loop_case import loop_job
from support.worker.plans import live, plan
from support.worker.recovery import loss_curve_agrees
from support.worker.worker_pool import Pool

from elastic.api.running.entry import loaded
from elastic.errors import ProgramError, SpecError
from elastic.types import Layout, StepDone
from elastic.worker.loop.loop_model import LoopModel
from elastic.worker.loop.script_host import capture
from elastic.worker.process.call_log import CallLog
from elastic.worker.program.commit import Commit

PER_EPOCH = 2  # steps
SCRIPT = """
import json, torch, elastic
def told(*what):
    with open("{log}", "a") as file:
        file.write(json.dumps(what) + "\\n")
told("start")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(32.0).view(8, 4)
run = elastic.loop(model=model, optimizer=optimizer, dataset=data, {more}, global_batch=4).start()
model = run.model
for epoch in run.epochs():
    model.train()
    told("epoch", epoch)
    for x in run:
        run.backward(model(x).{loss})
        done = run.step()
        told("step", run.step_index, done)
    model.eval()
    told("end", epoch, run.step_index)
    run.log({{"epoch": epoch}})
"""


def written(folder: Path, *, loss: str = "square().sum()", more: str = "epochs=2") -> Path:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(log=folder / "log", loss=loss, more=more))
    return file


def through(folder: Path, done: list[tuple[int, int, bool]]) -> tuple[list[list[object]], object]:
    """What the script has told, and the numbers of its last step, when (generation, step, whether
    it is committed) come one after the other."""
    at_loop = ScriptAtLoop.of(written(folder), [], 0, 2 * PER_EPOCH)
    script, logged = at_loop.script, {}
    for generation, step, committed in done:
        if generation > (script.calls.generation or 0):
            script.leave()
            at_loop.state.step = step
            at_loop.begin(generation)
        epoch, after = step // PER_EPOCH, (step + 1) // PER_EPOCH
        batch = {"0": torch.ones(4, 4)}
        script.compute(batch, step, epoch, ends_epoch=after > epoch)
        if committed:
            script.applied(Commit(16.0, 8.0, 4.0), step + 1)
            logged = script.logged()
    script.finish(lambda: None, lambda: False)
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()], logged


def test_what_stands_behind_the_inner_loop_is_done_once_after_each_epoch(tmp_path: Path) -> None:
    said, logged = through(tmp_path, [(1, step, True) for step in range(4)])
    assert said == [
        ["start"],
        ["epoch", 0], ["step", 0, True], ["step", 1, True], ["end", 0, 1],
        ["epoch", 1], ["step", 2, True], ["step", 3, True], ["end", 1, 3],
    ]  # fmt: skip
    assert logged == {"epoch": 1.0}, "it is told of the last step of the epoch"


def test_an_epoch_that_is_entered_in_its_middle_goes_on_there(tmp_path: Path) -> None:
    said, _ = through(tmp_path, [(1, 3, True)])
    assert said == [["start"], ["epoch", 1], ["step", 3, True], ["end", 1, 3]]


def test_a_last_step_that_was_not_committed_is_done_again_before_the_epoch_ends(
    tmp_path: Path,
) -> None:
    said, _ = through(
        tmp_path, [(1, 0, True), (1, 1, False), (2, 1, True), (2, 2, True), (2, 3, True)]
    )
    assert said[3:7] == [["step", 1, False], ["step", 1, True], ["end", 0, 1], ["epoch", 1]]


def test_back_in_the_epoch_before_it_ends_a_second_time(tmp_path: Path) -> None:
    """Its last step is gone with a worker; the next epoch had begun, or had not."""
    steps = [(1, 0, True), (1, 1, True), (2, 1, True), (2, 2, True), (2, 3, True)]
    said, _ = through(tmp_path, steps)
    ends = [one for one in said if one[0] in ("end", "epoch")]
    assert ends == [["epoch", 0], ["end", 0, 1], ["epoch", 0], ["end", 0, 1], ["epoch", 1], ["end", 1, 3]]  # fmt: skip


def test_the_outer_loop_needs_the_inner_one(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_text(file.read_text().replace("    for x in run:", "    for x in []:"))
    at_loop = ScriptAtLoop.of(file, [], 0, 4)
    at_loop.begin()
    with pytest.raises(ProgramError, match="has no `for batch in run` inside"):
        at_loop.script.compute({"0": torch.ones(4, 4)}, 0, 0)


def test_its_body_is_tried_before_a_worker_starts(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a mean over the batch"):
        capture(written(tmp_path, loss="mean()"), [], 0)


@pytest.mark.parametrize(
    ("said", "overrides", "steps"),
    [
        ("epochs=3", [], 6),
        ("epochs=3", ["global_batch=3"], 8),
        ("epochs=3", ["steps=5"], 5),
        ("steps=5", ["epochs=1"], 2),
    ],
)
def test_epochs_are_so_many_steps(
    tmp_path: Path, said: str, overrides: list[str], steps: int
) -> None:
    written(tmp_path, more=said)
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    spec, _ = loaded(tmp_path, overrides)
    assert spec.steps == steps


@pytest.mark.parametrize(
    ("said", "overrides", "wrong"),
    [
        ("epochs=3, steps=2", [], "elastic.loop(...): 'epochs' and 'steps' both say how long"),
        ("epochs=0", [], "'epochs' must be a whole number of at least 1, not 0"),
        ("epochs=1", ["epochs=half"], "job.yaml: 'epochs' must be a whole number of at least 1"),
        ("epochs=1", ["global_batch=0"], "global_batch"),
    ],
)
def test_epochs_that_are_wrong(tmp_path: Path, said: str, overrides: list[str], wrong: str) -> None:
    written(tmp_path, more=said)
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    with pytest.raises(SpecError) as caught:
        loaded(tmp_path, overrides)
    assert wrong in str(caught.value)


@pytest.mark.e2e
def test_an_epoch_ends_on_all_ranks_and_one_of_them_saves(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Fully sharded, with a worker that comes in the first epoch: what rank 0 alone asks of the
    model gathers nothing, so that the next step meets the other ranks."""
    job = loop_job("loop_epochs.py", steps=46)
    workers = pool.open(job, tmp_path)
    first = plan(1, Layout(dp_shard=2), workers[:2], 12)
    pool.enter(first)
    pool.wait(lambda: any(e.step >= 3 for e in pool.events(StepDone)), "step 3")
    pool.enter(plan(2, Layout(dp_shard=3), workers[:3], 12, resume=live(first)))
    pool.quiesced(2, 3)
    loss_curve_agrees(pool, job)
    logged = {e.step: dict(e.logged) for e in pool.events(StepDone) if e.logged}
    assert sorted(logged) == [43, 46] and [one["epoch"] for one in logged.values()] == [0, 1]


def test_what_is_a_part_of_the_model_is_named_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "RUN"
    model = LoopModel(lambda: torch.nn.Linear(2, 2), CallLog(), lambda: name)
    with pytest.raises(ProgramError, match="state_dict was asked for before the first batch"):
        model.state_dict()
    module = torch.nn.Linear(2, 2)
    model.attach(module)
    name = "my run"  # which is known once the script has entered its loop
    assert model.module is model
    found = model.state_dict()
    assert found.keys() == module.state_dict().keys() and not capsys.readouterr().out
    assert found["weight"].data_ptr() == module.weight.data_ptr()
    monkeypatch.setattr("elastic.worker.loop.loop_model.is_part", lambda tensor: tensor.ndim == 2)
    model.state_dict()
    model.state_dict()
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "test_epochs.py, line " in said[0]
    assert "is this rank's part of 1 of 2 tensors" in said[0]
    assert "elastic checkpoint export 'my run' --to FOLDER" in said[0]
