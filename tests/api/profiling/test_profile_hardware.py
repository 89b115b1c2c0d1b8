"""`elastic profile JOB`: what it prints and writes, who reads it, and one line for what is
wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.places import PROGRAMS

from elastic.api import Options
from elastic.api.profiling import profile_hardware
from elastic.api.running import run
from elastic.api.running.program_file import job_given
from elastic.cli.command_line import main
from elastic.config.hardware import PLACE, path_of, read_hardware
from elastic.errors import SpecError
from elastic.worker.profile import measure as measuring
from elastic.worker.profile.measure import MeasureRequest

PROGRAM = f"""
from elastic.program import load_program
program = load_program({str(PROGRAMS / "tiny.py")!r})
"""
FOUND: dict[str, Any] = {
    "chip": "Some CPU", "cores": 2, "threads": 1, "torch": "2.13", "cpu_share": 0.5,
    "processes": [1, 2], "dtypes": ["float32"], "flop_per_s": {"float32": 4e10},
    "products": [{"rows": 4, "k": 8, "n": 16, "flop_per_s": 3e10}], "attention_flop_per_s": 2e10,
    "op_bytes_per_s": 6e9, "launch_s": 4e-6, "memory_bytes_per_s": 1e10,
    "copy_bytes_per_s": {"to_device": 7e9}, "storage_write_bytes_per_s": 1e9,
    "storage_read_bytes_per_s": 3e9, "crowded": [
        {"processes": 1, "flop_per_s": 3e10, "bytes_per_s": 6e9}, {"processes": 2,
        "flop_per_s": 2e10, "bytes_per_s": 3e9},
    ], "collectives": [{"op": "all_gather", "ranks": 2, "alpha_s": 1e-4, "beta_s_per_byte": 5e-10,
    "seconds_by_bytes": {}}],
}  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[MeasureRequest]:
    """A job in ./tiny, a machine that is measured in no time, and what it was asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ELASTIC_STORAGE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(PLACE, str(tmp_path / "hardware"))
    monkeypatch.setattr(measuring, "accelerator_here", lambda: "CPU")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "program.py").write_text(PROGRAM)
    (tmp_path / "tiny" / "job.yaml").write_text("steps: 4\nglobal_batch: 8\n")
    given: list[MeasureRequest] = []

    def measure(wanted: MeasureRequest) -> dict[str, Any]:
        given.append(wanted)
        return dict(FOUND)

    monkeypatch.setattr(measuring, "measure", measure)
    return given


def test_it_prints_what_it_found_and_leaves_it_where_a_run_looks(
    asked: list[MeasureRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "tiny"]) == 0
    out = capsys.readouterr().out
    path = Path("hardware/CPU.json").absolute()
    assert f"written to {path}" in out and "Some CPU, 2 cores, 1 threads per process" in out
    assert ["2", "20", "-", "3"] in [line.split() for line in out.splitlines()]
    assert "this one alone had 50% of a core" in out
    assert ["all_gather", "2", "100", "512"] in [line.split() for line in out.splitlines()]
    assert asked[0].samples == 8 and asked[0].seconds == 45 and asked[0].model.sample is not None
    assert len(asked[0].some) == 16 and asked[0].job is not None and asked[0].job.global_batch == 8
    assert asked[0].storage == str(Path("elastic_runs").absolute())
    started = run.JobRun(job_given("tiny", None, Options()), Options())._start(1, [])
    assert started.hardware == (read_hardware(path),)
    assert started.hardware[0].crowded == ((1, 3e10), (2, 2e10))
    about = json.loads(path.read_text())
    assert about["schema"] == 1 and about["host"] and about["at"] and about["found"] == FOUND
    assert about["accelerator_type"] == "CPU" == about["profile"]["accelerator_type"]


def test_json_and_another_place(
    asked: list[MeasureRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "profile",
        "tiny",
        "--json",
        "--out",
        "mine.json",
        "--seconds",
        "30",
        "--set",
        "precision=bfloat16",
    ]
    assert main([*words, "--storage", "kept"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["hardware"]
    assert (
        told["path"] == "mine.json"
        and told["found"]["launch_s"] == 4e-6
        and told["profile"]["reached"] == 1.0
    )
    assert read_hardware(Path("mine.json")).launch_s == 4e-6 and not path_of("CPU").exists()
    assert (asked[0].precision, asked[0].seconds, asked[0].storage) == (
        "bfloat16",
        15,
        str(Path("kept").absolute()),
    )


def test_no_profile_no_hardware(asked: list[MeasureRequest]) -> None:
    assert run.JobRun(job_given("tiny", None, Options()), Options())._start(1, []).hardware == ()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nowhere"], "elastic: profile: no run 'nowhere' here or in "),
        (["tiny", "--out", "."], "elastic: .: is a folder; give another --out FILE"),
        (
            ["tiny", "--out", "tiny/job.yaml/x"],
            "elastic: tiny/job.yaml/x: cannot be written (in tiny/job.yaml)",
        ),
        (["tiny", "--seconds", "5"], "elastic: --seconds 5: measuring takes at least 20 s"),
        (
            ["tiny", "--set", "precission=3"],
            "elastic: --set precission: unknown key 'precission'; did you mean",
        ),
    ],
)
def test_one_line_for_what_is_wrong(
    asked: list[MeasureRequest], capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert main(["profile", *words]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line) and err.count("\n") == 1 and not out and not asked


def test_interrupted_it_writes_nothing(
    asked: list[MeasureRequest], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(wanted: MeasureRequest) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "measure", interrupted)
    assert main(["profile", "tiny"]) == 3
    assert capsys.readouterr().err == "elastic: interrupted\n"
    assert sorted(os.listdir()) == ["tiny"]


def test_a_bad_file_stops_a_run_before_it_begins(asked: list[MeasureRequest]) -> None:
    path_of("CPU").parent.mkdir()
    path_of("CPU").write_text("{}")
    with pytest.raises(SpecError, match="not a hardware profile"):
        run.JobRun(job_given("tiny", None, Options()), Options())._start(1, [])


@pytest.mark.parametrize(
    ("pools", "kind"),
    [("", "GPU"), ("pools: [{name: a, accelerator_type: A100, max_nodes: 1}]\n", "A100")],
)
def test_a_file_is_named_as_the_pools_name_their_gpus(
    asked: list[MeasureRequest], monkeypatch: pytest.MonkeyPatch, pools: str, kind: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with open("tiny/job.yaml", "a") as job:
        job.write(pools)
    spec = job_given("tiny", None, Options())
    assert profile_hardware._kind(spec, "H100") == kind
    assert profile_hardware._kind(spec, "CPU") == "CPU"
