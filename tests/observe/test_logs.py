"""What `elastic logs` shows, and the traceback of the worker that failed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.observe.small_run import lines

from elastic.cli.command_line import main
from elastic.errors import SpecError
from elastic.ledger.journal import Journal
from elastic.ledger.run_folder import RunFolder
from elastic.observe import logs
from elastic.storage import open_storage

FAILED = """before
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    f()
KeyError: 'first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
ValueError: my own
after
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "runs" / "r"
    journal = Journal(folder / "journal.jsonl", 1)
    for line in lines():
        journal.append(line.at_s, line.events, line.decision)
    journal.close()
    (folder / "logs").mkdir()
    for k, (name, text) in enumerate(
        {"spot-1-0-11": FAILED, "spot-1-0-7": "older\n", "spot-2-0-12": "one\ntwo\n"}.items()
    ):
        (folder / "logs" / f"{name}.log").write_text(text)
        os.utime(folder / "logs" / f"{name}.log", (9 - k, 9 - k))
    return RunFolder.of(open_storage(str(folder)))


def test_colors_come_where_the_terminal_has_them(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = "\x1b[A\x1b[32m10\u00a0000 ok\r\nthen\x1b[K\x1b]0;x\x07\n"
    (run.logs / "spot-2-0-12.log").write_text(printed)
    words = ["logs", str(run.folder), "--worker", "spot-2"]
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert plain.endswith("<==\n10\u00a0000 ok\nthen\\x1b]0;x\\x07\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    colored = "\x1b[32m10\u00a0000 ok\x1b[0m\nthen\\x1b]0;x\\x07\n"
    assert capsys.readouterr().out.endswith(f"<==\n{colored}")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    assert capsys.readouterr().out == plain


def test_the_end_of_each_file(
    run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = logs.logs(run, last=1)
    assert [(log.file.name, log.lines) for log in found] == [
        ("spot-2-0-12.log", ("two",)), ("spot-1-0-7.log", ("older",)), ("spot-1-0-11.log",
        ("after",)),
    ]  # fmt: skip
    assert (
        main(
            [
                "logs",
                "r",
                "--storage",
                str(tmp_path / "runs"),
                "--worker",
                "spot-2/0",
                "--last",
                "0",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.splitlines()[1:] == ["one", "two"]
    assert (
        main(["logs", "r", "--storage", str(tmp_path / "runs"), "--worker", "spot-2", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)[0]["lines"] == ["one", "two"]


def test_where_there_is_none(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"no log begins with 'spot-3'; there are spot-2-0-12\.log, "
    ):
        logs.logs(run, worker="spot-3")
    for file in run.logs.iterdir():
        file.unlink()
    with pytest.raises(SpecError, match=r"run 'r': no worker's output in .*/logs$"):
        logs.logs(run)
    remote = RunFolder(open_storage("s3://bucket/runs/r"), tmp_path / "here")
    with pytest.raises(
        SpecError, match=r"each node has those of its own workers: /\S+/elastic-logs-\d+/r$"
    ):
        logs.logs(remote)


def test_the_last_traceback_of_a_worker(run: RunFolder) -> None:
    found = logs.traceback_of(run, "spot-1/0")
    assert found is not None and found.file.parent == run.logs
    assert list(found.lines) == [
        "Traceback (most recent call last):", '  File "train.py", line 5, in <module>',
        "ValueError: my own",
    ]  # fmt: skip
    assert logs.traceback_of(run, "spot-2/0") is None
    assert logs.traceback_of(run, "spot-9/0") is None
