"""Lines wait in memory while the disk is full or silent, and follow in order."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import until

from elastic.errors import LostContact, StorageFull
from elastic.ledger import append_file
from elastic.ledger.journal import Journal, read
from elastic.types import Abort, Decision, NodeLost


class Disk:
    """Stands in for os.write and os.fsync. `free`: bytes that still fit; `answers`: calls wait for
    it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free: int | None = None
        self.answers = threading.Event()
        self.answers.set()
        own = {"write": self.write, "fsync": self.fsync}
        monkeypatch.setattr(append_file, "os", SimpleNamespace(**(vars(os) | own)))
        monkeypatch.setattr(append_file, "AGAIN_S", 0.01)

    def write(self, fd: int, data: bytes) -> int:
        assert self.answers.wait(60)
        if self.free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        n = os.write(fd, data[: self.free])
        self.free = None if self.free is None else self.free - n
        return n

    def fsync(self, fd: int) -> None:
        assert self.answers.wait(60)
        os.fsync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def lost(journal: Journal, n: int) -> None:
    journal.append(float(n), [(float(n), NodeLost(f"n{n}"))], Decision((Abort(n),), "so"))


def names(path: Path) -> list[str]:
    return [
        event.node_id
        for line in read(path)
        for _, event in line.events
        if isinstance(event, NodeLost)
    ]


def test_a_full_disk(disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "j", 1)
    lost(journal, 1)
    assert journal.settled
    disk.free = 30  # a line is torn
    for n in (2, 3, 4):
        lost(journal, n)
        assert not journal.settled
    assert names(tmp_path / "j") == ["n1"] and "No space left" in str(journal.trouble)
    until(lambda: disk.free == 0, "a full disk")
    disk.free = None
    until(lambda: journal.settled, "the lines in their places")
    lost(journal, 5)
    journal.close()
    assert names(tmp_path / "j") == ["n1", "n2", "n3", "n4", "n5"] and journal.trouble is None
    said = [record.message for record in caplog.records]
    assert len(said) == 2, said
    assert f"{tmp_path / 'j'} cannot be written ([Errno 28] No space left on device)" in said[0]
    assert "it can be written again, and nothing is missing in it" in said[1]


def test_a_disk_that_is_full_to_the_end_is_one_line(disk: Disk, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", 1)
    disk.free = 0
    lost(journal, 1)
    lost(journal, 2)
    with pytest.raises(
        StorageFull, match="its last 2 lines could not be written: .*No space left on device"
    ) as raised:
        journal.close()
    assert raised.value.exit_code == 1 and "\n" not in str(raised.value)


def test_a_silent_file_system_holds_nobody_up_for_long(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_file, "WAIT_S", 0.2)
    monkeypatch.setattr(append_file, "CLOSE_MOST_S", 0.2)
    journal = Journal(tmp_path / "j", 1)
    disk.answers.clear()
    begun_s = time.monotonic()
    for n in range(100):
        lost(journal, n)
    assert not journal.settled and time.monotonic() - begun_s < 5.0, "only the first one waits"
    disk.answers.set()
    until(lambda: journal.settled, "the lines in their places")
    disk.answers.clear()
    lost(journal, 100)
    with pytest.raises(LostContact, match="has not answered for"):
        journal.close()
    disk.answers.set()
    until(lambda: names(tmp_path / "j") == [f"n{n}" for n in range(101)], "all lines, in order")


def test_memory_is_bounded(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_file, "MOST_BYTES", 2000)
    journal = Journal(tmp_path / "j", 1)
    disk.free = 0
    with pytest.raises(
        StorageFull, match="lines wait to be written, and memory holds no more: .*No space left"
    ):
        for n in range(100):
            lost(journal, n)
    disk.free = None
    journal.close()
    assert len(names(tmp_path / "j")) > 5
