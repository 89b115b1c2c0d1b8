"""The Programs of README.md and of docs/ in the layouts that their pages promise: loss and
gradients are those of one process.

All of them are asked of one process, as a run asks before it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.docs.pages import block, blocks
from support.places import ROOT

from elastic.config.job import load_job

MOST_S = 300.0
JOB = "steps: 4\nglobal_batch: 12\n"
# What the names of README.md stand for.
NAMES = """
import torch
from elastic.models import llama

CONFIG = llama.LlamaConfig(vocab_size=64, hidden=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_hidden=64, max_seq=16)


class MyTransformer(llama.Llama):
    def __init__(self):
        super().__init__(CONFIG)

    def reset_parameters(self):
        llama.init_weights(self)


class MyDataset:
    def __init__(self, part):
        self.first = {"train": 0, "validation": 1000}[part]

    def __len__(self):
        return 96

    def __getitem__(self, index):
        ids = (self.first + index * 37 + torch.arange(17) * 3) % 64
        return {"input": ids[:-1], "target": ids[1:]}


def summed_cross_entropy(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
"""


def readme(folder: Path) -> None:
    (folder / "program.py").write_text(NAMES + block("README.md", "python"))


def plan_of_layouts(folder: Path) -> None:
    """The plan for tp that layouts.md shows, for the model that README.md means."""
    own = (
        f"\nfrom dataclasses import replace\n{block('layouts.md', 'python')}\nprogram = "
        "replace(program, tp=tp)\n"
    )
    (folder / "program.py").write_text(NAMES + block("README.md", "python") + own)


def data(folder: Path) -> None:
    subprocess.run(["bash", "-ec", blocks("data.md", "shell")[1].text], cwd=folder, check=True)
    (folder / "job.yaml").write_text(block("data.md", "yaml"))
    (folder / "program.py").write_text(block("data.md", "python"))


def unequal(folder: Path) -> None:
    """data.md: samples of unequal length."""
    subprocess.run(["bash", "-ec", blocks("data.md", "shell")[2].text], cwd=folder, check=True)
    (folder / "job.yaml").write_text(block("data.md", "yaml", 2))
    own = "".join(
        line for line in block("data.md", "python").splitlines(True) if "keywords=" not in line
    )
    (folder / "program.py").write_text(own.replace("max_seq=96", "max_seq=256"))


def adapters(folder: Path) -> None:
    """models.md: adapters on the model of huggingface.md."""
    own = block("models.md", "python", 1)
    (folder / "program.py").write_text(
        f"{block('huggingface.md', 'python', 2)}\nbase_program = program\n{own}"
    )


def page(name: str, which: int = 0) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        (folder / "program.py").write_text(block(name, "python", which))

    return written


ALL = ("dp", "tp", "cp", "pp")
PROMISED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "README.md": (readme, ALL),
    "program.md": (page("program.md"), ("dp", "tp", "pp")),
    "huggingface.md": (page("huggingface.md", 2), ALL),
    "layouts.md": (page("layouts.md", 1), ("dp", "cp", "pp")),
    "layouts.md, tp": (plan_of_layouts, ALL),
    "data.md": (data, ALL),
    "data.md, unequal": (unequal, ("dp", "tp")),
    "models.md, adapters": (adapters, ALL),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    asked = []
    for written, axes in PROMISED.values():
        folder = tmp_path_factory.mktemp("page")
        (folder / "job.yaml").write_text(JOB)
        written(folder)
        asked.append(
            {"job": load_job(folder).plain() | {"folder": str(folder), "drill": []}, "axes": axes}
        )
    out = tmp_path_factory.mktemp("layouts") / "found"
    done = subprocess.run(
        [sys.executable, "-m", "elastic.worker.equivalence.layout_check", str(out)],
        input=json.dumps(asked), text=True,
            timeout=MOST_S,
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1",
        "ELASTIC_CACHE": str(out.parent / "cache")}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(PROMISED, map(json.loads, out.read_text().splitlines()), strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("name", PROMISED)
def test_the_program_of_the_page_computes_the_same_in_its_layouts(
    name: str, verdicts: dict[str, dict[str, Any]]
) -> None:
    found = verdicts[name]
    assert "error" not in found and found["equal"] is not None, found
    closed = {axis: why for axis in PROMISED[name][1] if (why := found["structure"][f"no_{axis}"])}
    assert closed == {} and set(found["equal"]) == set(PROMISED[name][1]), found
