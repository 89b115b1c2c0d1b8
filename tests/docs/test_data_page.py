"""docs/data.md, executed: its folder, its job, its program; packed documents cost what each of them costs alone."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import train_alone

from elastic.data.opening import Sets, dataset_of, validation_of
from elastic.data_spec import KINDS, PACKS, DataSpec
from elastic.program import load_program
from elastic.spec import JobSpec, load_job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def block(kind: str) -> str:
    found: list[str] = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return found[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELASTIC_CACHE", str(tmp_path / "cache"))
    subprocess.run(["bash", "-ec", block("bash")], cwd=tmp_path, check=True)
    (tmp_path / "job.yaml").write_text(block("yaml"))
    (tmp_path / "program.py").write_text(block("python"))
    return tmp_path


def test_the_job_of_the_page_trains(folder: Path) -> None:
    job: JobSpec = load_job(folder)
    program = load_program(folder / "program.py")
    dataset = dataset_of(program, job.plain())
    assert sorted(dataset[0]) == ["document", "input", "position", "target"]
    seen = [dataset.source(i)[0] for i in range(len(dataset))]
    assert seen.count(1) == 3 * seen.count(0)
    validation = validation_of(program, job.plain())
    assert isinstance(validation, Sets) and [*validation] == ["notes", "lines"]
    losses = train_alone(replace(program, dataset=lambda: dataset), {"seed": 0, "global_batch": job.global_batch}, job.steps)
    assert losses[-1] < 0.6 * losses[0]


def test_packed_documents_cost_what_each_costs_alone(folder: Path) -> None:
    """The sum of the losses over all samples: the mask keeps documents apart, and no target is lost."""
    program = load_program(folder / "program.py")
    torch.manual_seed(0)
    model = program.model()
    program.init(model)

    def total(pack: str, masked: bool) -> tuple[float, int]:
        source = {"jsonl": "lines.jsonl", "text": "body", "tokenizer": "bytes", "seq": 96, "pack": pack}
        dataset = dataset_of(program, {"folder": str(folder), "data": {"train": source}})
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


def test_the_tables_name_what_there_is() -> None:
    text = PAGE.read_text()
    first: dict[str, list[str]] = {}
    for table in re.split(r"\n\n", text):
        lines = [line for line in table.splitlines() if line.startswith("| `")]
        if lines:
            first[table.splitlines()[0]] = [line.split("`")[1] for line in lines]
    assert sorted(first["| key | what it is |"]) == sorted(KINDS)
    assert first["| `pack` | a sample | keys |"][1:] == list(PACKS)
    fields: dict[str, Any] = DataSpec.__pydantic_fields__
    assert all(f"`data.{name}`" in text or f"`data.{name}:" in text for name in fields)
    assert f"({fields['cache_gb'].default:.0f})" in text and f"`data.prefetch_mb` ({fields['prefetch_mb'].default:.0f})" in text
