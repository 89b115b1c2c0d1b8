"""What a run asks of the layouts beforehand, how it is kept, and what becomes of an answer that
does not come."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray.cloudpickle
import torch
from support.places import FOREIGN, PROGRAMS
from support.waiting import until
from torch import nn

from elastic.api.running.layout_question import PLACE, LayoutCheck, asked_of, check_open, checked
from elastic.config.job import JobSpec, job_of
from elastic.errors import SpecError
from elastic.program import load_program
from elastic.types import Pool
from elastic.worker.equivalence.layout_check import Verdict
from elastic.worker.equivalence.structure import Structure
from elastic.worker.loop.loop import loop as own_loop
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.program.model_profile import trace

CUT = {"0": "colwise", "2": "rowwise"}
POOLS = (Pool("p", gpus_per_node=2, max_nodes=2),)
LATER = [{"from_step": 2, "layout": "pp=2,dp_shard=2"}, {"from_step": 3, "layout": {2: "tp=2"}}]


def spec(program: Path, **more: Any) -> JobSpec:
    return job_of({"steps": 4, "global_batch": 8, **more}, program)


def asked(program: Path, **more: Any) -> dict[str, Any]:
    found = asked_of(spec(program, **more), POOLS)
    assert found is not None
    return found


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a small program that takes its width from a file beside it, and an empty place for
    answers."""
    monkeypatch.setenv(PLACE, str(tmp_path / "kept"))
    (tmp_path / "width.py").write_text("WIDTH = 32\n")
    text = (FOREIGN / "residual_outside.py").read_text()
    here = tmp_path / "program.py"
    (tmp_path / "sizes.json").write_text("{}")
    first = "import sys, json; sys.path.insert(0, __file__.rpartition('/')[0])\nimport width\n"
    here.write_text(f"{first}json.load(open(__file__.replace('program.py', 'sizes.json')))\n{text}")
    return here


@pytest.mark.parametrize(
    ("more", "axes", "tps"),
    [
        ({}, ["dp", "tp", "cp", "pp", "ep"], [2]),
        ({"layout": "dp_shard=4"}, ["dp"], []),
        ({"layout": {4: "pp=2,dp_shard=2", 2: "tp=2"}}, ["dp", "tp", "pp"], [2]),
        ({"layout": "auto,pp=1"}, ["dp", "tp", "cp", "ep"], [2]),
        ({"layout": "dp_shard=4,ep=2"}, ["dp", "ep"], []),
        ({"layout": "dp_shard=4", "phases": LATER}, ["dp", "tp", "pp"], [2]),
        ({"compile": True}, ["dp", "tp", "pp"], [2]),
        ({"microbatch_tokens": 64}, ["dp", "tp", "ep"], [2]),
    ],
)
def test_only_what_the_run_may_enter_is_asked_for(
    more: dict[str, Any], axes: list[str], tps: list[int]
) -> None:
    found = asked(FOREIGN / "residual_outside.py", **more)
    assert (found["axes"], found["tps"]) == (axes, tps)


def loop(tp: dict[str, str], by: float = 0.0) -> own_loop:
    """A model that tp computes rightly where its parts are shifted by nothing."""
    model = nn.Sequential(nn.Linear(4, 8), Shift(by), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return own_loop(model=model, optimizer=optimizer, dataset=[torch.ones(4)] * 8, tp=tp)


def program_of(tp: dict[str, str]) -> LoopProgram:
    return loop(tp)._program()


class Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by * x.sum(-1, keepdim=True)


def test_of_a_script_its_body_and_its_tp_are_asked_for() -> None:
    script = spec(FOREIGN / "residual_outside.py", script="train.py")
    found = asked_of(script, POOLS, program_of(CUT))
    assert found is not None and found["model_bytes"] == 49 * 4
    each: list[tuple[str, dict[str, str], list[str]]] = [
        ("auto", CUT, ["dp", "tp"]), ("auto", {}, ["dp"]), ("dp_shard=4", CUT, ["dp"]),
        ("auto,tp=1", CUT, ["dp"]), ("tp=2", CUT, ["tp"]),
    ]  # fmt: skip
    for layout, tp, axes in each:
        one = spec(FOREIGN / "residual_outside.py", script="train.py", layout=layout)
        found = asked_of(one, POOLS, program_of(tp))
        assert found is not None and found["axes"] == axes
    assert asked_of(script, POOLS) is None  # it enters no loop


@pytest.mark.e2e
@pytest.mark.parametrize("by", [0.0, 0.1])
def test_a_train_function_is_compared_as_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "kept"))

    def train() -> None:
        run = loop(CUT, by).start()
        for x in run:
            run.backward(run.model(x).sum())

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    data = ray.cloudpickle.dumps(train)
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    job = spec(Path(__file__), script=__file__)
    question, program = asked_of(job, POOLS, program_of(CUT)), program_of(CUT)
    found = LayoutCheck(question, train_function=data).result()
    assert found is not None
    model = checked(trace(program), found, program)
    if by:
        assert "2 is the first to give something else" in model.no_tp and model.tp_limit == 1
    else:
        assert not model.no_tp and model.proven == ("tp",), model
        assert model.notes[0].startswith("tp: outputs of its first call and gradients of a small")
    again = LayoutCheck(question, train_function=data)
    other = LayoutCheck(question, train_function=data + b" ")
    other.close()
    assert again.known == found and other.known is None


def test_one_worker_has_nothing_to_be_compared() -> None:
    one = (Pool("p", gpus_per_node=1, max_nodes=1),)
    assert asked_of(spec(FOREIGN / "residual_outside.py"), one) is None
    assert LayoutCheck(None).result() is None


