"""Where Ray is started on hosts that other users have accounts on, its folder, which it opens to
everyone, lies in one that the user alone may enter."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.places import ROOT

from elastic.api.init_job import NewJob, init

PAGE = (ROOT / "docs" / "clusters.md").read_text()
LISTS = ("head_start_ray_commands", "worker_start_ray_commands")
FOLDER = f"elastic-ray-{os.getuid()}"
SESSION = "session_2026-12-01_03-49-05_123456_4194304/sockets/plasma_store.16"
SOCKET_MOST = 107  # bytes of a socket's path


def files(folder: Path) -> dict[str, Any]:
    """What the repository brings and what `elastic init` writes."""
    init(NewJob(str(folder / "job"), place="own-hosts", cluster=str(folder / "made.yaml")))
    brought = (ROOT / "cluster_configs" / name for name in ("on_premises.yaml", "one_machine.yaml"))
    places = (*brought, folder / "made.yaml")
    return {place.name: yaml.safe_load(place.read_text()) for place in places}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def make_another(there: Path, kind: str) -> None:
    """What another user may have put there."""
    if kind == "a link":
        (there.parent / "own").mkdir(mode=0o700)
        there.symlink_to(there.parent / "own")
    else:
        there.mkdir(mode=0o700)
        os.chown(there, 65534, 65534)


KINDS = ["a link", "a folder of theirs"]


def lists(data: dict[str, Any]) -> list[list[str]]:
    """One machine has no workers' one."""
    return [data[key] for key in LISTS if data[key]]


@pytest.mark.parametrize("name", ["on_premises.yaml", "one_machine.yaml", "made.yaml"])
def test_on_own_hosts_ray_is_started_in_a_folder_of_its_user(tmp_path: Path, name: str) -> None:
    for first, folder, *_, start in lists(files(tmp_path)[name]):
        assert first == "ray stop" and folder.startswith("cd /tmp && ")
        assert "; export RAY_TMPDIR=/tmp/elastic-ray-$(id -u); " in start
        assert " ray start " in start and " --temp-dir=$RAY_TMPDIR/ray" in start
        here = folder.replace("/tmp", str(tmp_path))
        for mode in (None, 0o755, 0o700):  # not there or as it is, from elsewhere, from last time
            if mode is not None:
                (tmp_path / FOLDER).chmod(mode)
            assert run("bash", "-c", f"({here})").returncode == 0
            assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    assert len(f"/tmp/elastic-ray-{2**32 - 1}/ray/{SESSION}") <= SOCKET_MOST


def test_a_driver_there_finds_the_cluster_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shell without it reads, /tmp/ray, is another user's."""
    (export,) = re.findall(r"`(export RAY_TMPDIR=[^`]*)`", PAGE)
    for data in files(tmp_path).values():
        for *_, start in lists(data):
            assert f" {export};" in start and "--temp-dir=$RAY_TMPDIR/ray" in start
    from ray._common.utils import get_ray_address_file

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert get_ray_address_file(None) == "/tmp/ray/ray_current_cluster"
    folder = run("bash", "-c", f"{export}; echo $RAY_TMPDIR").stdout.strip()
    monkeypatch.setenv("RAY_TMPDIR", folder)
    assert get_ray_address_file(None) == f"/tmp/{FOLDER}/ray/ray_current_cluster"


def test_the_page_names_the_head_for_a_driver_there() -> None:
    (said,) = re.findall(r"^\*\*Where the driver runs:\*\*.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    said = " ".join(said.split())
    assert "(or `auto`)" not in said and "On hosts of your own write HEAD:6379" in said


@pytest.mark.parametrize("kind", KINDS)
def test_on_own_hosts_ray_is_not_started_in_what_another_user_has_made(
    tmp_path: Path, kind: str
) -> None:
    if kind == KINDS[1] and os.getuid():
        pytest.skip("only root gives a folder to another user")
    make_another(tmp_path / FOLDER, kind)
    for data in files(tmp_path).values():
        for _, folder, *_ in lists(data):
            done = run("bash", "-c", f"({folder.replace('/tmp', str(tmp_path))})")
            said = f"{tmp_path / FOLDER} is not a folder of this user alone\n"
            assert (done.returncode, done.stderr) == (1, said)


def laptop(folder: Path, word: str = "start") -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "deploy" / "laptop_cluster.sh")
    return run("bash", script, word, FOLDER=str(folder), RAY="true")


def test_the_cluster_on_a_laptop_lies_in_a_folder_of_its_user(tmp_path: Path) -> None:
    there = tmp_path / "laptop"
    for _ in range(2):
        assert laptop(there).returncode == 0
        assert stat.S_IMODE(there.stat().st_mode) == 0o700
    there.chmod(0o777)
    assert laptop(there).returncode == 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_cluster_on_a_laptop_is_not_started_in_what_another_user_has_made(
    tmp_path: Path, kind: str
) -> None:
    if kind == KINDS[1] and os.getuid():
        pytest.skip("only root gives a folder to another user")
    make_another(tmp_path / "laptop", kind)
    done = laptop(tmp_path / "laptop")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is there and not a folder of this user alone (mode 700); remove it" in done.stderr
    assert not (tmp_path / "own" / "cluster.yaml").exists()


def test_the_end_of_the_cluster_on_a_laptop_removes_what_it_has_made_alone(tmp_path: Path) -> None:
    there, mine = tmp_path / "laptop", tmp_path / "home"
    mine.mkdir(mode=0o700)
    for name in ("cluster.yaml", "ray", "thesis.tex"):
        (mine / name).write_text("mine")
    assert laptop(mine).returncode == 2 and "holds other files" in laptop(mine).stderr
    assert laptop(mine, "stop").returncode == 0
    assert sorted(path.read_text() for path in mine.iterdir()) == ["mine"] * 3
    for kept in ([], ["notes"]):
        assert laptop(there).returncode == 0
        (there / "ray").mkdir()
        for name in kept:
            (there / name).touch()
        done = laptop(there, "stop")
        assert done.returncode == 0 and ("holds other files" in done.stderr) == bool(kept)
        assert [path.name for path in there.glob("*")] == kept and there.exists() == bool(kept)
