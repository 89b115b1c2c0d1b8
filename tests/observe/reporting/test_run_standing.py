"""How a run stands is read on from where the last reader was, and is as the whole journal tells
it."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from rich.console import Console
from support.observe.long_run import LongRun
from support.sim.scenario import MODEL, scenario
from support.storage.remote_folder import Remote
from support.waiting import until

from elastic.cli.command_line import main
from elastic.driver import drive
from elastic.errors import JournalDamaged, SpecError
from elastic.ledger import parts as parts_of
from elastic.ledger import segments
from elastic.ledger.journal import Line, MemoryJournal, crc_of
from elastic.ledger.parts import JournalParts
from elastic.ledger.run_folder import RunFolder
from elastic.observe import run_tables
from elastic.observe.accounting import sampled_curve
from elastic.observe.accounting.sampled_curve import SampledCurve
from elastic.observe.diagnosis import evidence
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.reporting import run_standing
from elastic.observe.reporting.run_seen import RunStanding, seen_of, seen_of_run
from elastic.observe.reporting.run_standing import PLACE, standing_of_run
from elastic.observe.status_picture import StatusPicture
from elastic.policy.state.fold import EMPTY, Change, changes
from elastic.sim.sim_backend import SimBackend
from elastic.storage import LocalStorage, Storage
from elastic.types import DriverStarted, Job, StepDone


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of what is kept, also of short runs."""
    monkeypatch.setattr(parts_of, "PART_BYTES", 20_000)
    monkeypatch.setattr(segments, "AGAIN_S", 0.02)
    monkeypatch.setattr(run_standing, "LEAST_LINES", 1)
    monkeypatch.setenv(PLACE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """The lines that were read, those that were read again twice."""
    found: list[Line] = []
    take = run_standing._Readers.take
    monkeypatch.setattr(
        run_standing._Readers, "take", lambda self, line: found.append(line) or take(self, line)
    )
    return found


@pytest.fixture(params=["local", "remote"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> RunFolder:
    local = request.param == "local"
    storage: Storage = LocalStorage(tmp_path / "run") if local else Remote(tmp_path / "bucket")
    return RunFolder(storage, tmp_path / "run")


@pytest.fixture
def local(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStorage(tmp_path / "run"), tmp_path / "run")


class Writer:
    """A driver that writes these lines, a few at a time."""

    def __init__(self, place: RunFolder, lines: Iterator[Line]) -> None:
        self.journal = place.open_journal(1, place.take_over()[1])
        self.lines, self.state = lines, EMPTY

    def write(self, n: int | None = None) -> int:
        """How many there were."""
        found = list(islice(self.lines, n))
        for line in found:
            self.journal.append(line.at_s, line.events, line.decision)
            for change in changes((line,), self.state):
                self.state = change.after
            self.journal.close_part(self.state)
            until(lambda: self.journal.parts.free, "the closed file is packed")  # type: ignore[union-attr]
        self.journal.flush()
        return len(found)


Driver = Callable[[RunFolder, Iterator[Line]], Writer]


@pytest.fixture
def driver() -> Iterator[Driver]:
    made: list[Writer] = []

    def begin(place: RunFolder, lines: Iterator[Line]) -> Writer:
        made.append(Writer(place, lines))
        return made[-1]

    yield begin
    for one in made:
        one.journal.close()


def long_run(seed: int = 1) -> Iterator[Line]:
    return LongRun(2, 160, 10, seed).lines()


def said(seen: RunStanding) -> object:
    """All that `elastic status` can say."""
    view, found = seen.view, verdicts(seen.evidence)
    goodput = seen.account.totals.goodput
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(StatusPicture(seen, "", found))
    return (
        console.export_text(),
        run_tables.status_plain(view, "", goodput=goodput),
        run_tables.status(view, "", "", goodput=goodput),
        run_tables.brief(view, "", goodput),
        [one.plain() for one in found],
        seen.account,
    )


@pytest.mark.slow
def test_it_says_what_the_whole_journal_says_and_reads_each_line_once(
    place: RunFolder, driver: Driver, taken: list[Line]
) -> None:
    writer = driver(place, long_run())
    while writer.write(37):
        assert said(standing_of_run(place)) == said(seen_of_run(place))
    writer.journal.close()
    assert said(standing_of_run(place)) == said(seen_of_run(place))
    assert len(JournalParts.of(place.storage).names) > 3
    assert taken == list(place.lines())


@pytest.mark.parametrize("seed", [3, 8])
def test_of_any_run_it_says_the_same(
    local: RunFolder, driver: Driver, taken: list[Line], seed: int
) -> None:
    job, pools, faults, delays = scenario(seed)
    journal = MemoryJournal()
    start = DriverStarted("random", 1, job, pools, MODEL)
    drive(SimBackend(pools, Job.from_plain(job), faults, delays=delays), journal, start)
    writer = driver(local, iter(journal.lines))
    while writer.write(9):
        assert said(standing_of_run(local)) == said(seen_of_run(local))
    writer.journal.close()
    assert taken == list(local.lines())


def test_where_nothing_can_be_kept_it_reads_all_of_it(
    local: RunFolder, driver: Driver, kept: Path, taken: list[Line]
) -> None:
    kept.write_text("no folder")
    driver(local, long_run()).write()
    n = len(list(local.lines()))
    for _ in range(2):
        assert said(standing_of_run(local)) == said(seen_of_run(local))
    assert len(taken) == 2 * n


def test_of_a_short_journal_nothing_is_kept(
    local: RunFolder, driver: Driver, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_standing, "LEAST_LINES", 2000)
    driver(local, long_run()).write()
    standing_of_run(local)
    assert not kept.exists()


def test_of_its_folder_it_removes_old_files_of_its_own_only(
    local: RunFolder, driver: Driver, kept: Path
) -> None:
    names = "other-12345678.elastic-status", "other-12345678.elastic-status.77"
    own = {kept / name for name in names}
    others = {kept / name for name in ("letter.txt", "other-12345678.json", ".profile")}
    kept.mkdir()
    for file in own | others:
        file.touch()
        os.utime(file, (0, 0))
    driver(local, islice(long_run(), 20)).write()
    standing_of_run(local)
    (left,) = set(kept.iterdir()) - others
    assert others < set(kept.iterdir()) and left not in own


def test_what_it_keeps_of_all_runs_has_a_limit(
    local: RunFolder, driver: Driver, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(local, islice(long_run(), 20)).write()
    standing_of_run(local)
    (own,) = kept.iterdir()
    most = 2 * own.stat().st_size + 50
    monkeypatch.setattr(run_standing, "MOST_BYTES", most)
    for age_s in (300, 200, 100):
        file = kept / f"{age_s}-12345678.elastic-status"
        file.write_bytes(bytes(most // 5))
        os.utime(file, (time.time() - age_s,) * 2)
    own.unlink()
    standing_of_run(local)
    assert {file.name[:3] for file in kept.iterdir()} == {own.name[:3], "100", "200"}


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def other_code(file: Path) -> None:
    text = file.read_bytes()
    at = text.index(b'"code":"') + 8
    text = text[:at] + b"0" * 16 + text[at + 16 :]
    body = text.partition(b"\n")[2]
    file.write_bytes(crc_of(body).encode() + b"\n" + body)


def altered(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"every":1', b'"every":2'))


@pytest.mark.parametrize("harm", [cut, other_code, altered])
def test_what_other_code_has_kept_or_was_damaged_does_not_count(
    local: RunFolder, driver: Driver, kept: Path, taken: list[Line], harm: Callable[[Path], None]
) -> None:
    writer = driver(local, long_run())
    writer.write(200)
    standing_of_run(local)
    (file,) = kept.iterdir()
    harm(file)
    writer.write(10)
    taken.clear()
    assert said(standing_of_run(local)) == said(seen_of_run(local))
    assert taken == list(local.lines())


def test_a_torn_last_line_is_left_out(local: RunFolder, driver: Driver, taken: list[Line]) -> None:
    writer = driver(local, long_run())
    writer.write(100)
    standing_of_run(local)
    writer.write(20)
    with local.journal.open("rb") as file:
        text = file.read()
    for torn in (b'{"v":1,"at_', b'{"v":1,"at_\n'):
        local.journal.write_bytes(text + torn)
        assert said(standing_of_run(local)) == said(seen_of_run(local))
    assert taken == list(local.lines())


@pytest.mark.parametrize("harm", ["flipped", "missing"])
def test_a_part_that_is_damaged_or_missing_is_told_as_before(
    local: RunFolder, driver: Driver, harm: str
) -> None:
    writer = driver(local, long_run())
    writer.write()
    standing_of_run(local)
    key = JournalParts.of(local.storage).names[1].key("xz")
    text = bytearray(local.storage.get(key))
    text[len(text) // 2] ^= 4
    if harm == "missing":
        local.storage.delete(key)
    else:
        local.storage.put(key, bytes(text))
    with pytest.raises(JournalDamaged) as whole:
        seen_of_run(local)
    with pytest.raises(JournalDamaged) as found:
        standing_of_run(local)
    assert str(found.value) == str(whole.value)


def test_an_altered_line_and_an_emptied_journal_are_told_as_before(
    local: RunFolder, driver: Driver
) -> None:
    driver(local, islice(long_run(), 20)).write()
    standing_of_run(local)
    text = local.journal.read_text()
    local.journal.write_text(text.replace('"step":9', '"step":8', 1))
    with pytest.raises(JournalDamaged) as whole:
        seen_of_run(local)
    with pytest.raises(JournalDamaged) as found:
        standing_of_run(local)
    assert str(found.value) == str(whole.value)
    local.journal.write_text("")
    with pytest.raises(SpecError, match="holds no line of a journal"):
        standing_of_run(local)


def test_another_run_of_that_name_is_read_from_its_beginning(
    local: RunFolder, driver: Driver
) -> None:
    driver(local, long_run()).write()
    standing_of_run(local)
    local.storage.delete_folder()
    driver(local, long_run(7)).write(50)
    assert said(standing_of_run(local)) == said(seen_of_run(local))


def test_of_very_many_steps_an_even_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seen_of(LongRun(3, 900, 4).lines())
    for module in (sampled_curve, evidence):
        monkeypatch.setattr(module, "MOST", 64)
    part = seen_of(LongRun(3, 900, 4).lines())
    curve, trend = whole.view.curve(), part.trend
    kept = [p for p in curve if p.step in trend.steps]
    assert trend.every > 8 and 32 <= len(kept) <= 64
    assert list(trend.steps) == [p.step for p in kept]
    assert list(trend.losses) == [p.train_loss for p in kept]
    gaps = [b.step - a.step for a, b in pairwise(kept)]
    assert kept[0].step == curve[0].step and max(gaps) < 2 * trend.every
    some, every = part.evidence.main, whole.evidence.main
    assert some is not None and every is not None
    assert some.spent_s == every.spent_s and some.n_seen == every.n_seen
    assert 32 <= len(some.steps_s) <= 64 and len(some.computing_s) <= 64
    assert some.step_s == pytest.approx(every.step_s, rel=0.02)


@pytest.mark.parametrize("between", [2, 10, 100])
def test_an_even_part_is_kept_of_steps_with_any_numbers(
    monkeypatch: pytest.MonkeyPatch, between: int
) -> None:
    """All odd, as of a log line after 99 steps, 199 and so on."""
    monkeypatch.setattr(sampled_curve, "MOST", 64)
    trend, numbers = SampledCurve(), range(between - 1, 1000 * between, between)
    for n, step in enumerate(numbers):
        done = StepDone(1, step, 1.0, 8, 0.1)
        after = replace(EMPTY, last_step=done)
        trend.take(Change(EMPTY, done, 0.0, after))
        assert min(n, 32) <= len(trend.steps) <= 64
    assert list(trend.steps) == list(numbers[:: trend.every])


def test_the_trend_is_of_the_steps_that_count() -> None:
    whole = seen_of(long_run())
    trend, curve = SampledCurve(), whole.view.curve()
    for change in changes(long_run()):
        trend.take(change)
    assert list(trend.steps) == [p.step for p in curve]
    assert list(trend.rates) == [p.tokens / p.step_time_s for p in curve]


def test_a_long_reading_that_is_interrupted_is_not_for_nothing(
    local: RunFolder, driver: Driver, taken: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(local, long_run()).write()
    whole, take = list(local.lines()), run_standing._Readers.take
    monkeypatch.setattr(run_standing, "KEEP_S", -1.0)

    def interrupted(self: object, line: Line) -> None:
        if line == whole[-30]:
            raise KeyboardInterrupt
        take(self, line)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_standing._Readers, "take", interrupted)
        standing_of_run(local)
    taken.clear()
    assert said(standing_of_run(local)) == said(seen_of_run(local))
    assert 30 <= len(taken) < len(whole) / 2 and taken == whole[-len(taken) :]


def test_elastic_status_reads_each_line_once(
    local: RunFolder, driver: Driver, taken: list[Line], capsys: pytest.CaptureFixture[str]
) -> None:
    driver(local, islice(long_run(), 40)).write()
    said = set()
    for _ in range(3):
        assert main(["status", str(local.folder), "--json"]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1 and taken == list(local.lines())


class Deep(LongRun):
    """A loss goes back far."""

    def _enter(self, step: int, lost: int) -> Iterator[Line]:
        return (yield from super()._enter(step, min(step, 30) if lost else 0))


def test_where_more_was_undone_than_is_kept_the_whole_journal_is_read(
    local: RunFolder, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_standing, "KEPT_STEPS", 25)
    writer = driver(local, Deep(2, 160, 2, 4).lines())
    while writer.write(23):
        assert said(standing_of_run(local)) == said(seen_of_run(local))
    assert max(one.steps_lost for one in seen_of_run(local).account.transitions) == 30
