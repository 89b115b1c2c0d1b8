"""docs/data.md, executed: its folder, its job, its program; packed documents cost what each of them
costs alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from support.docs.pages import block, text_of
from support.places import ROOT
from support.reference import train_alone

from elastic.config.data_section import KINDS, DataSpec, SourceSpec
from elastic.config.job import JobSpec, load_job
from elastic.data.budget import budget_of, pad_share
from elastic.data.open_datasets import Sets, dataset_of, validation_of
from elastic.data.order import sample_ids
from elastic.program import load_program
from elastic.types import Job

PAGE = text_of("data.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTIC_CACHE", str(tmp_path / "cache"))
    subprocess.run(["bash", "-ec", block("data.md", "shell", 1)], cwd=tmp_path, check=True)
    (tmp_path / "job.yaml").write_text(block("data.md", "yaml"))
    (tmp_path / "program.py").write_text(block("data.md", "python"))
    return tmp_path


def test_the_job_of_the_page_trains(folder: Path) -> None:
    job: JobSpec = load_job(folder)
    program = load_program(folder / "program.py")
    dataset = dataset_of(program, job.job())
    assert sorted(dataset[0]) == ["document", "input", "position", "target"]
    seen = [dataset.source(i)[0] for i in range(len(dataset))]
    assert seen.count(1) == 3 * seen.count(0)
    validation = validation_of(program, job.job())
    assert isinstance(validation, Sets) and [*validation] == ["notes", "lines"]
    losses = train_alone(
        replace(program, dataset=lambda: dataset),
        {"seed": 0, "global_batch": job.global_batch},
        job.steps,
    )
    assert losses[-1] < 0.6 * losses[0]


def test_packed_documents_cost_what_each_costs_alone(folder: Path) -> None:
    """The sum of the losses over all samples: the mask keeps documents apart, and no target is
    lost."""
    program = load_program(folder / "program.py")
    torch.manual_seed(0)
    model = program.model()
    program.init(model)

    def total(pack: str, masked: bool) -> tuple[float, int]:
        source = {
            "jsonl": "lines.jsonl",
            "text": "body",
            "tokenizer": "bytes",
            "seq": 96,
            "pack": pack,
        }
        dataset = dataset_of(
            program, Job.from_plain({"folder": str(folder), "data": {"train": source}})
        )
        loss, n_targets = 0.0, 0
        with torch.no_grad():
            for i in range(len(dataset)):
                batch = {key: torch.as_tensor(value)[None] for key, value in dataset[i].items()}
                more = program.keywords(batch) if masked else {}
                loss += float(program.loss(model(batch["input"], **more), batch))
                n_targets += int((batch["target"] != -100).sum())
        return loss, n_targets

    alone, packed, unmasked = total("pad", False), total("whole", True), total("whole", False)
    assert alone[1] == packed[1] == unmasked[1]
    assert packed[0] == pytest.approx(alone[0], rel=2e-6)
    assert abs(unmasked[0] - alone[0]) > 2e-5 * alone[0]


def test_the_job_that_the_library_reads(folder: Path) -> None:
    pytest.importorskip("datasets")
    (folder / "job.yaml").write_text(block("data.md", "yaml", 1))
    job, program = load_job(folder).job(), load_program(folder / "program.py")
    text = b"".join(f"line {i} of ninety lines\0".encode() for i in range(1, 91))
    for found, part in (
        (dataset_of(program, job), text[: text.index(b"line 82")]),
        (validation_of(program, job), text[text.index(b"line 82") :]),
    ):
        ids = [i for n in range(len(found)) for i in found[n]["input"].tolist()]
        assert bytes(ids) == part[: len(ids)] and len(part) - len(ids) <= 97


def unequal(folder: Path) -> JobSpec:
    """The job of the page on samples of unequal length."""
    subprocess.run(["bash", "-ec", block("data.md", "shell", 2)], cwd=folder, check=True)
    (folder / "job.yaml").write_text(block("data.md", "yaml", 2))
    program = "".join(
        line for line in block("data.md", "python").splitlines(True) if "keywords=" not in line
    )
    (folder / "program.py").write_text(program.replace("max_seq=96", "max_seq=256"))
    return load_job(folder)


def test_the_cut_of_unequal_samples_is_what_the_page_says(folder: Path) -> None:
    job = unequal(folder).plain()
    dataset = dataset_of(load_program(folder / "program.py"), Job.from_plain(job))
    lengths = [dataset.length(i) for i in range(len(dataset))]
    assert (len(lengths), min(lengths), max(lengths)) == (200, 9, 256)
    assert all(len(dataset[i]["input"]) == lengths[i] for i in range(200))
    budget = budget_of(Job.from_plain(job), dataset)
    assert budget is not None
    shares = []
    for step in range(job["steps"]):
        ids = sample_ids(200, job["global_batch"], 0, step=step)
        n_tokens = sum(lengths[i] for i in ids)
        cut = budget.cut(ids, (8, 8))
        shares.append(pad_share(cut, n_tokens))
        loads = [sum(lengths[i] for part in rank for i in part.ids) for rank in cut]
        assert max(loads) <= n_tokens / 2 + 256
    said = re.search(
        r"on two ranks (\d+) % of the places are filling; with `pack: pad` it would be (\d+) %",
        PAGE,
    )
    assert said is not None
    assert [round(100 * x) for x in (sum(shares) / len(shares), 1 - sum(lengths) / 200 / 256)] == [
        int(n) for n in said.groups()
    ]


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_the_job_with_unequal_samples_runs(folder: Path) -> None:
    unequal(folder)
    done = subprocess.run(
        [sys.executable, "-m", "elastic.worker", ".", "--set", f"storage={folder}/runs", "--json"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert (last["outcome"], last["steps"]) == ("succeeded", 20) and last["final_loss"] < 4


def test_the_tables_name_what_there_is() -> None:
    text = PAGE
    first: dict[str, list[str]] = {}
    for table in re.split(r"\n\n", text):
        lines = [line for line in table.splitlines() if line.startswith("| `")]
        if lines:
            first[table.splitlines()[0]] = [line.split("`")[1] for line in lines]
    assert sorted(first["| key | what it is |"]) == sorted(KINDS)
    fields: dict[str, Any] = DataSpec.__pydantic_fields__
    pack: Any = SourceSpec.__pydantic_fields__["pack"].annotation
    packs = get_args(get_args(pack)[0])  # of Literal[...] | None
    assert packs and first["| `pack` | a sample | keys |"][1:] == list(packs)
    assert all(f"`data.{name}`" in text or f"`data.{name}:" in text for name in fields)
    assert (
        f"({fields['cache_gb'].default:.0f})" in text
        and f"`data.prefetch_mb` ({fields['prefetch_mb'].default:.0f})" in text
    )
