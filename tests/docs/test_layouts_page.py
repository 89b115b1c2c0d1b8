"""docs/layouts.md: its program trains under cp as on one rank, its job is one, its tables name what
there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.docs.pages import block, text_of
from support.places import ROOT
from support.reference import train_alone

from elastic.config.job import load_job
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.program import load_program
from elastic.types import (
    LAYOUT_OPTIONS,
    NAMED_AXES,
    Job,
    ModelProfile,
    Node,
    OptimizerSpec,
    TensorSpec,
    WorkerId,
    parse_layout,
)

PAGE = text_of("layouts.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(block("layouts.md", "yaml"))
    (tmp_path / "program.py").write_text(block("layouts.md", "python", 1))
    return tmp_path


def test_the_tables_name_every_axis_and_schedule(folder: Path) -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(rows) - {"schedule"} == {*NAMED_AXES, *LAYOUT_OPTIONS["schedule"]}
    assert parse_layout("pp=2,dp_shard=2,schedule=gpipe").schedule == "gpipe"
    assert load_job(folder).layouts() == ["dp_shard=2,cp=2", "dp_shard=3", "cp=2"]


GIVEN: list[tuple[dict[str, Any], tuple[int, ...], tuple[float, ...], dict[str, str]]] = [
    ({}, (1, 1, 1), (1, 1, 0.5), {}),
    ({}, (4, 1), (1, 1), {}),
    ({"layout": "pp=2"}, (1, 1), (1, 3), {}),
    ({"global_batch": 8}, (1, 1, 1, 1), (1, 1, 1, 0.02), {}),
    ({}, (4, 4, 4), (1, 1, 1), {"n0": "a", "n1": "b", "n2": "a"}),
]


def test_unequal_gpus_get_what_the_table_says() -> None:
    model = ModelProfile(
        8,
        1_000_000,
        (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
        (OptimizerSpec(("m", "v")),),
        0.0,
        4,
    )
    rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\| \d.*$", PAGE, re.MULTILINE)]
    assert len(rows) == len(GIVEN)
    for (_, layout, samples, layers), (job, gpus, speeds, zones) in zip(rows, GIVEN, strict=True):
        nodes = [Node(f"n{i}", "p", n) for i, n in enumerate(gpus)]
        rates = {
            WorkerId(n.node_id, k): speed for n, speed in zip(nodes, speeds) for k in range(n.gpus)
        }
        found = plan_layout(
            model,
            Job.from_plain({"global_batch": 48, "layout": "auto", **job}),
            nodes,
            limits=LayoutLimits(rates=rates, zones=zones),
        )
        told = (
            [f"{found.samples[0]} each"]
            if len(set(found.samples)) == 1 < len(found.samples)
            else map(str, found.samples)
        )
        assert (str(found.layout), ", ".join(told), ", ".join(map(str, found.layers))) == (
            layout,
            samples,
            layers,
        )
        assert not found.rejected or f"not {found.rejected[0]}" in PAGE


# its program in each layout: test_pages_in_layouts.py; such a command:
# tests/worker/standalone/test_standalone_run.py
@pytest.mark.whole
def test_the_command_has_the_losses_of_one_rank(folder: Path) -> None:
    command = block("layouts.md", "shell").split()
    assert command[0] == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command[1:]],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cut = json.loads(done.stdout.strip().splitlines()[-1])
    job = load_job(folder)
    alone = train_alone(load_program(folder / "program.py"), job.plain(), job.steps)
    assert (cut["layout"], cut["steps"]) == ("cp=2", len(alone))
    assert cut["final_loss"] == pytest.approx(alone[-1], rel=1e-4)
    assert cut["final_loss"] < 3.5
