"""What a worker prints: its file, its bound, and what is told of it."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.cluster.workers import output
from elastic.ledger.run_folder import OF_NODE

CHILD = """
import os, sys
from elastic.cluster.workers import output
output.FILE_BYTES = 3000
out = output.Output(sys.argv[1], "spot-1/0")
print("before", flush=True)
taken = [out.take()]
out.begin("generation 1: rank 0 of 2", True)
print("python", flush=True)
print("an error", file=sys.stderr)
os.system("echo a child with $MY_API_KEY")
print("half", end="", flush=True)
taken.append(out.take())
print(" whole\\r50%\\r100%", flush=True)
out.begin("generation 2: rank 1 of 2", False)
print("as rank 1", flush=True)
taken.append(out.take())
out.begin("generation 3: rank 0 of 2", True)
for k in range(200):
    print(f"line {k:03} of many", flush=True)
    if k % 10 == 9:
        taken.append(out.take())
open(sys.argv[2], "w").write(repr(taken))
os.write(2, b"the last words")
os.abort()
"""


def child(folder: Path) -> tuple[int, list[tuple[str, ...]], str]:
    """The process, what was taken, and what stayed at its own output."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder / "logs"), str(folder / "taken")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"MY_API_KEY": "zq7-planted"},
    ) as process:
        out = process.communicate(timeout=300)[0]
    return process.pid, eval((folder / "taken").read_text()), out


def test_everything_is_in_the_file_and_rank_0_is_told(tmp_path: Path) -> None:
    pid, taken, out = child(tmp_path)
    first, rank_0, left, *many = taken
    assert first == (), (
        "what comes before the first generation is not told: the driver has shown it"
    )
    assert rank_0 == ("python", "an error", "a child with ***"), "a terminal shows no secret"
    assert left == ("100%",), (
        "what rank 0 had printed before it became rank 1, and nothing after; of a bar its last "
        "state"
    )
    assert [line for lines in many for line in lines] == [
        f"line {k:03} of many" for k in range(200)
    ]
    file = tmp_path / "logs" / f"spot-1-0-{pid}.log"
    old = Path(f"{file}.1")
    assert out.splitlines() == [f"{output.LOG_MARK}the output continues in {file}"]
    assert {path.name for path in file.parent.glob("*.log*")} == {file.name, old.name}
    assert "line 199 of many" in file.read_text() and "line 199" not in old.read_text()
    assert file.stat().st_size < 3500 and old.stat().st_size < 3500
    assert output.last_words(str(file.parent), "spot-1/0", pid).lines[-2:] == (
        "line 199 of many",
        "the last words",
    )
    assert not output.last_words(str(file.parent), "spot-1/0", 1)
    assert not output.last_words(str(file.parent), "spot-2/0", pid), "of another host"


@pytest.mark.parametrize(
    ("wrote", "died_of"),
    [
        (
            "[2026-11-26 E 7 8] logging.cc:118: Unhandled exception: N4gloo13EnforceNotMetE. "
            "what(): 20 vs 10. Is there a mismatch? /x/_raylet.so(+0x18) [0x7f] ray::f()\n/y.so(+1)",
            "20 vs 10. Is there a mismatch?",
        ),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):"
            '\n  File "a.py", line 3 in f\n  File "a.py", line 9 in g\n  File "a.py", line 12 in h',
            "Fatal Python error: Segmentation fault Current thread 0x7f (most recent call first): "
            'File "a.py", line 3 in f File "a.py", line 9 in g',
        ),
    ],
)
def test_what_a_process_has_died_of(tmp_path: Path, wrote: str, died_of: str) -> None:
    """Not the list of modules that stands behind it."""
    (tmp_path / "n-0-7.log").write_text(f"step 1\n{wrote}\n\nExtension modules: numpy._core\n")
    words = output.last_words(str(tmp_path), "n/0", 7)
    assert (words.crash, words.lines) == (died_of, ())
    assert str(words) == f"; it wrote: {died_of}"


def test_lines_that_tell_of_no_crash_are_no_cause(tmp_path: Path) -> None:
    """A process that is killed says nothing of it: what stands last in its file is its last lines,
    few of them, of a bar the last state."""
    (tmp_path / "n-0-7.log").write_text(
        f"note 1\nnote 2\nnote 3\n{output.LOG_MARK}generation 2\n\n10%|#\r20%|##\nstep 4: loss 2"
    )
    words = output.last_words(str(tmp_path), "n/0", 7)
    assert words == output.LastWords("", ("note 3", "20%|##", "step 4: loss 2"))
    assert str(words) == '; its last lines: "note 3 | 20%|## | step 4: loss 2"'
    assert str(output.LastWords()) == ""


