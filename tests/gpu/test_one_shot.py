"""one_shot.py stays alive: its dry run goes through every part, what is cut has told what it knew,
nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import one_shot
import pytest
import torch
from one_shot_rows import EXPECTED, Expect
from support.e2e.runs import MARK, processes
from support.places import PROGRAMS, ROOT
from support.waiting import until
from torch import nn

from elastic.certify.gpu import real_faults
from elastic.certify.gpu.solo import slope
from elastic.program import load_program
from elastic.worker.step.block_timing import BlockTiming
from elastic.worker.step.device_marks import DeviceMarks

HERE = Path(__file__).resolve().parent
MOST_S = 300.0  # for hangs only
HANGS = """
import os, time
def facts(tell, cpu, seconds):
    tell("python", "3")
    if not os.fork():
        os.setsid()
    while True:
        time.sleep(60)
"""
CUT = """
import sys
sys.path[:0] = {paths}
import one_shot
one_shot.settle = lambda: None
one_shot.PARTS = (one_shot.Part("facts", "hangs", 1.0, ""), one_shot.Part("digest", "hangs", 1.0, ""))
sys.argv = ["one_shot.py", "--cpu", "--out", {out!r}]
sys.exit(one_shot.main())
"""


def ran(words: list[str], mark: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, MARK: mark, "PYTHONPATH": f"{ROOT}:{HERE}"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=MOST_S,
    )


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_part_has_predictions_and_all_of_them_fit_the_time() -> None:
    names = [part.name for part in one_shot.PARTS]
    assert len(names) == len(set(names)) and set(names) == set(EXPECTED)
    assert [part.name for part in one_shot.PARTS if not part.most_s] == names[-1:], (
        "the last has what is left"
    )
    assert one_shot.SECONDS <= 540


def test_what_is_as_expected() -> None:
    assert Expect("s", "short", most=2.0).ok(1.9) and not Expect("s", "short", most=2.0).ok(2.1)
    assert Expect("s", "long", least=5.0).ok("not within 20 s") is False
    assert Expect("", "pass", begins="pass").ok("pass") and not Expect(
        "", "pass", begins="pass"
    ).ok("fail: slow")
    assert Expect("", "a fact").ok("anything") is None
    assert slope([1.0, 3.0, 5.0, 7.0]) == pytest.approx(2.0) and slope([1.0]) == 0.0


@pytest.mark.parametrize(
    ("words", "says"), [(["--only", "steps"], "no part steps"), (["--seconds", "0"], "more than 0")]
)
def test_a_wrong_option_is_said_in_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["one_shot.py", *words])
    assert one_shot.main() == 2
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize(("kind", "at"), [("endless", 0), (real_faults.BACK, 2)])
def test_a_kernel_without_end_lies_within_a_blocks_own_work(
    kind: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gather's mark and before the block's, else nobody could be named."""
    seen: list[str] = []
    monkeypatch.setattr(DeviceMarks, "mark", lambda self, part: seen.append(part))
    monkeypatch.setattr(real_faults, "_sleep", lambda: seen.append("sleeps"))
    block, faults = nn.Linear(2, 2), real_faults.RealFaults()
    spans = BlockTiming(
        [block], load_program(str(PROGRAMS / "tiny.py")), torch.device("cuda", 0), faults=faults
    )
    spans.timing, faults.real = False, kind
    for _ in range(2):
        block(torch.ones(2, requires_grad=True)).sum().backward()
    expected = ["others", "own"] * 4
    assert seen == [*expected[: at + 1], "sleeps", *expected[at + 1 :]]


@pytest.mark.e2e
@pytest.mark.whole  # most of its parts: certify/gpu/test_gpu_checks.py
@pytest.mark.timeout(2 * MOST_S)
def test_the_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = ran(["tests/gpu/one_shot.py", "--cpu", "--out", str(tmp_path / "out")], mark)
    assert done.returncode == 0, (
        done.stdout + done.stderr + (tmp_path / "out" / "log.txt").read_text()[-3000:]
    )
    rows = rows_of(done.stdout)
    assert rows_of((tmp_path / "out" / "rows.jsonl").read_text()) == rows
    assert all(set(row) == {"part", "name", "value", "unit", "expected", "ok"} for row in rows)
    for part in one_shot.PARTS:
        told = {row["name"] for row in rows if row["part"] == part.name}
        assert "seconds" in told and len(told) > 1, part.name
    until(lambda: not processes(mark), "the end of all that it started")


@pytest.mark.e2e
def test_a_part_that_is_cut_has_told_what_it_knew_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS + "digest = facts\n")
    paths = [str(tmp_path), str(HERE), str(ROOT)]
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = ran(["-c", CUT.format(paths=paths, out=str(tmp_path / "out"))], mark)
    assert done.returncode == 1, done.stderr
    rows = [row for row in rows_of(done.stdout) if row["part"] == "facts"]
    assert [row["name"] for row in rows] == ["python", "cut", "seconds"] and rows[1]["ok"] is False
    assert {"error", "seconds"} <= {
        row["name"] for row in rows_of(done.stdout) if row["part"] == "digest"
    }, "the next one is run"
    until(lambda: not processes(mark), "the end of all that it started")
