"""Whoever follows a journal reads every line once, wherever the driver is: before its newline, in
another file, in object storage, or gone and followed by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sim.scenario import MODEL, scenario
from support.storage.remote_folder import Remote
from support.waiting import until

from elastic.driver import drive
from elastic.errors import JournalDamaged, SpecError
from elastic.ledger import parts as parts_of
from elastic.ledger import segments
from elastic.ledger.journal import CLOSED, Journal, Line, MemoryJournal, Sieve, write_line
from elastic.ledger.journal_growth import JournalGrowth
from elastic.ledger.run_folder import RunFolder
from elastic.policy.state.fold import State
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage, Storage
from elastic.types import DriverStarted, Job, NodeLost


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_of, "PART_BYTES", 3000)
    monkeypatch.setattr(segments, "AGAIN_S", 0.02)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    local = request.param == "local"
    storage: Storage = LocalStorage(tmp_path / "run") if local else Remote(tmp_path / "bucket")
    return RunFolder(storage, tmp_path / "run")


class Watched(MemoryJournal):
    """Writes a journal whose parts are closed soon, and has it read after each line."""

    def __init__(self, journal: Journal, growth: JournalGrowth) -> None:
        super().__init__(journal.epoch)
        self.journal, self.growth = journal, growth
        self.read: list[Line] = []

    def append(self, at_s, events, decision=None) -> None:  # type: ignore[no-untyped-def]
        super().append(at_s, events, decision)
        self.journal.append(at_s, events, decision)
        if len(self.lines) % 3 == 0:
            self.read += self.growth.look()

    def close_part(self, state: State) -> None:
        def small() -> bool:
            self.journal.close_part(state)
            return self.journal._file.end < parts_of.PART_BYTES

        until(small, "a large file is closed")
        self.read += self.growth.look()
        parts = self.journal.parts
        until(lambda: parts is None or parts.free, "the closed file is packed")

    def close(self) -> None:
        self.journal.close()


def test_every_line_is_read_once_while_it_is_written(place: RunFolder) -> None:
    job, pools, faults, delays = scenario(3)
    stored = place.take_over()[1]
    watched = Watched(place.open_journal(1, stored), JournalGrowth(place))
    start = DriverStarted("random", 1, job, pools, MODEL)
    drive(SimBackend(pools, Job.from_plain(job), faults, delays=delays), watched, start)
    watched.close()
    watched.read += watched.growth.look()
    assert len(parts_of.JournalParts.of(place.storage).names) > 3
    assert watched.read == list(place.lines())
    assert watched.growth.begun == 1
    assert list(watched.growth.look()) == []
    assert list(JournalGrowth(place).look()) == watched.read  # who comes later reads the same


def line(at_s: float, epoch: int = 1) -> Line:
    return Line(at_s, epoch, ((at_s, NodeLost(f"n{at_s:.0f}")),))


@pytest.fixture
def local(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStorage(tmp_path), tmp_path)


def test_a_cut_line_waits_for_its_end(local: RunFolder) -> None:
    texts = [write_line(line(1)), write_line(line(2))]
    local.journal.write_text(texts[0] + "\n" + texts[1][:-9])
    growth = JournalGrowth(local)
    assert list(growth.look()) == [line(1)]
    local.journal.write_text(texts[0] + "\n" + texts[1])  # whole but for its newline
    assert list(growth.look()) == [line(2)]
    local.journal.write_text(texts[0] + "\n" + texts[1] + "\n")
    assert list(growth.look()) == [] and not growth.trouble and growth.begun == 1


def test_a_cut_line_of_a_driver_that_died_is_left_out(local: RunFolder) -> None:
    journal = Journal(local.journal, 1)
    journal.append(1, [(1, NodeLost("a"))])
    journal.close()
    growth = JournalGrowth(local)
    assert len(list(growth.look())) == 1
    with local.journal.open("a") as file:
        file.write(write_line(line(2))[:40])
    assert list(growth.look()) == []
    again = Journal(local.journal, 2)
    again.append(3, [(3, NodeLost("b"))])
    again.close()
    assert [one.epoch for one in growth.look()] == [2]
    assert not growth.trouble and growth.begun == 1


def test_an_altered_line_is_told_with_its_number_and_what_stands_before_counts(
    local: RunFolder,
) -> None:
    texts = [write_line(line(n)) for n in range(1, 6)]
    local.journal.write_text("\n".join(texts[:2]) + "\n")
    growth = JournalGrowth(local)
    assert len(list(growth.look())) == 2
    texts[2] = texts[2].replace("n3", "n7")
    local.journal.write_text("\n".join(texts) + "\n")
    assert list(growth.look()) == []
    assert "line 3: it was altered" in growth.trouble


def test_a_journal_that_was_cut_is_read_from_its_beginning(local: RunFolder) -> None:
    local.journal.write_text("".join(write_line(line(n)) + "\n" for n in range(1, 6)))
    growth = JournalGrowth(local)
    assert len(list(growth.look())) == 5
    kept = [line(1), line(9)]
    local.journal.write_text("".join(write_line(one) + "\n" for one in kept))
    assert list(growth.look()) == kept
    assert growth.begun == 2


def test_a_newer_version_is_refused(local: RunFolder) -> None:
    local.journal.write_text('{"v": 9, "at_s": 1}\n')
    with pytest.raises(SpecError, match="schema version 9 is newer"):
        list(JournalGrowth(local).look())


def test_segments_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Remote(tmp_path / "bucket")
    place = RunFolder(storage, tmp_path / "run")
    journal = place.open_journal(1, place.take_over()[1])
    fetched: list[str] = []
    get = storage.get
    monkeypatch.setattr(storage, "get", lambda key: fetched.append(key) or get(key))
    growth = JournalGrowth(RunFolder(storage, tmp_path / "elsewhere"))
    read = []
    for n in range(1, 6):
        journal.append(n, [(n, NodeLost(f"n{n}"))])
        journal.segments.store(journal._file.end)  # type: ignore[union-attr]
        read += list(growth.look())
    journal.close()
    assert [one.at_s for one in read] == [1, 2, 3, 4, 5]
    segment_keys = [key for key in fetched if key.startswith("journal/")]
    assert len(segment_keys) == len(set(segment_keys)) >= 5


def test_of_a_file_that_grows_only_the_new_bytes_are_read(
    local: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Months of a run are looked at every second."""
    local.journal.write_text("".join(write_line(line(n)) + "\n" for n in range(1, 200)))
    growth = JournalGrowth(local)
    assert len(list(growth.look())) == 199
    monkeypatch.setattr(RunFolder, "parts_and_text", None)  # reads all of it
    taken = list[int]()
    read = Sieve.lines

    def lines(sieve: Sieve, text: bytes) -> Iterator[Line]:
        taken.append(len(text))
        return read(sieve, text)

    monkeypatch.setattr(Sieve, "lines", lines)
    for n in range(200, 205):
        with local.journal.open("a") as file:
            file.write(write_line(line(n)) + "\n")
        assert list(growth.look()) == [line(n)]
    assert taken == [len(write_line(line(n))) + 1 for n in range(200, 205)]


