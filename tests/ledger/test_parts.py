"""A journal whose file was closed and packed again and again is read as if it had stayed one file,
and resumed from a State."""

from __future__ import annotations

import errno
import json
import lzma
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.sim.scenario import MODEL, scenario
from support.storage.remote_folder import Remote
from support.waiting import until

from elastic.driver import drive, restored
from elastic.errors import JournalDamaged, SpecError
from elastic.ledger import append_file, segments
from elastic.ledger import parts as parts_of
from elastic.ledger.journal import CLOSED, Journal, Line, MemoryJournal, built, plain, read_text
from elastic.ledger.parts import PREFIX, JournalParts, pack, unpack
from elastic.ledger.run_folder import JOURNAL, STORED_AT, RunFolder
from elastic.observe import find_runs, run_tables
from elastic.observe.accounting.accounts import account
from elastic.observe.run_view import view_of
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage, Storage
from elastic.types import DriverStarted, Job, NodeLost

SEED = 3
Recorded = Callable[..., tuple[list[Line], State]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_of, "PART_BYTES", 3000)
    monkeypatch.setattr(segments, "AGAIN_S", 0.02)


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    storage: Storage = (
        LocalStorage(tmp_path / "run") if request.param == "local" else Remote(tmp_path / "bucket")
    )
    return RunFolder(storage, tmp_path / "run")


class Follows(MemoryJournal):
    """Writes what it is told to a journal too, and waits until a closed file is packed."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal.epoch)
        self.journal = journal

    def append(self, at_s, events, decision=None) -> None:  # type: ignore[no-untyped-def]
        super().append(at_s, events, decision)
        self.journal.append(at_s, events, decision)

    def close_part(self, state: State) -> None:
        def small() -> bool:
            # does nothing while the thread that stores the lines is still busy
            self.journal.close_part(state)
            return self.journal._file.end < parts_of.PART_BYTES

        until(small, "a large file is closed")
        parts = self.journal.parts
        until(lambda: parts is None or parts.free, "the closed file is packed")

    def close(self) -> None:
        self.journal.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A whole run in a place: once for a seed and a kind of storage, then copies of its folders."""
    known: dict[object, tuple[Path, tuple[list[Line], State]]] = {}

    def of(place: RunFolder, seed: int = SEED) -> tuple[list[Line], State]:
        kind = type(place.storage)
        if (kind, seed) not in known:
            kept = tmp_path_factory.mktemp("run")
            there = RunFolder(kind(kept / place.storage.root.name), kept / place.folder.name)
            known[kind, seed] = kept, record(there, seed)
        kept, found = known[kind, seed]
        shutil.copytree(kept, place.folder.parent, dirs_exist_ok=True)
        if (place.folder / STORED_AT).exists():
            (place.folder / STORED_AT).write_text(place.storage.uri)
        return found

    return of


def record(place: RunFolder, seed: int) -> tuple[list[Line], State]:
    job, pools, faults, delays = scenario(seed)
    before, stored = place.take_over()
    assert before == []
    journal = Follows(place.open_journal(1, stored))
    state = drive(
        SimBackend(pools, Job.from_plain(job), faults, delays=delays),
        journal,
        DriverStarted("random", 1, job, pools, MODEL),
    )
    return journal.lines, state


def events_of(lines: list[Line]) -> list[object]:
    """What happened, however it was divided into lines."""
    return [
        item
        for line in lines
        for item in (*line.events, *([line.decision] if line.decision else []))
    ]


def test_every_line_is_kept_and_every_decision_comes_out_again(
    place: RunFolder, recorded: Recorded
) -> None:
    lines, state = recorded(place)
    names = JournalParts.of(place.storage).names
    assert (
        len(names) > 3
        and place.journal.stat().st_size < 6000
        and not (place.folder / CLOSED).exists()
    )
    found = list(place.lines())
    assert [e for line in found for e in line.events] == [e for line in lines for e in line.events]
    again = replay(place.lines())
    assert again.identical and again.state == state
    assert account(place.lines()) == account(found)
    assert list(RunFolder(place.storage, place.folder).lines()) == found


@pytest.mark.parametrize("seed", [3, 8, 11, 42])
def test_the_state_of_a_part_is_the_one_that_the_whole_journal_gives(
    tmp_path: Path, seed: int, recorded: Recorded
) -> None:
    place = RunFolder(LocalStorage(tmp_path / "run"), tmp_path / "run")
    _, state = recorded(place, seed)
    before, _ = place.take_over()
    assert before[0].state is not None and restored(before) == state
    whole, tail = list(place.lines()), before[1:]
    assert len(tail) < len(whole) / 2 and whole[len(whole) - len(tail) :] == tail
    assert built(State, plain(state)) == state


