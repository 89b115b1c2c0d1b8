"""metrics.csv, TensorBoard's files and the callback: every step that counts once, whatever was
undone or resumed."""

from __future__ import annotations

import errno
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from support.observe.small_run import lines
from support.places import ROOT
from support.storage.remote_folder import Remote
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from elastic.errors import StorageFailed, StorageRefused
from elastic.ledger import heard_lines
from elastic.ledger.journal import Journal, Line, plain
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics import metrics_files, retried_writes, stored_copies, tensorboard_files
from elastic.observe.metrics.metrics_csv import CSV
from elastic.observe.metrics.metrics_files import MetricsFiles
from elastic.observe.metrics.retried_writes import RetriedWrites
from elastic.observe.metrics.step_rows import COLUMNS, Row, read_rows, rows_of
from elastic.observe.run_view import view_of
from elastic.policy.state.fold import changes
from elastic.storage import open_storage
from elastic.types import Evaluated, NodeLoadSeen, NodeLost, StepDone


def run_of(folder: Path) -> RunFolder:
    return RunFolder.of(open_storage(folder))


def followed(
    run: RunFolder, before: Sequence[Line], new: Sequence[Line], on_step: Any = None
) -> MetricsFiles:
    files = MetricsFiles(run, on_step)
    files.start(before)
    for line in new:
        files.hear(line)
    files.close()
    assert not files._thread.is_alive()
    return files


def table(run: RunFolder) -> list[Row]:
    return read_rows((run.folder / CSV).read_text())


def expected(all_lines: Sequence[Line]) -> list[Row]:
    return rows_of(view_of(all_lines))


def drawn(run: RunFolder, tag: str) -> dict[int, float]:
    """As TensorBoard shows it: a START with a step leaves out what older files have from it on."""
    found: dict[int, float] = {}
    for path in sorted((run.folder / "tensorboard").glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (n,) = struct.unpack_from("<Q", data, at)
            body = data[at + 12 : at + 12 + n]
            for part, where in ((data[at : at + 8], at + 8), (body, at + 12 + n)):
                assert struct.unpack_from("<I", data, where)[0] == masked_crc32c(part)
            event = Event.FromString(body)
            at += 16 + n
            if event.session_log.status == SessionLog.START:
                found = {step: value for step, value in found.items() if step < event.step}
            for value in event.summary.value:
                if value.tag == tag:
                    assert event.step not in found, "no step twice"
                    found[event.step] = value.simple_value
    return found


def test_each_step_that_counts_has_a_line_with_its_numbers(tmp_path: Path) -> None:
    run, told = run_of(tmp_path / "r"), list[Row]()
    followed(run, [], lines(), told.append)
    rows = table(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows == expected(lines())
    assert tuple(rows[0]) == COLUMNS and rows[-1]["validation_loss"] == 4.9
    assert rows[-1]["tokens"] == sum(row["step_tokens"] for row in rows)
    losses = {row["step"]: row["train_loss"] for row in rows}
    assert drawn(run, "train/train_loss") == pytest.approx(losses)
    assert drawn(run, "evaluated/validation_loss") == pytest.approx({12: 4.9})
    assert {row["step"]: row for row in told} == {row["step"]: row for row in rows}


@pytest.mark.parametrize("cut", range(0, len(lines()), 3))
def test_a_run_that_is_resumed_continues_its_files(cut: int, tmp_path: Path) -> None:
    """Wherever its first driver was killed, with a torn line at the end."""
    run, before = run_of(tmp_path / "r"), lines()[:cut]
    followed(run, [], before)
    with (run.folder / CSV).open("a") as file:
        file.write("99,12")
    followed(run, before, lines()[cut:])
    assert table(run) == expected(lines())
    assert sorted(drawn(run, "train/train_loss")) == list(range(1, 13))


@pytest.mark.parametrize("cut", [6, 11])
def test_a_driver_that_begins_at_a_stored_state_knows_the_workers(cut: int, tmp_path: Path) -> None:
    """That train since before: no line since tells of their plan."""
    run, before = run_of(tmp_path / "r"), lines()[:cut]
    followed(run, [], before)
    *_, last = changes(before)
    kept = replace(before[-1], events=(), decision=None, state=plain(last.after))
    followed(run, [kept], lines()[cut:])
    assert [row["workers"] for row in table(run)] == [6] * 4 + [4] * 2 + [2] * 6
    assert table(run) == expected(lines())


def test_another_machine_writes_what_earlier_drivers_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = run_of(tmp_path / "r"), lines()[:6]
    monkeypatch.setattr(RunFolder, "lines", lambda self: before)
    followed(run, [replace(before[-1], state={"step": 2})], lines()[6:])
    assert table(run) == expected(lines())
    assert sorted(drawn(run, "train/train_loss")) == list(range(1, 13))


def test_what_is_evaluated_late_comes_to_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_files, "FLUSH_S", 0.0)
    run = run_of(tmp_path / "r")
    late = [*lines(), Line(99.0, 1, ((99.0, Evaluated(3, 9, {"accuracy": 0.5})),))]
    followed(run, [], late)
    assert table(run) == expected(late)
    assert drawn(run, "evaluated/accuracy") == {9: 0.5}


def test_a_callback_that_raises_or_a_full_disk_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(row: Row) -> None:
        raise KeyError("no tracker")

    followed(run_of(tmp_path / "a"), [], lines(), raises)
    assert caplog.text.count("on_step is called no more, it raised KeyError") == 1
    assert len(table(run_of(tmp_path / "a"))) == 12

    told: list[Row] = []

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics_files.MetricsCsv, "add", full)
    followed(run_of(tmp_path / "b"), [], lines(), told.append)
    assert "metrics.csv" in caplog.text and "elastic report b --csv has all" in caplog.text
    assert [row["step"] for row in told][-1] == 12
    assert told[-1]["tokens"] == expected(lines())[-1]["tokens"]


