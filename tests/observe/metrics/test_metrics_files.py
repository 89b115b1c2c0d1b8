"""metrics.csv, TensorBoard's files and the callback: every step that counts once, whatever was
undone or resumed."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.observe.small_run import lines
from support.places import ROOT
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics import metrics_files
from elastic.observe.metrics.metrics_csv import CSV
from elastic.observe.metrics.metrics_files import MetricsFiles
from elastic.observe.metrics.step_rows import COLUMNS, Row, read_rows, rows_of
from elastic.observe.run_view import view_of
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
