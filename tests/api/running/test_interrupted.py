"""Who runs a job from Python and presses Ctrl-C does not go on behind it, whichever way it was
run."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import elastic
from elastic import api
from elastic.api.running import entry
from elastic.api.running.run import Result
from elastic.errors import Interrupted
from elastic.program import load_program

RESTARTED = "print('no loop')\n"


def ended(folder: Path, way: str, options: elastic.Options) -> Result:
    if way == "folder":
        return elastic.run(folder, options=options)
    if way == "program":
        job = {"steps": 2, "global_batch": 2}
        return elastic.run(load_program(folder / "program.py"), job, options)
    (folder / "train.py").write_text(RESTARTED)
    return api.run_script(folder / "train.py", options=options)


@pytest.fixture
def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs are stopped at once, by the signal that stands in it."""
    by = [0]

    def run(*_: Any, options: elastic.Options | None = None, **__: Any) -> Result:
        return Result("r", "stopped", {"reason": "asked to"}, folder, signal=by[0])

    monkeypatch.setattr(entry, "run_job", run)
    monkeypatch.setattr(entry.restarted_script, "run_restarting", run)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "all.py", raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "all.py"])
    return by


@pytest.mark.parametrize("way", ["folder", "program", "script"])
def test_a_signal_ends_the_caller_once_the_run_is_saved(
    folder: Path, stopped: list[int], capsys: pytest.CaptureFixture[str], way: str
) -> None:
    stopped[0] = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        ended(folder, way, elastic.Options(run_name="r"))
    told = "elastic: run r stopped: asked to\nelastic: to resume it: python all.py\n"
    assert capsys.readouterr().err == told
    stopped[0] = signal.SIGTERM
    with pytest.raises(Interrupted) as caught:
        ended(folder, way, elastic.Options())
    assert caught.value.code == 143
    assert "give elastic.Options(run_name='r'), then: python all.py" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["folder", "program", "script"])
def test_what_something_else_has_stopped_returns(
    folder: Path, stopped: list[int], capsys: pytest.CaptureFixture[str], way: str
) -> None:
    assert ended(folder, way, elastic.Options(run_name="r")).outcome == "stopped"
    assert "to resume it: python all.py" in capsys.readouterr().err
    stopped[0] = signal.SIGINT  # the command line has an exit code for it
    typed = elastic.Options(run_name="r", words=("run", "job"))
    assert ended(folder, way, typed).signal == signal.SIGINT
    assert not capsys.readouterr().err