def closed_and_read(place: RunFolder) -> tuple[JournalGrowth, list[Line]]:
    """A reader came when a file was closed, and not packed yet."""
    texts = ["".join(write_line(line(n)) + "\n" for n in numbers) for numbers in ((1, 2), (3, 4))]
    (place.folder / CLOSED).write_text(texts[0])
    place.journal.write_text(texts[1])
    growth = JournalGrowth(place)
    return growth, list(growth.look())


def packed(place: RunFolder, number: int) -> None:
    text = (place.folder / CLOSED).read_bytes()
    place.storage.put(parts_of.Name(number, 1).key("xz"), parts_of.pack(text))
    (place.folder / CLOSED).unlink()


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_was_read_while_it_was_packed_is_not_read_again(
    local: RunFolder, kept: bool
) -> None:
    """That of months was read from its first line every few hours."""
    growth, read = closed_and_read(local)
    if kept:  # by another reader
        growth = JournalGrowth(local, growth.place)
    packed(local, 0)
    with local.journal.open("a") as file:
        file.write(write_line(line(5)) + "\n")
    local.journal.rename(local.folder / CLOSED)
    local.journal.write_text(write_line(line(6)) + "\n")
    packed(local, 1)
    assert [one.at_s for one in (*read, *growth.look())] == [1, 2, 3, 4, 5, 6]
    assert growth.begun == 1 and not growth.trouble


def test_who_comes_later_continues_from_a_place(local: RunFolder) -> None:
    growth, _ = closed_and_read(local)
    with local.journal.open("a") as file:
        file.write(write_line(line(5)) + "\n")
    later = JournalGrowth(local, growth.place)
    assert list(later.look()) == [line(5)] and later.begun == 1
    packed(local, 0)
    place = later.place
    assert place is not None and list(JournalGrowth(local, place).look()) == []
    key = parts_of.Name(0, 1).key("xz")
    list(later.look())
    place = later.place
    text = bytearray(local.storage.get(key))
    text[len(text) // 2] ^= 4
    local.storage.put(key, bytes(text))
    again = JournalGrowth(local, place)
    with pytest.raises(JournalDamaged, match="was altered"):
        list(again.look())
