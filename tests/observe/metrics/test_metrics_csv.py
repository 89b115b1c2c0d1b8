"""The table of a run of weeks: only its end is looked at."""

from __future__ import annotations

import errno
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from elastic.observe.metrics import metrics_csv
from elastic.observe.metrics.metrics_csv import CSV, MetricsCsv
from elastic.observe.metrics.step_rows import COLUMNS, Row, read_rows, text_of


def row_at(step: int, **more: float) -> Row:
    return {
        "step": step, "at_s": 1.5 * step, "generation": 1, "workers": 2, "train_loss": 1 / step,
        "tokens": 8 * step, "step_tokens": 8, "step_time_s": 1.0, "tokens_per_s": 8.0,
        "grad_norm": 0.5, **more,
    }  # fmt: skip


def table(folder: Path) -> list[Row]:
    return read_rows((folder / CSV).read_text())


def read_bytes() -> int:
    """That this process has read from files."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["rchar"])


def test_of_a_million_rows_the_last_ones_are_read(tmp_path: Path) -> None:
    n = 1_000_000
    rest = text_of([row_at(1)], COLUMNS, head=False).partition(",")[2]
    with (tmp_path / CSV).open("w") as file:
        file.write(text_of([], COLUMNS))
        file.writelines(f"{step},{rest}" for step in range(1, n + 1))
        file.write("99,1")  # torn
    before = read_bytes()
    made = MetricsCsv(tmp_path)
    assert made.last is not None and made.last["step"] == n
    made.cut(n - 3)
    assert made.last["step"] == n - 3
    made.add([row_at(n - 2), row_at(n - 1)])
    made.evaluated(n - 5, {"train_loss": 0.25})
    assert read_bytes() - before < 1_000_000
    lines = (tmp_path / CSV).read_text().splitlines()
    assert len(lines) == n  # with the head
    rows = read_rows("\n".join([lines[0], *lines[-5:], ""]))
    assert [one["train_loss"] for one in rows] == [0.25, 1.0, 1.0, 1 / (n - 2), 1 / (n - 1)]


@pytest.mark.parametrize("block", [1, 50, 100, 1 << 16])
def test_it_is_what_was_done_to_it(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its lines fall into what is read at once, and with drivers that are killed midway."""
    monkeypatch.setattr(metrics_csv, "BLOCK_BYTES", block)
    draw, given, made = random.Random(block), dict[int, Row](), MetricsCsv(tmp_path)
    last = 0
    for _ in range(60):
        match draw.randrange(5):
            case 0 | 1:
                new = [row_at(last + k, lr=0.5) if k == 3 else row_at(last + k) for k in (1, 2, 3)]
                made.add(new)
                given |= {one["step"]: one for one in new}
                last += 3
            case 2:
                last = draw.randint(max(0, last - 7), last)
                made.cut(last)
                given = {step: one for step, one in given.items() if step <= last}
            case 3:
                step, name = draw.randint(1, last + 2), draw.choice(["accuracy", "f1, mean"])
                made.evaluated(step, {name: 0.75})
                if step in given:
                    given[step] = given[step] | {name: 0.75}
            case _:
                with (tmp_path / CSV).open("a") as file:
                    file.write(draw.choice(["", "99", "99,12", "99,1.5,1"]))
                made = made if draw.random() < 0.5 else MetricsCsv(tmp_path)
        assert table(tmp_path) == [*given.values()]
    made = MetricsCsv(tmp_path)
    assert made.last == (given[last] if last else None)


def test_a_write_that_fails_midway_is_done_again_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rows = MetricsCsv(tmp_path), [row_at(step) for step in range(1, 8)]
    made.add(rows[:3])

    def torn(self: MetricsCsv, file: Any, at: int, text: bytes) -> None:
        file.seek(at)
        file.write(text[: len(text) * 2 // 3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsCsv, "_write", torn)
        with pytest.raises(OSError, match="No space"):
            made.add(rows[3:])
    assert (tmp_path / CSV).stat().st_size > len(text_of(rows[:5], COLUMNS))
    made.add(rows[3:])
    assert table(tmp_path) == rows


def test_what_is_no_table_or_is_gone_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / CSV).write_text("a,b\n1,2\n")
    made = MetricsCsv(tmp_path)
    assert made.last is None and table(tmp_path) == []
    made.add([row_at(1)])
    (tmp_path / CSV).unlink()
    made.add([row_at(2)])
    assert table(tmp_path) == [row_at(2)]


@pytest.mark.parametrize("room", [0, 3, 40])
def test_an_evaluation_that_a_full_disk_refuses_costs_no_row(room: int, tmp_path: Path) -> None:
    """It makes its row longer, and all that follow are written anew."""
    made = MetricsCsv(tmp_path)
    made.add([row_at(step) for step in range(1, 2001)])
    made.evaluated(1000, {"validation_loss": 0.5})
    before = (tmp_path / CSV).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            for step in range(1001, 1010):
                made.evaluated(step, {"validation_loss": 0.123456789})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG
    assert [one["step"] for one in table(tmp_path)] == [*range(1, 2001)]
    made.evaluated(1500, {"validation_loss": 0.25})
    assert table(tmp_path)[1499]["validation_loss"] == 0.25
    assert [one["step"] for one in table(tmp_path)] == [*range(1, 2001)]
