"""The checkpoint check on storage that keeps its word, and on storage that does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from elastic.certify.checks import storage_checks
from elastic.certify.checks.storage_checks import checkpoint, task
from elastic.certify.tasks import Tasks
from elastic.scenarios.check import Check
from elastic.scenarios.limit import Limit
from elastic.storage import LocalStorage
from elastic.worker.checkpoint import checkpoint_reader

SMALL = 64  # rows


class Damaging(LocalStorage):
    """One bit of each shard is another after it was written."""

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        with super().create(key, if_absent) as file:
            yield file
        if key.endswith(".distcp"):
            data = bytearray(self.path(key).read_bytes())
            data[len(data) // 2] ^= 1
            self.path(key).write_bytes(data)


class Slow(LocalStorage):
    """Fast for plain files, slow for shards, by a clock of its own."""

    now_s = 0.0

    @classmethod
    def clock(cls) -> float:
        cls.now_s += 0.001
        return cls.now_s

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        Slow.now_s += 2.0 if key.endswith(".distcp") else 0.01
        with super().create(key, if_absent) as file:
            yield file


def tried(storage: LocalStorage) -> Check:
    return checkpoint(storage, Limit.after(600), SMALL)


def test_good_storage_has_the_content(tmp_path: Path) -> None:
    check = tried(LocalStorage(tmp_path))
    assert check.figures["content_equal"] == 1
    assert check.figures["damaged_files"] == 0
    assert check.figures["bytes"] == 4 * 64 * 4096 * 4
    assert "damaged" not in check.why


def test_storage_that_damages_bytes_fails(tmp_path: Path) -> None:
    damaging = Damaging(tmp_path)
    check = tried(damaging)
    assert check.verdict == "fail"
    assert check.figures["content_equal"] == 0
    assert check.figures["damaged_files"] == 2
    assert str(tmp_path) in check.why


def test_a_reader_that_returns_other_numbers_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader.Checkpoint, "fill", lambda self, items: 0)
    check = tried(LocalStorage(tmp_path))
    assert check.verdict == "fail"
    assert "content_equal is 0" in check.why


def test_slow_checkpoints_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "time", SimpleNamespace(perf_counter=Slow.clock))
    check = tried(Slow(tmp_path))
    assert check.verdict == "fail"
    assert "save_vs_plain" in check.why


def test_slow_storage_gets_fewer_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(storage_checks, "_seconds", lambda what: 4.0)  # 1 MB/s
    assert storage_checks._rows(storage, Limit.after(60)) == storage_checks.ROWS_LEAST
    monkeypatch.setattr(storage_checks, "_seconds", lambda what: 0.004)
    assert storage_checks._rows(storage, Limit.after(60)) == storage_checks.ROWS


def test_nothing_is_left_in_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text("kept")
    monkeypatch.setattr(storage_checks, "ROWS", SMALL)
    monkeypatch.setattr(storage_checks, "ROWS_LEAST", SMALL)
    done = Tasks(lambda check: None)
    done.run([task(str(tmp_path))], 600.0)
    assert [check.name for check in done.checks] == ["checkpoint"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_storage_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = Tasks(lambda check: None)
    done.run([task(str(tmp_path / "file"))], 600.0)
    assert [(check.name, check.verdict) for check in done.checks] == [("checkpoint", "fail")]
    assert "NotADirectoryError" in done.checks[0].why or "FileExistsError" in done.checks[0].why