@pytest.mark.parametrize("seed", [3, 8, 11, 42])
def test_how_a_run_is_now_is_told_without_its_older_parts(
    place: RunFolder, seed: int, recorded: Recorded
) -> None:
    """Also where no step was told of since the newest State."""
    recorded(place, seed)
    whole = find_runs.view(place)
    for key in JournalParts.of(place.storage).names[:-1]:
        place.storage.put(key.key("xz"), b"not read")
    for now in (find_runs.now(place), view_of(place.newest()[:1])):
        assert (now.step, now.reached) == (now.state.step, now.state.step)
        assert now.points[-1].step == now.step and now.points[-1].train_loss > 0
    now = find_runs.now(place)
    assert now.state == whole.state and now.points[-1] == whole.points[-1]
    assert (now.phase, now.step, now.plan) == (whole.phase, whole.step, whole.plan)
    assert run_tables.loss(now) == run_tables.loss(whole)
    assert {n for n in whole.nodes.values() if n.status != "lost"} == {
        n for n in now.nodes.values() if n.status != "lost"
    }


def test_a_damaged_state_is_passed_over(
    place: RunFolder, caplog: pytest.LogCaptureFixture, recorded: Recorded
) -> None:
    _, state = recorded(place)
    states = [key for key in place.storage.list(PREFIX) if key.endswith(".state")]
    assert len(states) == parts_of.KEPT_STATES
    for n, key in enumerate(reversed(states), start=1):
        text = bytearray(place.storage.get(key))
        text[len(text) // 2] ^= 4
        place.storage.put(key, bytes(text))
        before, _ = place.take_over()
        assert restored(before) == state
        assert (before[0].state is None) == (n == len(states)), "at last the whole journal"
        assert Path(key).name in caplog.text


@pytest.mark.parametrize("harm", ["flipped", "cut", "missing"])
def test_a_damaged_part_is_named_and_a_resume_needs_only_what_came_after(
    place: RunFolder, harm: str, recorded: Recorded
) -> None:
    _, state = recorded(place)
    key = JournalParts.of(place.storage).names[1].key("xz")
    text = bytearray(place.storage.get(key))
    text[len(text) // 2] ^= 4
    if harm == "missing":
        place.storage.delete(key)
    else:
        place.storage.put(key, bytes(text if harm == "flipped" else text[:-9]))
    with pytest.raises(
        JournalDamaged, match=r"part 1 .* is missing" if harm == "missing" else "was altered"
    ):
        list(place.lines())
    if harm != "missing":
        assert restored(place.take_over()[0]) == state


def left_closed(place: RunFolder) -> None:
    """The driver ended before the closed file was packed."""
    text = place.journal.read_bytes()
    cut = text.index(b"\n") + 1
    (place.folder / CLOSED).write_bytes(text[:cut])
    place.journal.write_bytes(text[cut:])


def linked(place: RunFolder) -> None:
    """It ended before the next file began."""
    (place.folder / CLOSED).write_bytes(place.journal.read_bytes())


def packed(place: RunFolder) -> None:
    """It ended when the part was stored, and the file that it was made of was still there."""
    parts = JournalParts.of(place.storage)
    (place.folder / CLOSED).write_bytes(parts.read(parts.names[-1])[1])


@pytest.mark.parametrize("ended", [left_closed, linked, packed])
def test_wherever_the_driver_ends_nothing_is_lost_or_read_twice(
    place: RunFolder, ended: Callable[[RunFolder], None], recorded: Recorded
) -> None:
    recorded(place)
    journal = place.open_journal(2, place.take_over()[1])
    # the last file may have been closed a moment ago
    journal.append(1e6, [(1e6, NodeLost("w", "gone"))])
    journal.close()
    whole = list(place.lines())
    state = restored(whole)
    ended(place)
    assert list(place.lines()) == whole
    before, stored = place.take_over()
    assert restored(before) == state and not (place.folder / CLOSED).exists()
    journal = place.open_journal(3, stored)
    journal.append(1e6, [(1e6, NodeLost("x", "gone"))])
    journal.close()
    assert list(place.lines())[:-1] == whole


def test_a_torn_line_at_the_beginning_of_a_file_is_left_out(tmp_path: Path) -> None:
    place = RunFolder(LocalStorage(tmp_path / "run"), tmp_path / "run")
    journal = place.open_journal(1, place.take_over()[1])
    journal.append(1.0, [(1.0, NodeLost("x", "g" * 3000))])
    journal.close_part(State())
    journal.close()
    assert place.journal.read_bytes() == b""
    place.journal.write_bytes(b'{"v":1,"at_')
    journal = place.open_journal(2, place.take_over()[1])
    journal.append(2.0, [(2.0, NodeLost("y", "gone"))])
    journal.close()
    assert [line.at_s for line in place.lines()] == [1.0, 2.0]
    assert [line.at_s for line in place.take_over()[0]] == [1.0, 2.0], (
        "the State, and the line after it"
    )


def test_a_part_of_a_driver_that_was_replaced_does_not_count(tmp_path: Path) -> None:
    storage = Remote(tmp_path / "bucket")
    here, there = RunFolder(storage, tmp_path / "a"), RunFolder(storage, tmp_path / "b")
    old = here.open_journal(1, here.take_over()[1])
    old.append(1.0, [(1.0, NodeLost("x", "g" * 3000))])
    assert old.segments is not None and old.segments.store(old._file.end)
    new = there.open_journal(2, there.take_over()[1])
    new.append(2.0, [(2.0, NodeLost("y", "gone"))])
    assert new.segments is not None and new.segments.store(new._file.end)
    old.append(3.0, [(3.0, NodeLost("z", "gone"))])
    old.close_part(State())
    until(lambda: old.parts is not None and old.parts.free, "the part is packed")
    assert JournalParts.of(storage).names
    other = RunFolder(storage, tmp_path / "c")
    assert [line.at_s for line in other.lines()] == [1.0, 2.0]
    assert restored(other.take_over()[0]) == restored(list(other.lines()))
    old.close()
    new.close()


def test_what_is_packed_comes_back_byte_by_byte() -> None:
    chance = random.Random(0)
    pieces = [
        b'{"v":1,"a":1.5,"b":-2e-07,"c":"00ff00ff00"}',
        b"100 % of %s",
        b'"\xc3\xa9',
        b"{",
        b"",
        b" ",
        b"0",
        b"-",
    ]
    for _ in range(60):
        text = b"".join(
            b"".join(chance.choices(pieces, k=chance.randrange(4))) + b"\n"
            for _ in range(chance.randrange(9))
        )
        for one in (text, text + b"torn", text + b"\0\n"):
            assert unpack(pack(one, {"1": 2})) == ({"1": 2}, one)


def test_a_part_of_a_newer_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(parts_of, "VERSION", 2)
        data = pack(b"a\n")
    with pytest.raises(SpecError, match="version 2 is newer than 1"):
        unpack(data)


def streamed(*pieces: bytes, times: int = 1) -> bytes:
    one = lzma.LZMACompressor()
    return b"".join([one.compress(piece) for piece in pieces * times]) + one.flush()


def bombs() -> dict[str, bytes]:
    """A few bytes for many: as compressed, and by lines that are one form, or by forms of none."""
    head = {"v": 1, "n_bytes": 64 << 20, "crc": 0, "counted": {}}
    one_form = json.dumps({**head, "forms": [[640, 0, False]]}).encode()
    no_lines = json.dumps({**head, "forms": [[0, 500, False]] * 500}).encode()
    return {
        "zeros": streamed(bytes(1 << 20), times=64),
        "one form": streamed(one_form + b"\n", b"x" * 100_000, b"\n0" * 640),
        "no lines": streamed(no_lines + b"\n", b"x\n" * 1000),
    }


@pytest.mark.parametrize("kind", ["zeros", "one form", "no lines"])
def test_a_part_that_stands_for_more_than_one_may_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    data, storage = bombs()[kind], LocalStorage(tmp_path)
    assert len(data) < 1 << 16
    monkeypatch.setattr(parts_of, "UNPACKED_MOST_BYTES", 1 << 20)
    storage.put(parts_of.Name(0, 1).key("xz"), data)
    parts = JournalParts.of(storage)
    tracemalloc.start()
    try:
        with pytest.raises(JournalDamaged, match="stands for more|lines that are not there"):
            parts.read(parts.names[0])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_part_that_nobody_would_unpack_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is in the journal's segments still."""
    monkeypatch.setattr(parts_of, "UNPACKED_MOST_BYTES", 1 << 10)
    assert unpack(pack(b"a\n" * 100))[1] == b"a\n" * 100
    with pytest.raises(ValueError, match="stands for more"):
        pack(b"a\n" * 1000)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"])
def test_a_part_that_was_cut_or_added_to_is_none(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match="ends too early|stands behind"):
        unpack(change(pack(b"a\n")))


def test_an_old_journal_is_read_as_it_was(tmp_path: Path, recorded: Recorded) -> None:
    _, state = recorded(RunFolder(LocalStorage(tmp_path / "run"), tmp_path / "run"))
    place = RunFolder(LocalStorage(tmp_path / "old"), tmp_path / "old")
    parts = JournalParts.of(LocalStorage(tmp_path / "run"))
    text = (
        b"".join(parts.read(name)[1] for name in parts.names)
        + (tmp_path / "run" / JOURNAL).read_bytes()
    )
    LocalStorage(place.folder).put(JOURNAL, text)
    assert place.lines() == read_text(text, "") and restored(place.take_over()[0]) == state


class Refusing:
    """Stands in for `os` of the file that is appended to. `call` raises while `code` is set."""

    def __init__(self, call: str, code: int) -> None:
        self.call, self.code, self.n_asked = call, code, 0

    def __getattr__(self, name: str) -> object:
        return self._asked if name == self.call else getattr(os, name)

    def _asked(self, *given: Any) -> object:
        if self.call == "open" and CLOSED not in str(given[0]):
            return os.open(*given)
        self.n_asked += 1
        if self.code:
            raise OSError(self.code, os.strerror(self.code))
        return getattr(os, self.call)(*given)


def told(journal: Journal, at_s: float, n_bytes: int = 3000) -> None:
    journal.append(at_s, [(at_s, NodeLost("x", "g" * n_bytes))])
    journal.close_part(State())
    until(lambda: journal.parts is not None and journal.parts.free, "the closed file is packed")


@pytest.fixture
def local(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStorage(tmp_path / "run"), tmp_path / "run")


@pytest.mark.parametrize(
    ("call", "code"), [("open", errno.ENOSPC), ("link", errno.EIO), ("replace", errno.EIO)]
)
def test_a_file_that_cannot_be_closed_grows_until_it_can(
    local: RunFolder,
    call: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal = local.open_journal(1, local.take_over()[1])
    here = Refusing(call, code)
    monkeypatch.setattr(append_file, "os", here)
    for at_s, n_bytes, n_asked in ((1.0, 3000, 1), (2.0, 10, 1), (3.0, 400, 2)):
        told(journal, at_s, n_bytes)
        assert here.n_asked == n_asked and {path.name for path in local.folder.iterdir()} == {
            JOURNAL
        }
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{local.journal} cannot be closed ([Errno {code}] ")
    here.code = 0
    told(journal, 4.0, 400)
    journal.close()
    assert len(JournalParts.of(local.storage).names) == 1 and not local.journal.read_bytes()
    assert [line.at_s for line in local.lines()] == [1.0, 2.0, 3.0, 4.0]


def test_a_file_is_closed_where_there_are_no_hard_links(
    local: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = local.open_journal(1, local.take_over()[1])
    here = Refusing("link", errno.EPERM)
    seen: list[tuple[bool, list[float]]] = []

    def replaced(*given: Any) -> None:
        seen.append((local.journal.exists(), [line.at_s for line in local.lines()]))
        os.replace(*given)

    monkeypatch.setattr(here, "replace", replaced, raising=False)
    monkeypatch.setattr(append_file, "os", here)
    told(journal, 1.0)
    told(journal, 2.0, 10)
    journal.close()
    assert seen == [(False, [1.0])], "all of it is read while only the closed file is there"
    assert len(JournalParts.of(local.storage).names) == 1
    assert [line.at_s for line in local.lines()] == [1.0, 2.0]


def test_parts_are_packed_also_while_nothing_can_be_removed(
    local: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: LocalStorage, key: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", key)

    journal = local.open_journal(1, local.take_over()[1])
    with monkeypatch.context() as denied:
        denied.setattr(LocalStorage, "delete", refuse)
        for at_s in range(5):
            told(journal, float(at_s))
    parts = JournalParts.of(local.storage)
    assert (len(parts.names), len(parts.states)) == (5, 5)
    assert "what is packed was not removed yet ([Errno 13] Permission denied" in caplog.text
    told(journal, 5.0)
    journal.close()
    parts = JournalParts.of(local.storage)
    assert (len(parts.names), len(parts.states)) == (6, parts_of.KEPT_STATES)
    assert [line.at_s for line in local.lines()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
