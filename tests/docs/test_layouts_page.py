"""docs/layouts.md: its program trains under cp as on one rank, its job is one, its tables name what there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.spec import load_job
from elastic.types import AXES, LAYOUT_OPTIONS, parse_layout

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "layouts.md").read_text()


def block(kind: str, which: int = 0) -> str:
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found[which]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(block("yaml"))
    (tmp_path / "program.py").write_text(block("python", 1))
    return tmp_path


def test_the_tables_name_every_axis_and_schedule(folder: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(rows) - {"schedule"} == {*AXES, *LAYOUT_OPTIONS["schedule"]}
    assert parse_layout("pp=2,dp_shard=2,schedule=gpipe").schedule == "gpipe"
    assert load_job(folder).layouts() == ["dp_shard=2,cp=2", "dp_shard=3", "cp=2"]


@pytest.mark.slow
def test_the_command_has_the_losses_of_one_rank(folder: Path) -> None:
    command = block("sh").split()
    assert command[0] == "torchrun"
    cut = trained(folder, command[1:])
    assert cut["layout"] == "cp=2"
    alone = trained(
        folder, ["--nproc-per-node", "1", *command[3:5], ".", "--layout", "dp_shard=1", "--json", "--run-name", "alone"]
    )
    assert cut["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-4)
    assert cut["final_loss"] < 3.5


def trained(folder: Path, words: list[str]) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