def test_no_half_of_a_secret_is_left_where_last_lines_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "0123456789abcdef" * 3)
    end = "z" * (output.WORDS_MOST - 20)
    (tmp_path / "n-0-7.log").write_text(f"401: {'0123456789abcdef' * 3}{end}")
    assert "abcdef" not in str(output.last_words(str(tmp_path), "n/0", 7))


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for k in range(output.FILES_KEPT + 3):
        file = tmp_path / f"spot-{k}-0-{k}.log"
        file.touch()
        os.utime(file, (k, k))
    output.prune(tmp_path)
    left = {int(path.name.split("-")[1]) for path in tmp_path.glob("*.log")}
    assert left == set(range(3, output.FILES_KEPT + 3))
    for k in range(output.FILES_KEPT + 3):
        output.file_of(tmp_path, "n/0", k, end=output.CALLS).touch()
    (tmp_path / output.PRUNED).unlink()
    output.prune(tmp_path)
    assert len(list(tmp_path.glob(f"*{output.CALLS}"))) == output.FILES_KEPT


def test_they_go_where_an_exclusive_lock_needs_a_file_that_is_open_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS and EFS (flock(2))."""
    flock = fcntl.flock

    def of_nfs(file: int, how: int) -> None:
        read_only = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        if how & fcntl.LOCK_EX and read_only:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    monkeypatch.setattr(output, "FILES_KEPT", 2)
    for k in range(5):
        file = tmp_path / f"spot-{k}-0-{k}.log"
        file.touch()
        os.utime(file, (k, k))
    output.prune(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        "spot-3-0-3.log", "spot-4-0-4.log",
    ]  # fmt: skip


def test_they_go_by_their_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LOGS_BYTES", 250)
    for k, n_bytes in enumerate((10, 100, 100, 100, 50)):  # the newest last
        file = tmp_path / f"spot-{k}-0-{k}.log"
        file.write_bytes(b"x" * n_bytes)
        os.utime(file, (k, k))
    output.prune(tmp_path)
    assert {int(path.name.split("-")[1]) for path in tmp_path.glob("*.log")} == {2, 3, 4}


def test_logs_that_are_written_stay_and_one_worker_looks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "FILES_KEPT", 1)
    files = [tmp_path / f"spot-{k}-0-{k}.log" for k in range(3)]
    handles = [output.open_log(file) for file in files]
    for k, file in enumerate(files):
        os.utime(file, (k, k))
    os.close(handles[1])
    output.prune(tmp_path)
    assert [file.exists() for file in files] == [True, False, True], (
        "the first is the oldest, and is written still"
    )
    os.close(handles[0])
    output.prune(tmp_path)
    assert files[0].exists(), "somebody has looked just now"
    os.utime(tmp_path / output.PRUNED, (1.0, 1.0))
    output.prune(tmp_path)
    assert not files[0].exists()
    os.close(handles[2])


def test_no_link_is_followed_and_a_folder_of_a_node_is_this_users_alone(tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (tmp_path / "a.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        output.open_log(tmp_path / "a.log")
    own = tmp_path / f"{OF_NODE}{os.getuid()}"
    output.make_folder(own / "run")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700 and (own / "run").is_dir()
    own.chmod(0o777)
    with pytest.raises(PermissionError, match="of this user alone"):
        output.make_folder(own / "run")
    (tmp_path / "else").mkdir(mode=0o700)
    (tmp_path / f"{OF_NODE}99").symlink_to(tmp_path / "else")
    with pytest.raises(PermissionError, match="of this user alone"):
        output.make_folder(tmp_path / f"{OF_NODE}99" / "run")


REMOVED = """
import shutil, sys
from elastic.cluster.workers import output
out = output.Output(sys.argv[1], "spot-1/0")
out.begin("generation 1: rank 0 of 1", True)
print("one", flush=True)
shutil.rmtree(sys.argv[1])
taken = [out.take()]
print("two", flush=True)
taken.append(out.take())
out.begin("generation 2: rank 0 of 1", True)
open(sys.argv[2], "w").write(repr(taken))
"""


def test_a_folder_that_somebody_clears_costs_the_old_lines_alone(tmp_path: Path) -> None:
    words = [sys.executable, "-c", REMOVED, str(tmp_path / "logs"), str(tmp_path / "taken")]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    assert eval((tmp_path / "taken").read_text()) == [("one",), ("two",)]
    (file,) = (tmp_path / "logs").glob("*.log")
    assert file.read_text().splitlines() == ["two", f"{output.LOG_MARK}generation 2: rank 0 of 1"]
