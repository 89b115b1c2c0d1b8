"""Whoever reads a journal while its driver writes and packs it sees every line that was there when
it began, and each once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from support.cases import meeting
from support.storage.remote_folder import Remote
from support.waiting import until

from elastic.errors import JournalDamaged
from elastic.ledger import parts, run_folder, segments
from elastic.ledger.append_file import Appender
from elastic.ledger.journal import Journal
from elastic.ledger.parts import Packing
from elastic.ledger.run_folder import RunFolder
from elastic.ledger.segments import PREFIX, Segments, read_stored
from elastic.policy.state.fold import State
from elastic.storage import LocalStorage, Storage
from elastic.types import NodeLost


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 3000)
    monkeypatch.setattr(segments, "EVERY_S", 3600.0)
    monkeypatch.setattr(segments, "AGAIN_S", 0.02)


class Driver:
    """Its lines have the times 1, 2, 3, ..."""

    def __init__(self, place: RunFolder, epoch: int = 1) -> None:
        before, stored = place.take_over()
        self.n = int(before[-1].at_s) if before else 0
        self.journal: Journal = place.open_journal(epoch, stored)

    def write(self) -> None:
        self.n += 1
        self.journal.append(float(self.n), [(float(self.n), NodeLost("x", "g" * 1200))])
        if self.journal.segments is not None:
            assert self.journal.segments.store(self.journal._file.end)

    def close_part(self, packed: bool = True) -> None:
        """A file of three lines more is closed and `packed`."""
        for _ in range(3):
            self.write()
        journal = self.journal

        def closed() -> bool:
            journal.close_part(State())
            return journal._file.end == 0

        until(closed, "a file that is closed")
        until(
            lambda: not packed or journal.parts is None or journal.parts.free,
            "a part that is packed",
        )


class Interleaved:
    """Something happens right before one of the looks that a reader takes: at files, at the
    storage. What happens right after one happens before the next."""

    def __init__(self, at: int, happens: Callable[[], None]) -> None:
        self.at, self.happens, self.n = at, happens, 0

    def look(self, plain: Callable[..., object]) -> Callable[..., object]:
        def looked(*arguments: object) -> object:
            self.n += 1
            if self.n == self.at:
                self.happens()
            return plain(*arguments)

        return looked


def read_with(place: RunFolder, one: Interleaved) -> list[float]:
    """The times of the lines, as they are read meanwhile."""
    storage = type(place.storage)(place.storage.root)  # type: ignore[attr-defined,call-arg]
    for name in ("list", "get"):
        setattr(storage, name, one.look(getattr(storage, name)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "_text", one.look(run_folder._text))
        found = RunFolder(storage, place.folder).lines()
    return [line.at_s for line in found]


@pytest.mark.parametrize(
    ("where", "meanwhile", "before"),
    meeting(
        ["local", "remote, here", "remote, elsewhere"],
        ["closed", "packed", "2 packed", "3 packed"],
        [0, 2],
    ),
)
def test_each_line_is_read_once_whatever_is_written_meanwhile(
    tmp_path: Path, where: str, meanwhile: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_pack, pack = threading.Event(), Packing._pack
    monkeypatch.setattr(
        Packing, "_pack", lambda *given, **named: may_pack.wait() and pack(*given, **named)
    )
    for at in count(1):
        run = tmp_path / str(at)
        storage: Storage = (
            LocalStorage(run) if where == "local" else Remote(tmp_path / f"bucket{at}")
        )
        driver = Driver(RunFolder(storage, run))
        may_pack.set()
        for _ in range(before):
            driver.close_part()
        driver.write()
        there = driver.n

        def happens(driver: Driver = driver) -> None:
            if meanwhile == "closed":
                may_pack.clear()
            for _ in range(1 if meanwhile in ("closed", "packed") else int(meanwhile[0])):
                driver.close_part(may_pack.is_set())
            driver.write()

        one = Interleaved(at, happens)
        found = read_with(
            RunFolder(storage, run if "elsewhere" not in where else tmp_path / "empty"), one
        )
        assert there <= len(found) <= driver.n and found == [
            float(n) for n in range(1, len(found) + 1)
        ], at
        may_pack.set()
        driver.journal.close()
        if one.n < at:
            break
    assert at > 4, "the reader was interrupted nowhere"


def test_the_thread_that_stores_reads_no_file_that_is_being_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been woken for lines that it has stored already."""
    storage = Remote(tmp_path / "bucket")
    driver = Driver(RunFolder(storage, tmp_path / "a"))
    stores = driver.journal.segments
    assert stores is not None
    plain, tried = Appender.begin_anew, []

    def woken(file: Appender, closed: Path) -> None:
        tried.append(stores._working.acquire(blocking=False))
        if tried[-1]:  # what the thread does
            stores._store()
            stores._working.release()
        plain(file, closed)

    monkeypatch.setattr(Appender, "begin_anew", woken)
    driver.close_part()
    driver.write()
    elsewhere = RunFolder(storage, tmp_path / "b")
    assert [line.at_s for line in elsewhere.lines()] == [1.0, 2.0, 3.0, 4.0]
    driver.journal.close()
    assert tried == [False]


def test_objects_that_are_merged_while_they_are_listed_are_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FAN", 2)
    monkeypatch.setattr(Segments, "_merge", lambda self: None)
    storage = Remote(tmp_path / "bucket")
    driver = Driver(RunFolder(storage, tmp_path / "a"))
    for _ in range(3):
        driver.write()
    before = storage.list(PREFIX)
    monkeypatch.undo()
    monkeypatch.setattr(segments, "FAN", 2)
    assert driver.journal.segments is not None
    with driver.journal.segments._working:
        driver.journal.segments._kept, last = (
            driver.journal.segments._kept[:2],
            driver.journal.segments._kept[2:],
        )
        driver.journal.segments._merge()
        driver.journal.segments._kept += last
    whole = storage.list(PREFIX)
    # the large one came behind where the listing was
    seen = iter([[key for key in before if key in whole], whole])
    reader = Remote(tmp_path / "bucket")
    reader.list = lambda prefix="": next(seen)  # type: ignore[method-assign]
    assert (
        read_stored(reader).text == read_stored(storage).text
        and len(read_stored(storage).pieces) == 3
    )
    driver.journal.close()
    reader.list = lambda prefix="": before[2:]  # type: ignore[method-assign]
    with pytest.raises(JournalDamaged, match="is missing"):
        read_stored(reader)