def test_a_slow_callback_holds_nobody_up(tmp_path: Path) -> None:
    go, told = threading.Event(), list[int]()

    def slow(row: Row) -> None:
        go.wait(60)
        told.append(row["step"])

    files = MetricsFiles(run_of(tmp_path / "r"), slow)
    files.start([])
    for step in range(1, 4):
        files.hear(Line(float(step), 1, ((float(step), StepDone(0, step, 1.0, 8, 0.1)),)))
    assert told == []
    go.set()
    files.close()
    assert told == [1, 2, 3]


def test_of_a_run_in_object_storage_they_are_kept_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(RunFolder, "keep", lambda self, name: kept.append(name))
    run = run_of(tmp_path / "r")
    monkeypatch.setattr(type(run.storage), "remote", True)
    followed(run, [], lines())
    assert CSV in kept and any(name.startswith("tensorboard/events.") for name in kept)


def test_the_page_names_every_column_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in page for name in (*COLUMNS, "validation_loss"))
    monkeypatch.chdir(tmp_path)
    followed(run_of(tmp_path / "elastic_runs" / "RUN"), [], lines())
    plot, loop, program, script, call = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(plot, {})
    given: list[Any] = []
    exec(loop, {"run": SimpleNamespace(log=given.append), "lr": 1, "aux_loss": 2})
    exec(script, {"elastic": SimpleNamespace(log=given.append), "lr": 1})
    assert given == [{"lr": 1, "aux": 2}, {"lr": 1}]
    exec(program, {"elastic": SimpleNamespace(Program=lambda _, log: given.append(log))})
    right = given.pop()(torch.eye(3), {"target": torch.tensor([0, 1, 1])})
    assert right == {"right": torch.tensor(2)} and (given.clear() or not given)
    stand_in = SimpleNamespace(
        run=lambda job, on_step: given.append(on_step),
        ElasticTrainer=lambda program, job, on_step: given.append(on_step),
    )
    tracker = SimpleNamespace(log=lambda row, step: given.append(step))
    exec(call, {"elastic": stand_in, "tracker": tracker, "program": None})
    given[0]({"step": 7})
    assert given[1:] == [..., 7]


def test_the_users_own_numbers_stand_beside_the_loss(tmp_path: Path) -> None:
    """Also those of a step that was done again: the newest counts."""

    def told(line: Line, n: int) -> Line:
        events = [
            (at_s, replace(e, logged={"lr": e.step / 10 + n}) if isinstance(e, StepDone) else e)
            for at_s, e in line.events
        ]
        return replace(line, events=tuple(events))

    given = [told(line, i) for i, line in enumerate(lines())]
    run = run_of(tmp_path / "r")
    followed(run, [], given)
    rows = table(run)
    assert rows == expected(given)
    assert [int(one["lr"]) for one in rows] == sorted({int(one["lr"]) for one in rows})
    assert [round(10 * (one["lr"] % 1)) % 10 for one in rows] == [s % 10 for s in range(1, 13)]
    assert drawn(run, "logged/lr").keys() == set(range(1, 13))