@pytest.mark.e2e
def test_an_answer_is_kept_until_a_file_of_the_program_changes_or_it_is_broken(
    program: Path, tmp_path: Path
) -> None:
    question = asked(program, layout="dp_shard=2")
    first = LayoutCheck(question)
    try:
        folder = Path(first._folder.name) if first._folder is not None else None
        assert folder is not None and folder.is_dir()
        found = first.result()
        assert not folder.exists(), "it lives as long as the question"
    finally:
        first.close()
    assert found is not None and set(found.equal or {}) == {"dp"}, found
    assert set(found.files or {}) == {"program.py", "width.py", "sizes.json"}
    # nobody is retried
    assert (found.packages or {})["torch"] and LayoutCheck(question).known == found
    for name in ("width.py", "sizes.json"):
        before = (program.parent / name).read_text()
        (program.parent / name).write_text(before + "\n")
        again = LayoutCheck(question)
        again.close()
        assert again.known is None
        (program.parent / name).write_text(before)
    assert LayoutCheck(question).known == found
    (kept,) = (tmp_path / "kept").glob("*.json")
    for text in ("", "{", "[]", json.dumps({"structure": {}, "more": 1})):
        kept.write_text(text)
        check = LayoutCheck(question)
        check.close()
        assert check.known is None


@pytest.mark.e2e
def test_what_may_have_been_the_machine_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path / "kept"))
    text = (FOREIGN / "residual_outside.py").read_text()
    (tmp_path / "program.py").write_text(
        text.replace("x = x + layer(x)", "x = x + layer(x) if len(x) != 2 else exit(1)")
    )
    question = asked(tmp_path / "program.py", layout="dp_shard=2")
    check = LayoutCheck(question)
    try:
        found = check.result()
    finally:
        check.close()
    assert found is not None and not found.steady and "dp" not in (found.equal or {}), found
    assert not list((tmp_path / "kept").glob("*.json"))


def test_closing_it_early_leaves_nothing(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports what this process could."""
    monkeypatch.setattr(sys, "path", [*sys.path, "/called/in"])
    check = LayoutCheck(asked(program))
    assert check._process is not None and check._folder is not None
    pid, folder = check._process.pid, Path(check._folder.name)
    until(
        lambda: "elastic.worker.equivalence.layout_check" in psutil.Process(pid).cmdline(),
        "the process that compares",
    )
    folders = psutil.Process(pid).environ()["PYTHONPATH"].split(":")
    assert folders[0] == str(program.parent) and folders[-1] == "/called/in"
    check.close()
    assert not psutil.pid_exists(pid) and not folder.exists()
    check.close()


@pytest.mark.e2e
def test_a_loss_that_is_a_mean_is_wrong_input_there_too(program: Path, tmp_path: Path) -> None:
    """On a cluster the driver does not open the dataset itself."""
    program.write_text(
        program.read_text()
        + "\nfrom dataclasses import replace"
        + "\nprogram = replace(program, loss=lambda output, batch: output.float().mean())\n"
    )
    check = LayoutCheck(asked(program))
    try:
        with pytest.raises(SpecError, match=r"\.py: Program.loss returned .* a mean, it seems"):
            check.result()
    finally:
        check.close()
    assert not list((tmp_path / "kept").glob("*.json"))


@pytest.mark.e2e
def test_where_nothing_is_found_out_blocks_are_not_spread(program: Path) -> None:
    program.write_text("import time; time.sleep(60)\n")
    check = LayoutCheck(asked(program))
    try:
        found = check.result(0.1)
    finally:
        check.close()
    assert found is not None and not found.followed and "longer than" in found.skipped
    foreign = load_program(FOREIGN / "prenorm_rope.py")
    model = checked(trace(foreign), found, foreign)
    assert not model.pipeline and "could not be followed here (it took longer than" in model.no_pp
    assert "trusted_axes: [pp]" in model.no_pp and "not compared before the start" in model.notes[0]
    trusting = Verdict(skipped="no", followed=False, trusted=("pp",))
    assert checked(trace(foreign), trusting, foreign).pipeline


def test_a_run_on_one_of_many_workers_is_refused() -> None:
    foreign = load_program(FOREIGN / "batchnorm.py")
    model = checked(trace(foreign), Verdict(Structure(no_dp="d", no_pp="p")), foreign)
    with pytest.raises(
        SpecError, match=r"no data-parallel ranks: d; or one worker: layout: dp_shard=1"
    ):
        check_open(spec(FOREIGN / "batchnorm.py"), model)
    check_open(spec(FOREIGN / "batchnorm.py", layout="dp_shard=1"), model)


def test_what_stands_beside_a_program_is_imported_before_what_is_where_elastic_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python program.py` would: `elastic` itself has no folder on the path, `python -m elastic`
    the one that it is called in."""
    name = "beside_a_program"
    for folder, epochs in ((tmp_path / "job", 2), (tmp_path / "called_in", 3)):
        folder.mkdir()
        (folder / f"{name}.py").write_text(f"from tiny import program as found\nof = {epochs}\n")
    (tmp_path / "job" / "program.py").write_text(
        f"from {name} import found as program, of\nassert of == 2\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "called_in"), str(PROGRAMS), *sys.path])
    load_program(tmp_path / "job" / "program.py")
    load_program(tmp_path / "job" / "program.py")
    assert sys.path[0] == str(tmp_path / "job") and sys.path.count(sys.path[0]) == 1
    monkeypatch.delitem(sys.modules, name)
