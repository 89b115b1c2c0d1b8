"""Checkpoints that a restarted script reports: whole or not there, the newest two, on any node."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from elastic.cluster.ray_train.script_checkpoints import (
    REPORTED,
    ReportedCheckpoints,
    copies_of,
    hold,
    key_in,
    remove_copies,
    remove_left,
    report_of,
)
from elastic.storage import LocalStorage, Storage


@pytest.fixture(params=["folder", "s3"])
def stored(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ReportedCheckpoints:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    there: Storage = (
        LocalStorage(tmp_path / "r") if request.param == "folder" else request.getfixturevalue("s3")
    )
    return ReportedCheckpoints(there)


def part(folder: Path, **files: str) -> Path:
    """What one rank gives."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def report(stored: ReportedCheckpoints, folder: Path, n: int, generation: int = 1) -> str:
    key = key_in(generation, n, f"epoch-{n}")
    stored.add(key, part(folder / f"{generation}-{n}", state=f"{generation} {n}"))
    stored.commit(key)
    return key


def test_it_is_whole_when_all_ranks_have_added_their_files(
    stored: ReportedCheckpoints, tmp_path: Path
) -> None:
    assert stored.newest() == ""
    key = key_in(3, 7, "epoch-7")
    stored.add(key, part(tmp_path / "0", index="both", shards__0="first"))
    stored.add(key, part(tmp_path / "1", shards__1="second", empty=""))
    assert stored.newest() == "", "a kill here leaves the one before"
    stored.commit(key)
    assert stored.newest() == key and report_of(key) == 7
    place = stored.local(key, copies_of(stored.storage.uri, "a") / "4")
    assert place.name == "epoch-7"
    found = {str(p.relative_to(place)): p.read_text() for p in place.rglob("*") if p.is_file()}
    assert found == {"index": "both", "shards/0": "first", "shards/1": "second", "empty": ""}


def test_the_newest_two_stay_and_nothing_unfinished_before_them(
    stored: ReportedCheckpoints, tmp_path: Path
) -> None:
    keys = [report(stored, tmp_path, n) for n in (1, 2)]
    stored.add(key_in(1, 3, "epoch-3"), part(tmp_path / "cut", state="half"))
    keys += [report(stored, tmp_path, n) for n in (4, 5)]
    names = {key.split("/")[1].removesuffix(".json") for key in stored.storage.list(f"{REPORTED}/")}
    assert names == {key.split("/")[1] for key in keys[-2:]}
    assert stored.newest() == keys[-1]


def test_a_newer_generation_counts_whatever_an_older_one_still_writes(
    stored: ReportedCheckpoints, tmp_path: Path
) -> None:
    report(stored, tmp_path, 8, generation=1)
    newest = report(stored, tmp_path, 6, generation=2)
    report(stored, tmp_path, 9, generation=1)
    assert stored.newest() == newest
    place = stored.local(newest, copies_of(stored.storage.uri, "a") / "3")
    assert (place / "state").read_text() == "2 6"


def test_the_ranks_of_a_node_fetch_it_once(
    s3: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("elastic.cluster.ray_train.script_checkpoints.PIECE_BYTES", 3)
    stored, copies = ReportedCheckpoints(s3), copies_of(s3.uri, "a") / "2"
    key = report(stored, tmp_path / "files", 1)
    (copies / "unfinished").mkdir(parents=True)  # a process was killed meanwhile
    copies.parent.parent.chmod(0o700)
    place = stored.local(key, copies)
    (place / "state").write_text("as it was fetched")
    assert (stored.local(key, copies) / "state").read_text() == "as it was fetched"
    newer = report(stored, tmp_path / "files", 2)
    assert (stored.local(newer, copies) / "state").read_text() == "1 2"
    assert not place.exists(), "one stays"


def test_a_folder_that_others_may_write_is_not_used(
    s3: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stored, copies = ReportedCheckpoints(s3), copies_of(s3.uri, "a") / "2"
    key = report(stored, tmp_path / "files", 1)
    copies.parent.parent.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        stored.local(key, copies)


HOLDS = """
import sys, time
from pathlib import Path
from elastic.cluster.ray_train.script_checkpoints import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_killed_script_has_left_is_removed_and_nothing_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine, other = copies_of("s3://bucket/r", "b"), copies_of("s3://bucket/r", "a")
    home, logs = tmp_path / "home", other.parent / "r"
    for folder in (mine / "1", logs, home):
        folder.mkdir(parents=True)
        (folder / "state").touch()
    (home / "held").touch()
    (other.parent / "link").symlink_to(home)
    other.parent.chmod(0o700)
    hold(mine)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(other)], stdout=subprocess.PIPE, text=True
    ) as script:
        try:
            assert script.stdout is not None and script.stdout.readline() == "held\n"
            (other / "2").mkdir()
            remove_left(mine)
            assert (other / "2").exists(), "a script reads there"
        finally:
            script.kill()
    other.parent.chmod(0o755)
    remove_left(mine)
    assert other.exists(), "others may write there"
    other.parent.chmod(0o700)
    remove_left(mine)
    assert sorted(path.name for path in other.parent.iterdir()) == ["link", "r", mine.name]
    assert all((folder / "state").exists() for folder in (mine / "1", logs, home))


@pytest.mark.parametrize("how", ["link", "open", "own", "link inside"])
def test_copies_are_removed_from_a_folder_of_this_user_alone(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copies = copies_of("s3://bucket/r", "a")
    base, home = copies.parent, tmp_path / "home"
    there = home if how.startswith("link") else base
    target = there if how == "link inside" else there / copies.name
    for generation in ("1", "2"):
        (target / generation).mkdir(parents=True)
    there.chmod(0o755 if how == "open" else 0o700)
    if how == "link":
        base.symlink_to(home)
    elif how == "link inside":
        base.mkdir(mode=0o700)
        copies.symlink_to(home)
    remove_copies(copies, but="2")
    left = sorted(folder.name for folder in target.iterdir())
    assert left == (["2"] if how == "own" else ["1", "2"])
    remove_copies(copies)
    assert target.exists() == (how != "own")