def test_the_load_of_nodes_is_drawn_with_the_step_that_follows(tmp_path: Path) -> None:
    """The newest of each node that is there; in no column of the table."""
    run, given = run_of(tmp_path / "r"), lines()
    a, old, new = (
        NodeLoadSeen(node, share, 2**30, 2**32, 7)
        for node, share in (("a", 0.5), ("c", 0.25), ("c", 0.75))
    )
    at = next(i for i, line in enumerate(given) for _, e in line.events if isinstance(e, StepDone))
    at_s = given[at].at_s
    told = Line(at_s, 1, tuple((at_s, event) for event in (a, old, NodeLost("a"), new)))
    followed(run, [], [*given[:at], told, *given[at:]])
    (share,) = drawn(run, "system/cpu_share").values()
    assert share == 0.75
    (taken,) = drawn(run, "system/memory_share_most").values()
    assert taken == 0.75
    assert table(run) == expected(given)


# ------------------------------------------------------------------------------------- runs of weeks


class Counting(Remote):
    """`sent`: bytes, by key, of each time it was written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sent: list[tuple[str, int]] = []

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        with super().create(key, if_absent) as file:
            yield file
        self.sent.append((key, self.size(key)))

    def of(self, part: str) -> int:
        return sum(n_bytes for key, n_bytes in self.sent if key.startswith(part))


def step_line(step: int) -> Line:
    done = StepDone(1, step, 1 / step, 8, 0.5, logged={"lr": 0.1})
    return Line(float(step), 1, ((float(step), done),))


def opened(run: RunFolder) -> MetricsFiles:
    """Followed by the test, in place of its thread."""
    files = MetricsFiles(run)
    files._open()
    files._draws = True
    return files


def take_steps(files: MetricsFiles, steps: range) -> None:
    for step in steps:
        files._take(step_line(step))
        files._flush(1)
        files._keep()


def test_what_has_not_changed_is_not_sent_again_and_a_long_run_sends_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of 500 bytes for one of a megabyte, and each step is as a minute."""
    monkeypatch.setattr(stored_copies, "SMALL_BYTES", 500)
    monkeypatch.setattr(tensorboard_files, "MOST_BYTES", 8000)
    storage = Counting(tmp_path / "there")
    run = RunFolder(storage, tmp_path / "here")
    files = opened(run)
    take_steps(files, range(1, 5))
    files._keep()
    n = len(storage.sent)
    for _ in range(10):
        files._keep()
    assert len(storage.sent) == n > 0
    sent = []
    for steps in (range(5, 501), range(501, 1001)):
        take_steps(files, steps)
        sent.append((storage.of(CSV), storage.of("tensorboard/")))
    assert sent[1][0] < 2.5 * sent[0][0] and sent[1][1] < 2.5 * sent[0][1]
    whole = (run.folder / CSV).stat().st_size
    assert sent[1][0] < 15 * whole, "and not 500 times"
    names = [path.name for path in sorted((run.folder / "tensorboard").iterdir())]
    assert len(names) > 5
    assert storage.sent[-1][0] in (CSV, f"tensorboard/{names[-1]}")
    files._keep(last=True)
    assert storage.get(CSV) == (run.folder / CSV).read_bytes()
    for name in names:
        assert (
            storage.get(f"tensorboard/{name}") == (run.folder / "tensorboard" / name).read_bytes()
        )
    assert sorted(drawn(run, "train/train_loss")) == [*range(1, 1001)]
    n = len(storage.sent)
    take_steps(opened(run), range(1001, 1003))
    again = {key for key, _ in storage.sent[n:]}
    assert not again & {f"tensorboard/{name}" for name in names}, "nor by the next driver"


def test_a_large_file_that_grows_slowly_is_sent_after_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_copies, "SMALL_BYTES", 500)
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(stored_copies, "time", clock)
    storage = Counting(tmp_path / "there")
    files = opened(RunFolder(storage, tmp_path / "here"))
    for step in range(1, 201):
        files._take(step_line(step))
    files._flush(200)
    files._keep()
    storage.sent.clear()
    take_steps(files, range(201, 203))
    assert storage.sent == []
    now_s[0] += stored_copies.OLD_S
    files._keep()
    assert {key.partition("/")[0] for key, _ in storage.sent} == {CSV, "tensorboard"}


