"""What is taken for a secret, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic.config import masking
from elastic.config.masking import is_secret, masked, masked_text
from elastic.ledger.run_folder import RunFolder
from elastic.ledger.segments import StoredJournal
from elastic.observe import run_tables
from elastic.observe.dashboard.followed_run import FollowedRun
from elastic.observe.dashboard.run_summary import snapshot
from elastic.observe.reporting import report
from elastic.storage import open_storage
from elastic.types import (
    CopyFailed,
    Decision,
    DriverStarted,
    ModelProfile,
    NodeLost,
    RequestFailed,
    Silent,
    Stop,
    WorkerFailed,
    WorkerId,
)

SECRET = "zq7-planted"


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "hf-token", "token", "wandb_api_key", "wandbApiKey", "--key", "apikey",
    "AWS_SECRET_ACCESS_KEY", "credentials",
     "passwd", "db.password", "client_secret", "api_keys", "access_tokens"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name, SECRET)


@pytest.mark.parametrize(
    "name", ["end_token", "eos_token", "pad-token", "tokens", "tokenizer", "max_tokens",
    "n_key_heads", "sort_key", "keyword", "monkey",
     "text_key", "passes", "storage", ""],
)  # fmt: skip
def test_names_of_anything_else(name: str) -> None:
    assert not is_secret(name, SECRET)


def test_a_number_is_a_token_of_text_but_may_be_a_password() -> None:
    assert not is_secret("pad_to_token", "50256") and is_secret("password", "50256")


@pytest.mark.parametrize(
    "value",
    [
        ["--hf-token", SECRET], ["--lr", "3", f"--wandb_api_key={SECRET}"],
        [f"+wandb.api_key={SECRET}"], ["-token", SECRET], ["--url", f"https://me:{SECRET}@host/x"],
        [f"https://host/x?a=1&sig={SECRET}&b=2"], ["--password", "-" + SECRET],
        ["hf_" + SECRET.replace("-", "x") * 4], ["--more", f"--api-key {SECRET}"],
        {"env": {"HF_TOKEN": SECRET}}, {"api_keys": [SECRET, SECRET]},
        {"credentials": {"user": SECRET}}, {"drill": [{"passwd": SECRET}]},
        {"data": {"train": {"jsonl": f"s3://me:{SECRET}@host/x"}}},
        f"with url: /d/x?sv=1&sig={SECRET} (Caused by ...)", f"x?signature={SECRET}",
    ],
)  # fmt: skip
def test_secrets_are_masked_wherever_they_stand(value: Any) -> None:
    found = str(masked(value))
    assert SECRET not in found and SECRET.replace("-", "x") not in found and "***" in found
    assert masked(masked(value)) == masked(value)


@pytest.mark.parametrize(
    "value",
    [
        {
            "data": {
                "train": {"tokens": "/data/x.bin", "end_token": "<end>"},
                "validation": {"token": {"tokens": "y.bin"}},
            }
        },
        {"data.train": {"mixture": {"api_key": {"tokens": "/data/x.bin", "end_token": "<end>"}}}},
        {
            "optimizer": {"token": {"path": "torch.optim.AdamW", "parameters": ["*key*"]}},
            "end_token": "<end>",
        },
        [
            "--end-token",
            "<end>",
            "--max-token",
            "4",
            "--tokens",
            "x.bin",
            "--use-key",
            "--lr",
            "3",
            "a=b",
            "-key",
            "--lr",
        ],
        {"args": [], "steps": 3, "token": None, "keys": 4, "program": "/home/me/secret/program.py"},
    ],
)
def test_paths_and_tokens_of_text_are_not(value: Any) -> None:
    assert masked(value) == value


def test_texts() -> None:
    said = (
        f"error: unrecognized arguments: --hf-token {SECRET} ['--api-key', '{SECRET}'] at "
        f"postgres://me:{SECRET}@host/x"
    )
    assert masked_text(said) == said.replace(SECRET, "***")
    for plain in (
        "spot-1",
        "step-00000040.g0003",
        "s3://bucket/run",
        "continue with --allow-changed, or --run-name",
        "git@host:a/b",
    ):
        assert masked_text(plain) == plain


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With planted secrets, of no known form."""
    planted = {
        "HF_TOKEN": "zq7/planted+one",
        "MY_DB_PASSWORD": "zq7-planted-two",
        "RAY_AUTH_TOKEN_PATH": "/tmp/zq7-path/token",
    }
    for name, value in {
        **planted,
        "SSH_KEY": "/home/zq7-file",
        "PIN_PASSWORD": "1234",
        "RUN_NAME": "zq7-a-name",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_secret_that_was_in_the_environment_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program reads its .env file after the first text was masked; Ray and forks set variables of
    a process that runs; a program takes the secret out again, and its client still says it."""
    first, second = "c0ffee" * 7, "decade" * 7
    for secret in (first, second):
        assert masked_text(f"401 with {secret}") == f"401 with {secret}"
        monkeypatch.setenv("MY_API_KEY", secret)
        assert masked_text(f"401 with {secret}") == "401 with ***"
    assert masked_text(f"401 with {first}") == "401 with ***", "another one took its place"
    monkeypatch.delenv("MY_API_KEY")
    assert masked_text(f"{first} {second}") == "*** ***"
    monkeypatch.setenv("OTHER_API_KEY", third := "facade" * 7)  # as many variables as before
    assert masked_text(f"{first} {second} {third}") == "*** *** ***"


def test_a_secret_that_leaves_before_the_first_text_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", secret := "c0ffee" * 7)
    monkeypatch.setattr(masking, "_ENVIRONMENT", masking._Environment())  # as the import makes it
    monkeypatch.delenv("MY_API_KEY")
    assert masked_text(f"401 with {secret}") == "401 with ***"


def test_a_secret_of_the_environment_is_masked_wherever_a_program_says_it(
    environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "save_loss", lambda view, path: path.touch())  # it takes a second
    said = (
        "OSError: 401 for https://hub/x?q=zq7/planted+one (user zq7-a-name, key file "
        "/home/zq7-file); zq7-planted-two, 1234"
    )
    assert masked_text(said) == (
        "OSError: 401 for https://hub/x?q=*** (user zq7-a-name, key file /home/zq7-file); ***, 1234"
    )
    events = (
        WorkerFailed(WorkerId("n", 0), 1, "program", said), CopyFailed(1, 5, said), NodeLost("n",
        said), Silent(WorkerId("n", 0), 1, "stepping", 1.0, said), RequestFailed("spot", "r", said),
    )  # fmt: skip
    start = DriverStarted(
        "r",
        1,
        {"args": [said], "storage": "s3://me:zq7-planted-two@host/x"},
        (),
        ModelProfile(1, 1, ()),
    )
    place = RunFolder.of(open_storage(tmp_path / "r"))
    journal = place.open_journal(1, StoredJournal())
    journal.append(
        1.0, [(1.0, event) for event in (start, *events)], Decision((Stop("failed", said),), said)
    )
    journal.close()
    _, shown = report.write(place)
    files = {file.name: file.read_bytes() for file in place.folder.rglob("*") if file.is_file()}
    assert {"journal.jsonl", "report.json"} <= files.keys() and b"***" in files["journal.jsonl"]
    assert [
        name for name, data in files.items() if b"planted" in data
    ] == [] and "planted" not in "".join(shown)
    page = FollowedRun(place)
    page.look()
    view = page.view
    told = json.dumps([snapshot(page), page.notes(), run_tables.status_plain(view)], default=str)
    assert "***" in told and "planted" not in told + "".join(run_tables.status(view))
