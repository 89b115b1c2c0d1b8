"""Whatever is asked of a run that is not there, has not begun, or that a later version wrote: one
line, which says what and what would be right."""

from __future__ import annotations

import errno
import shutil
import socket
from pathlib import Path

import pytest
from support.cli.calls import called

from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.storage import open_storage

VERBS = (
    "status", "why", "why --all", "report", "report --csv", "ledger", "doctor", "replay", "logs",
    "profile", "dashboard",
)  # fmt: skip
# what reads something else than the journal, or wants a run that goes on
SAID = {
    ("logs", "none-1"): "no worker's output in",
    ("logs", "later-1"): "no worker's output in",
    ("profile", "none-1"): "is not running",
    ("dashboard", "none-1"): "its journal is empty",
}
RUNS = {
    "tinny-1": "did you mean tiny-1",
    "none-1": "holds no line of a journal",
    "later-1": "schema version 9 is newer than 2, the newest that this elastic reads",
}


@pytest.fixture
def unreadable(storage: Path) -> Path:
    for name, text in (("none-1", ""), ("later-1", '{"v": 9, "at_s": 1}\n')):
        (storage / name).mkdir()
        (storage / name / "journal.jsonl").write_text(text)
    return storage


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_cannot_be_read_is_one_line(
    unreadable: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    for verb in VERBS:
        for more in ([], ["--json"]) if "--csv" not in verb else ([],):
            code, out, said = called(capsys, *verb.split(), run, *more)
            assert (code, out, said.count("\n")) == (2, "", 1), f"{verb} {more}: {said}"
            assert said.startswith("elastic: ") and SAID.get((verb, run), RUNS[run]) in said


def test_others_are_listed_all_the_same(
    unreadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, said = called(capsys, "ls")
    assert code == 0 and "tiny-1" in out and "none-1" in out
    assert "run 'later-1' is left out: journal: schema version 9" in said


def test_a_folder_that_may_not_be_read_is_left_out(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another user, or the file system's own; also one of a run that lies elsewhere, and one
    whose journal alone is closed."""
    (storage / "lost+found").mkdir()
    shutil.copytree(storage / "tiny-1", storage / "closed-1")
    theirs = storage.parent / "theirs" / "tiny-2"
    shutil.copytree(storage / "tiny-1", theirs)
    find_runs.remember(RunFolder.of(open_storage(str(theirs))))
    is_file, read_bytes = Path.is_file, Path.read_bytes

    def refused(path: Path, closed: tuple[Path, ...]) -> None:
        if path.parent in closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def looks(self: Path) -> bool:
        refused(self, (storage / "lost+found", theirs))
        return is_file(self)

    def reads(self: Path) -> bytes:
        refused(self, (storage / "closed-1",))
        return read_bytes(self)

    monkeypatch.setattr(Path, "is_file", looks)
    monkeypatch.setattr(Path, "read_bytes", reads)
    assert [name for name, _ in find_runs.all_runs()].count("tiny-1") == 1
    code, out, said = called(capsys, "ls")
    assert (code, len(out.splitlines())) == (0, 2) and "tiny-1" in out
    assert "run 'closed-1' is left out: [Errno 13] Permission denied" in said
    assert called(capsys, "status", "tin")[0] == 0, "by how its name begins"


def test_the_name_of_a_run_that_is_left_out_commands_no_terminal(
    unreadable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (unreadable / "later-1").rename(unreadable / "later\x1b]0;x\x07\n\u202e1")
    code, _, said = called(capsys, "ls")
    assert code == 0 and said.count("\n") == 1 and said[:-1].isprintable()
    assert "run 'later\\x1b]0;x\\x07 \\u202e1' is left out: journal: schema version 9" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--port {taken}", "is taken by another process; --port 0 takes a free one"),
        ("--port 99999", "--port 99999: must be 0 (any that is free) to 65535"),
        ("--host 192.0.2.1", "give an address of this machine, as 127.0.0.1 or 0.0.0.0"),
    ],
)
def test_a_place_that_a_dashboard_cannot_have_is_one_line(
    storage: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = words.format(taken=taken.getsockname()[1]).split()
        code, out, found = called(capsys, "dashboard", "tiny-1", *given)
    assert (code, out, found.count("\n")) == (2, "", 1) and said in found
