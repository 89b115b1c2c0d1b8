"""`elastic certify JOB` and `elastic plan JOB --check`: which layouts compute what the job's own
program does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.docs.pages import block

from elastic.certify.checks.job_check import _row
from elastic.cli import command_line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job of docs/program.md; answers are found anew."""
    monkeypatch.setenv("ELASTIC_LAYOUTS", str(tmp_path / "kept"))
    (tmp_path / "program.py").write_text(block("program.md", "python"))
    (tmp_path / "job.yaml").write_text(block("program.md", "yaml"))
    return tmp_path


@pytest.mark.whole  # api/running/test_layout_question.py has the answers
def test_certify_says_it_of_each_axis_and_fails_where_the_job_names_one_that_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["certify", str(folder), "--json"]) == 0
    rows = {row["axis"]: row for row in json.loads(capsys.readouterr().out)["axes"]}
    assert {axis: row["verdict"] for axis, row in rows.items()} == {
        "dp": "pass",
        "tp": "pass",
        "cp": "not run",
        "pp": "pass",
    }
    assert "elastic.attention" in rows["cp"]["why"]
    program = folder / "program.py"
    outside = program.read_text().replace("return x + self.down", "return self.down")
    program.write_text(outside.replace("x = layer(x)", "x = x + layer(x)"))
    (folder / "job.yaml").write_text(block("program.md", "yaml") + "layout: pp=2\n")
    assert command_line.main(["certify", str(folder)]) == 1
    assert (
        "between layers.0 and layers.1 `forward` adds to the hidden state"
        in capsys.readouterr().out
    )


LOOP = """
import torch, elastic
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with elastic.loop(model=model, optimizer=optimizer, dataset=torch.ones(64, 8), steps=3,
                  global_batch=8, TP) as run:
    for x in run:
        run.backward(run.model(x).square().sum())
        run.step()
"""


@pytest.fixture
def loop_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTIC_LAYOUTS", str(tmp_path / "kept"))
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 2, "max_nodes": 1}]
    (tmp_path / "job.yaml").write_text(json.dumps({"script": "train.py", "pools": pools}))
    return tmp_path


@pytest.mark.e2e
def test_certify_says_it_of_a_loop(loop_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (loop_folder / "train.py").write_text(LOOP.replace("TP", "tp={'0': 'colwise', '2': 'rowwise'}"))
    assert command_line.main(["certify", str(loop_folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["axes"]
    assert [(row["axis"], row["verdict"]) for row in rows] == [("dp", "pass"), ("tp", "pass")]
    assert rows[0]["why"] == "the body of its loop trains on samples together as on each alone"


def test_one_worker_has_nothing_to_compare(
    loop_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop_folder / "train.py").write_text(LOOP.replace(", TP", ""))
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 1, "max_nodes": 1}]
    (loop_folder / "job.yaml").write_text(json.dumps({"script": "train.py", "pools": pools}))
    assert command_line.main(["certify", str(loop_folder)]) == 2
    assert "there is nothing to compare: its pools give one worker" in capsys.readouterr().err


# that an answer is kept: tests/api/running/test_layout_question.py; the program: test_pages_in_layouts
@pytest.mark.whole
def test_plan_compares_values_where_it_is_asked_to_and_keeps_the_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert command_line.main(["plan", str(folder), "--check", "--gpus", "H100:4"]) == 0
        assert (
            "dp, tp, pp: loss and gradients of a small copy match those of one process"
            in capsys.readouterr().out
        )
    assert len([*(folder / "kept").iterdir()]) == 1
    assert command_line.main(["plan", str(folder), "--gpus", "H100:4"]) == 0
    assert "small copy" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("axis", "notes", "why"),
    [
        (
            "cp",
            ["cp was compared with 664 of 1024 positions only"],
            "cp was compared with 664 of 1024 positions only",
        ),
        (
            "tp",
            ["tp was not compared: 40 s are spent", "cp was too"],
            "tp was not compared: 40 s are spent",
        ),
        ("tp", [], "there is no Program.tp"),
    ],
)
def test_what_was_not_compared_says_why(axis: str, notes: list[str], why: str) -> None:
    found: dict[str, Any] = {
        "equal": {},
        "skipped": "",
        "structure": {f"no_{axis}": "", "notes": notes},
    }
    assert (_row(axis, found, True).verdict, _row(axis, found, True).why) == ("not run", why)
