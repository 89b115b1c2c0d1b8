"""The error of a rank, shown by a driver on another machine than its log."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.api.running.run import JobRun
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.storage import open_storage
from elastic.types import WorkerFailed, WorkerId

FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 9, in f\nKeyError: 1\n'


@pytest.mark.parametrize("said", [False, True])
def test_its_frames_come_with_its_failure_and_its_log_is_named_by_its_node(
    tmp_path: Path, said: bool
) -> None:
    """Unless rank 0 has told them already. Where the log is here, its own lines are shown."""
    out = io.StringIO()
    terminal = SimpleNamespace(has_said=lambda line: said)
    place = RunFolder.of(open_storage(str(tmp_path / "run")))
    run: Any = SimpleNamespace(place=place, terminal=terminal, _out=lambda: out)
    failed = WorkerFailed(WorkerId("spot-1", 1), 1, "program", "KeyError: 1", frames=FRAMES)
    spared = WorkerFailed(WorkerId("spot-9", 0), 0, "program", "of a new node, which has left")
    journal = [Line(0.0, 1, ((0.0, spared), (0.0, failed)), None)]
    assert JobRun._traceback(run, journal) is None
    shown = "" if said else f"\n{FRAMES}"
    assert out.getvalue() == f"{shown}whole traceback: in the logs of node spot-1\n"
    place.logs.mkdir(parents=True)
    log = place.logs / "spot-1-1-77.log"
    colored = "\x1b[1;35mKeyError\x1b[0m: 'here'"  # as Python writes it with FORCE_COLOR
    log.write_text(f"Traceback (most recent call last):\n  File 'train.py'\n{colored}\n")
    out.truncate(out.seek(0))
    assert JobRun._traceback(run, journal) == log
    assert ("KeyError: 'here'" in out.getvalue()) is not said
    assert out.getvalue().endswith(f"whole traceback: {log}\n")