def test_a_file_of_tensorboard_is_followed_by_another_after_a_day(tmp_path: Path) -> None:
    """Which takes nothing back of what is in the older one, also where a late evaluation begins
    it."""
    run = run_of(tmp_path / "r")
    files, day = opened(run), int(tensorboard_files.MOST_S)
    late = Line(day + 9.5, 1, ((day + 9.5, Evaluated(1, 3, {"accuracy": 0.5})),))
    for line in [*map(step_line, range(1, 10)), late, step_line(day + 10)]:
        files._take(line)
        files._flush(len(files._waiting))
    assert len(list((run.folder / "tensorboard").iterdir())) == 2
    assert sorted(drawn(run, "train/train_loss")) == [*range(1, 10), day + 10]
    assert drawn(run, "evaluated/accuracy") == {3: 0.5}


def test_what_storage_refuses_once_is_sent_the_next_minute_and_written_here_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Counting(tmp_path / "there")
    run = RunFolder(storage, tmp_path / "here")
    files, keep = opened(run), RunFolder.keep
    faults = [StorageFailed("s3://b/r: no whole answer"), StorageRefused("s3://b/r: refused")]

    def fails(self: RunFolder, name: str) -> None:
        if faults:
            raise faults.pop()
        keep(self, name)

    monkeypatch.setattr(RunFolder, "keep", fails)
    take_steps(files, range(1, 3))
    assert caplog.text.count("are not stored for now") == 1
    take_steps(files, range(3, 5))
    assert [one["step"] for one in table(run)] == [1, 2, 3, 4]
    assert sorted(drawn(run, "train/train_loss")) == [1, 2, 3, 4]
    assert storage.get(CSV) == (run.folder / CSV).read_bytes()
    assert storage.of("tensorboard/") and caplog.text.count("are not stored") == 1


def test_a_disk_that_is_full_for_a_while_costs_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was undone and evaluated meanwhile counts too."""
    now_s = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(retried_writes, "time", clock)
    run, given = run_of(tmp_path / "r"), lines()
    files = opened(run)
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 100:
            return write(file, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    def csv_full(self: object, file: Any, at: int, text: bytes) -> None:
        file.seek(at)
        file.write(text[:30])
        raise OSError(errno.ENOSPC, "No space left on device")

    for n, line in enumerate(given):
        with monkeypatch.context() as patch:
            if len(given) // 3 < n < 2 * len(given) // 3:
                patch.setattr(os, "write", full)
                patch.setattr(metrics_files.MetricsCsv, "_write", csv_full)
            files._take(line)
            files._flush(len(files._waiting) - 1)
    assert len(table(run)) < 12
    for name in (CSV, "TensorBoard's files"):
        assert caplog.text.count(f"not in {name} for now") == 1
    now_s[0] += retried_writes.AGAIN_S
    files._flush(len(files._waiting))
    assert table(run) == expected(given)
    losses = {row["step"]: row["train_loss"] for row in table(run)}
    assert drawn(run, "train/train_loss") == pytest.approx(losses)


def test_what_waits_for_a_full_disk_is_bounded(tmp_path: Path) -> None:
    done: list[int] = []

    def opened() -> list[int]:
        raise OSError(errno.ENOSPC, "No space left on device")

    writes = RetriedWrites[list[int]](opened, lambda error: None)
    for n in range(3 * retried_writes.WAITING_MOST // 10):
        writes.put(lambda made, n=n: made.append(n), 10)
    writes.made = done
    writes.attempt(now=True)
    n = 3 * retried_writes.WAITING_MOST // 10
    assert done == [*range(n - retried_writes.WAITING_MOST // 10, n)], "the newest"


def test_all_steps_are_in_the_table_of_a_run_whose_reader_was_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heard_lines, "WAITING_MOST", 50)
    monkeypatch.setattr(heard_lines, "WRITTEN_S", 0.0)
    monkeypatch.setattr(metrics_files, "STEPS_KEPT", 64)
    run, may, told = run_of(tmp_path / "r"), threading.Event(), list[int]()
    journal = Journal(run.journal, 1)

    def slow(row: Row) -> None:
        may.wait(60)
        told.append(row["step"])

    files = MetricsFiles(run, slow)
    journal.hear = (files.hear,)
    files.start()
    for step in range(1, 2001):
        line = step_line(step)
        journal.append(line.at_s, line.events)
        assert len(files._lines) <= 50
    journal.flush()
    may.set()
    files.close()
    journal.close()
    assert [one["step"] for one in table(run)] == [*range(1, 2001)] == told
    assert table(run)[-1]["tokens"] == 8 * 2000
