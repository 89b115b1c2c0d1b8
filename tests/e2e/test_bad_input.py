"""Wrong input: one line that says where and what, exit code 2, nothing written over."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.e2e.shell import Shell
from support.places import PROGRAMS
from support.storage.faulty_proxy import Fault, FaultyProxy
from support.storage.small_disk import mounted

from elastic.ledger.journal import Journal
from elastic.storage.s3 import S3Storage
from elastic.types import DriverStarted, ModelProfile, TensorSpec

pytestmark = pytest.mark.slow

CORPUS = """
import elastic
from elastic.data.sources.text_folder import TextFolder
from pathlib import Path
TINY = {tiny!r}
exec(compile(Path(TINY).read_text(), TINY, "exec"))
import dataclasses
program = dataclasses.replace(program, dataset=lambda: TextFolder("/nowhere/corpus", 16, "train"))
"""


def refused(shell: Shell, said: str, *words: str) -> str:
    before = shell.files()
    code, out, err = shell.here(*words)
    assert code == 2, err
    # a slow machine is told what it takes long over
    assert all(line.startswith("start: ") for line in out.splitlines()), out
    assert err.count("\n") == 1, err
    assert said in err
    assert shell.files() == before
    return err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"global_bach": 8},
            "tiny/job.yaml: unknown key 'global_bach'; did you mean 'global_batch'?",
        ),
        (
            {"layout": "dp_shard=8"},
            "layout 'dp_shard=8' needs 8 workers; the pools give at most 2 (spot 2 x 1)",
        ),
        ({"program": "none.py"}, "tiny/none.py: no such file"),
        ({"steps": None}, "tiny/job.yaml: key 'steps' is missing"),
        ({"storage": "/proc/nope"}, "storage /proc/nope/"),
        ({"storage": "/etc/hostname"}, "cannot be written (File exists: /etc/hostname)"),
        ({"storage": "s3://Bucket_/runs"}, "no name of a bucket; use s3://bucket/prefix"),
    ],
)
def test_job(shell: Shell, changes: dict[str, Any], said: str) -> None:
    refused(shell, said, "run", shell.job(**changes))


@pytest.mark.parametrize("full", [True, False])
def test_storage_that_is_full_or_read_only(shell: Shell, full: bool) -> None:
    with mounted(shell.root / "disk", "64k") as disk:
        if full:
            with pytest.raises(OSError, match="No space left"):
                (disk / "waste").write_bytes(b"x" * (1 << 20))
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        said = "make room there" if full else "(Read-only file system: "
        refused(shell, said, "run", shell.job(storage=str(disk)))


def test_a_bucket_that_does_not_exist(shell: Shell, proxy: FaultyProxy) -> None:
    said = "s3://no-such-bucket/runs/x/"
    why = "there is no such bucket; create it, or correct the name"
    err = refused(
        shell, why, "run", shell.job(storage="s3://no-such-bucket/runs"), "--run-name", "x"
    )
    assert said in err


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("InvalidAccessKeyId", "the server does not know this access key"),
        ("SignatureDoesNotMatch", "the secret key does not fit the access key"),
        ("AccessDenied", "the credentials may not do this; allow s3:ListBucket"),
    ],
)
def test_credentials_that_object_storage_refuses(
    shell: Shell, s3: S3Storage, proxy: FaultyProxy, code: str, said: str
) -> None:
    proxy.faults.append(Fault("error", times=1 << 30, status=403, code=code))
    err = refused(shell, said, "run", shell.job(storage=s3.uri), "--run-name", "x")
    assert f"({code})" in err and "a-secret-of-tests" not in err


def test_a_journal_that_cannot_be_written(shell: Shell) -> None:
    (shell.root / "elastic_runs" / "one" / "journal.jsonl").mkdir(parents=True)
    refused(
        shell,
        "elastic_runs/one cannot be written (Is a dir",
        "run",
        shell.job(),
        "--run-name",
        "one",
    )


def test_missing_folder_and_drill(shell: Shell) -> None:
    refused(shell, "nowhere: no such folder", "run", "nowhere")
    refused(shell, "drill.yaml: no such file", "run", shell.job(), "--drill", "drill.yaml")


def test_program_that_raises(shell: Shell) -> None:
    name = shell.job(program="program.py")
    (shell.root / name / "program.py").write_text(
        "import elastic\nraise RuntimeError('not today')\n"
    )
    refused(shell, "importing it raised RuntimeError: not today (line ", "run", name)
    (shell.root / name / "program.py").write_text("program = 3\n")
    refused(shell, "it must define `program = elastic.Program(...)`; found int", "run", name)


@pytest.mark.e2e
def test_unreadable_corpus(shell: Shell) -> None:
    name = shell.job(program="program.py")
    tiny = PROGRAMS / "tiny.py"
    (shell.root / name / "program.py").write_text(CORPUS.format(tiny=str(tiny)))
    refused(shell, "/nowhere/corpus", "run", name)


@pytest.mark.e2e
def test_run_of_another_model(shell: Shell) -> None:
    folder = shell.root / "elastic_runs" / "mine"
    model = ModelProfile(4, 4, (TensorSpec("another.weight", (2, 2), "float32"),))
    start = DriverStarted("mine", 1, {"steps": 12, "global_batch": 8, "seed": 1}, (), model)
    journal = Journal(folder / "journal.jsonl", 1)
    journal.append(0.0, [(0.0, start)])
    journal.close()
    said = "run 'mine' was started with another model: another.weight was [2, 2]"
    refused(shell, said, "run", shell.job(), "--run-name", "mine")
