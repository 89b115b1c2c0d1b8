"""Local storage: whole files, one winner, no way out of the folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.places import ROOT
from support.storage.small_disk import mounted

from elastic import storage as module
from elastic.errors import SpecError
from elastic.storage import LocalStorage, Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run"))


def test_put_get_list_delete(storage: Storage) -> None:
    assert storage.list() == [] and not storage.exists("a/b")
    assert storage.put("a/b", b"one") and storage.put("a/b", b"two")
    assert storage.put("a/b2/c", b"three") and storage.put("z", b"")
    assert storage.get("a/b") == b"two" and storage.size("a/b") == 3 and storage.exists("a/b")
    assert storage.list() == ["a/b", "a/b2/c", "z"]
    assert (
        storage.list("a/") == ["a/b", "a/b2/c"]
        and storage.list("a/b2") == ["a/b2/c"]
        and storage.list("q/") == []
    )
    storage.delete("a/b")
    storage.delete("a/b")
    assert storage.list("a") == ["a/b2/c"]
    storage.delete_folder("a")
    storage.delete_folder("a")
    assert storage.list() == ["z"]
    with pytest.raises(FileNotFoundError):
        storage.get("a/b")


def test_ranges(storage: Storage) -> None:
    storage.put("k", bytes(range(100)))
    assert storage.read("k", 10, 5) == bytes(range(10, 15))
    assert storage.read("k", 95, 50) == bytes(range(95, 100))
    assert storage.read("k", 200, 5) == b""


def test_uri_is_absolute_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = open_storage("runs/a")
    assert relative.uri == f"{tmp_path}/runs/a" and relative.uri_of("k") == f"{tmp_path}/runs/a/k"
    relative.put("k", b"1")
    monkeypatch.chdir("/")
    assert open_storage(relative.uri).get("k") == b"1"
    assert open_storage(f"file://{tmp_path}/runs/a").get("k") == b"1"


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b", "a\0b", "a/.tmp-1-2"],
)
def test_keys_cannot_leave_the_folder(storage: Storage, key: str) -> None:
    for act in (
        storage.get,
        storage.delete,
        storage.exists,
        storage.path,
        lambda k: storage.put(k, b""),
    ):
        with pytest.raises(SpecError, match="relative path"):
            act(key)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3://b_/run", "no name of a bucket"),
        ("s3://bucket/a/../b", "plain names"),
        ("ftp://b/r", "not known"),
        ("", "no folder"),
    ],
)
def test_other_schemes_are_refused(uri: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        open_storage(uri)


def test_an_interrupted_write_leaves_the_old_file(storage: Storage) -> None:
    storage.put("k", b"old")
    with pytest.raises(OSError, match="disk full"):
        with storage.create("k") as file:
            file.write(b"half of the n")
            raise OSError("disk full")
    assert storage.get("k") == b"old" and os.listdir(storage.root) == ["k"]


def test_a_killed_writer_leaves_nothing_that_is_listed(storage: Storage) -> None:
    code = (
        "import os, sys; from elastic.storage import open_storage\n"
        "with open_storage(sys.argv[1]).create('d/k') as file:\n"
        "    file.write(b'half'); file.flush(); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, storage.uri], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert (
        storage.list() == []
        and not storage.exists("d/k")
        and len(os.listdir(storage.root / "d")) == 1
    )
    storage.delete_folder()
    assert not storage.root.exists()


def test_readers_never_see_half_a_file(storage: Storage) -> None:
    texts = [bytes([i]) * 200_000 for i in range(2)]
    storage.put("k", texts[0])
    seen: set[bytes] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.add(storage.get("k"))

    reader = threading.Thread(target=look)
    reader.start()
    for i in range(40):
        storage.put("k", texts[i % 2])
    stop.set()
    reader.join()
    assert seen <= set(texts)


def test_of_16_racing_writers_one_wins(storage: Storage) -> None:
    for turn in range(5):
        start = threading.Barrier(16)
        won: list[int] = []

        def write(i: int, key: str, start: threading.Barrier, won: list[int]) -> None:
            start.wait()
            if storage.put(key, b"%d" % i * 1000, if_absent=True):
                won.append(i)

        writers = [
            threading.Thread(target=write, args=(i, f"marker-{turn}", start, won))
            for i in range(16)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert len(won) == 1 and storage.get(f"marker-{turn}") == b"%d" % won[0] * 1000
    assert all(not name.startswith(module.TEMPORARY) for name in os.listdir(storage.root))


def test_a_file_system_without_hard_links_is_named(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(SpecError, match="hard links"):
        storage.put("k", b"", if_absent=True)
    assert storage.put("k", b"")


def test_a_link_whose_answer_was_lost_was_made(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS sends the request again, and is told that the name is there."""
    real = os.link

    def twice(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(os, "link", twice)
    assert storage.put("marker", b"mine", if_absent=True)
    monkeypatch.setattr(storage, "exists", lambda key: False)
    monkeypatch.setattr(os, "link", real)
    assert not storage.put("marker", b"another's", if_absent=True), (
        "that is another's name, which has been there before"
    )
    assert storage.get("marker") == b"mine"


@pytest.mark.parametrize("ahead_s", [-7200.0, 7200.0])
def test_the_age_of_unfinished_files_is_told_by_their_own_clock(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """A file server's clock may differ from this host's."""
    storage.put("k", b"1")
    path, touch = storage.path("k").with_name(f"{module.TEMPORARY}writer"), Path.touch
    path.write_bytes(b"half")
    there_s = path.stat().st_mtime + ahead_s
    os.utime(path, (there_s, there_s))

    def stamped(probe: Path) -> None:
        touch(probe)
        os.utime(probe, (there_s + 30.0, there_s + 30.0))

    monkeypatch.setattr(Path, "touch", stamped)
    assert storage.clean_unfinished(60.0) == 0 and path.exists()
    assert storage.clean_unfinished(20.0) == 1 and os.listdir(path.parent) == ["k"]


def test_new_folders_are_on_the_disk_before_a_file_in_them(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(module.local, "_sync_folder", synced.append)
    storage.put("a/b/k", b"1")
    root = storage.path("a").parent
    assert synced == [root.parent, root, root / "a", root / "a" / "b"]


def test_unfinished_files_are_removed_by_age(storage: Storage) -> None:
    storage.put("d/k", b"1")
    old, young = (storage.path(f"d/x{i}").with_name(f"{module.TEMPORARY}{i}") for i in range(2))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    assert storage.clean_unfinished(3600.0) == 1 and not old.exists() and young.exists()
    assert storage.clean_unfinished(3600.0) == 0 and storage.get("d/k") == b"1"


def test_free_bytes_of_a_folder_that_is_not_there_yet(storage: Storage) -> None:
    assert not storage.root.exists()
    found = os.statvfs(storage.root.parent)
    assert storage.free_bytes() == pytest.approx(found.f_bavail * found.f_frsize, rel=0.05)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(tmp_path / "tiny", "1m") as disk:
        yield disk


def test_a_full_disk_leaves_nothing_behind(tiny_disk: Path) -> None:
    storage = open_storage(tiny_disk / "run")
    storage.put("k", b"old")
    free_bytes = storage.free_bytes()
    assert free_bytes is not None and free_bytes < 1 << 20
    for act in (
        lambda: storage.put("k", bytes(2 << 20)),
        lambda: storage.put("new", bytes(2 << 20), if_absent=True),
    ):
        with pytest.raises(OSError) as raised:
            act()
        assert raised.value.errno == errno.ENOSPC
    with pytest.raises(OSError), storage.create("k") as file:
        for _ in range(2000):
            file.write(bytes(1000))
    assert (
        storage.list() == ["k"]
        and storage.get("k") == b"old"
        and os.listdir(tiny_disk / "run") == ["k"]
    )
    assert storage.free_bytes() == free_bytes and storage.put("k", b"new")


def test_a_disk_that_is_full_only_at_the_sync(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with delayed allocation and network file systems."""
    storage.put("k", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.put("k", b"new")
    assert storage.get("k") == b"old" and os.listdir(storage.root) == ["k"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_folder_that_cannot_be_read_is_not_empty(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    storage.put("a/k", b"1")
    storage.put("b/k", b"2")
    real = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("/b"):
            raise OSError(code, os.strerror(code), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for look in (storage.list, storage.sizes, lambda: storage.clean_unfinished(0.0)):
        with pytest.raises(OSError, match=os.strerror(code)):
            look()
    assert storage.list("a/") == ["a/k"]
    code = errno.ENOENT  # somebody has removed it since
    assert storage.list() == ["a/k"]


def test_a_key_that_is_removed_between_list_and_look_is_left_out(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        storage.put(name, b"12")
    real = LocalStorage.list

    def then_gone(self: LocalStorage, prefix: str = "") -> list[str]:
        found = real(self, prefix)
        self.delete("b")
        return found

    monkeypatch.setattr(LocalStorage, "list", then_gone)
    assert {key: n_bytes for key, (n_bytes, _) in storage.sizes().items()} == {"a": 2, "c": 2}
