"""A driver that is started again: when, how often, and what never is covered up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.api.tiny_job import prepared
from support.child import child
from support.places import PROGRAMS, ROOT
from support.waiting import until

from elastic.api import Options
from elastic.api.running import supervise
from elastic.api.running.restarted_script import FILLED, _ScriptRun
from elastic.api.running.run import JobRun
from elastic.api.running.supervise import command_of, supervised
from elastic.cli.command_line import main
from elastic.cli.parser import carry_out
from elastic.config.job import job_of
from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.policy.pools import pool_allocation
from elastic.policy.state.fold import State, fold
from elastic.sim.sim_backend import SimBackend
from elastic.types import DriverStarted, Event, ModelProfile, Pool, StopAsked
from elastic.types.gates import gates_of

# Ends as the words say, one word for each start: an exit code, or the number of a signal with a
# minus.
DRIVER = """
import os, signal, sys
from pathlib import Path
starts = Path(sys.argv[1])
n = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (n + 1))
end = int(sys.argv[2:][min(n, len(sys.argv) - 3)])
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
WAITS = """
import signal, sys, time
from pathlib import Path
def asked(number, frame):
    sys.exit(3)
signal.signal(signal.SIGTERM, asked)
Path(sys.argv[1]).write_text("x")
time.sleep(600)
"""


def run(tmp_path: Path, *ends: int) -> tuple[int, int, list[float], list[str]]:
    """Its exit code, how often the driver was started, the waits between, and what was said."""
    starts, slept, said = tmp_path / "starts", list[float](), list[str]()
    code = supervised(
        [sys.executable, "-c", DRIVER, str(starts), *map(str, ends)], said.append, slept.append
    )
    return code, len(starts.read_text()), slept, said


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_what_ends_a_run_for_good_is_passed_on(code: int, tmp_path: Path) -> None:
    assert run(tmp_path, code) == (code, 1, [], [])


def test_killed_and_lost_it_is_started_again(tmp_path: Path) -> None:
    code, n, slept, said = run(tmp_path, -signal.SIGKILL, 4, -signal.SIGSEGV, 0)
    assert (code, n, slept) == (0, 4, [5.0, 10.0, 20.0])
    assert said[0] == (
        "the driver was killed by SIGKILL; it is started again in 5 s (start 2 of at most 10 in a "
        "row)"
    )
    assert said[1].startswith("the driver ended with exit code 4; it is started again in 10 s")


@pytest.mark.parametrize("where", ["it attaches", "it polls"])
def test_a_driver_that_crashes_is_one_that_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Only a run whose end stands in its journal has ended. The fault is shown all the same."""
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    one = prepared(folder, run_name="r", local=True)

    class Faulty(SimBackend):
        def poll(self, until_s: float | None) -> list[Event]:
            raise RuntimeError("nobody thought of it")

    def backend(*_: Any, **__: Any) -> SimBackend:
        if where == "it attaches":
            raise RuntimeError("nobody thought of it")
        return Faulty(one.pools, one.spec.job())

    for part in ("_cluster", "_layouts"):
        monkeypatch.setattr(JobRun, part, lambda *_: None)
    monkeypatch.setattr(JobRun, "_backend", backend)
    code = carry_out(Namespace(args=None, handler=lambda given: one.to_the_end()))
    *_, raised, line = capsys.readouterr().err.splitlines()
    assert code == 4 and code not in supervise.FINAL
    assert raised == "RuntimeError: nobody thought of it"
    assert line == (
        "elastic: the driver of run 'r' has crashed (RuntimeError: nobody thought of it); run it "
        "again with this --run-name to resume"
    )


@pytest.mark.slow
def test_it_gives_up_after_some_starts_in_a_row(tmp_path: Path) -> None:
    code, n, slept, _ = run(tmp_path, -signal.SIGKILL)
    assert (code, n) == (128 + signal.SIGKILL, supervise.TRIES)
    assert slept[-1] == supervise.MOST_S


@pytest.mark.slow
def test_a_driver_that_has_lived_for_long_begins_the_count_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "LONG_S", 0.0)
    code, n, slept, _ = run(tmp_path, *[4] * (supervise.TRIES + 2), 0)
    assert (code, n) == (0, supervise.TRIES + 3)


SUPERVISOR = (
    "import sys; from elastic.api.running import supervise; supervise.FIRST_S = 600.0; "
    "sys.exit(supervise.supervised(sys.argv[1:], print))"
)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_on_to_the_driver_and_nothing_is_started_after_it(
    tmp_path: Path, number: int
) -> None:
    begun = tmp_path / "begun"
    words = [sys.executable, "-c", SUPERVISOR, sys.executable, "-c", WAITS, str(begun)]
    with child(words, cwd=ROOT) as process:
        until(begun.exists, "the driver")
        os.kill(process.pid, number)
        assert process.wait(60) == 3


@pytest.mark.e2e
def test_asked_between_two_starts_it_ends_at_once(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    words = [sys.executable, "-c", SUPERVISOR, sys.executable, "-c", DRIVER, str(starts), "4"]
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    with child(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=unbuffered) as process:
        assert process.stdout is not None and "started again in 600 s" in process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 4
    assert starts.read_text() == "x"


@pytest.mark.parametrize("installed", [False, True])
def test_the_command_is_the_same_but_for_the_word(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`elastic` imports nothing from where the user stands, `python -m elastic` does."""
    monkeypatch.setattr(sys, "path", [str(Path("bin").absolute() if installed else Path.cwd())])
    words = ["run", "--script", "a.py", "--supervise", "--run-name", "x", "--", "--supervise"]
    assert command_of(words) == [
        sys.executable, "-Pm" if installed else "-m", "elastic", "run", "--script", "a.py", "--supervised", "--run-name",
        "x", "--", "--supervise",
    ]  # fmt: skip


def test_only_what_is_started_again_is_no_persons_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person who types --supervise after `elastic stop` means the run to train."""
    words, given = ["run", "job", "--supervise", "--run-name", "x"], list[Any]()
    kept = lambda words, say, again: given.append((words, again)) or 0  # noqa: E731
    monkeypatch.setattr("elastic.cli.run_command.supervised", kept)
    main(words)
    ((first, again),) = given
    assert first[3:] == ["run", "job", "--supervised", "--run-name", "x"]
    assert again[3:] == ["run", "job", "--supervised", "--started-again", "--run-name", "x"]
    code = [sys.executable, "-c", DRIVER, str(tmp_path / "starts"), str(-signal.SIGKILL)]
    assert supervised(code, str, lambda s: None, again=[sys.executable, "-c", ""]) == 0


def test_a_run_that_has_no_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path), "--supervise"])
    assert ended.value.code == 2
    assert "--supervise needs --run-name NAME" in capsys.readouterr().err


STOPPED = (
    r"run 'r' was stopped: enough; it trains on once somebody starts it without --started-again"
)


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        (StopAsked("enough"), True),
        (StopAsked("signal SIGTERM"), False),
        (StopAsked("all is trained", done=True), False),
    ],
    ids=["a person", "a signal to one process", "the script itself"],
)
def test_what_a_person_has_stopped_is_not_begun_again_by_itself(
    folder: Path, asked: StopAsked, refused: bool
) -> None:
    """As by the backoffLimit of a RayJob, to which a stopped run is one that failed."""
    (folder / "program.py").write_text((PROGRAMS / "tiny.py").read_text())
    typed, again = (
        prepared(folder, run_name="r", supervised=True, started_again=again)
        for again in (False, True)
    )
    begun = typed._start(1, [])
    before = [Line(0.0, 1, ((0.0, begun),))]
    stopped = replace(fold(fold(State(), begun, 0.0), asked, 1.0), phase="stopped")
    assert typed._start(2, before, stopped).epoch == 2
    assert again._start(2, before, replace(stopped, phase="running")).epoch == 2
    if not refused:
        assert again._start(2, before, stopped).epoch == 2
        return
    with pytest.raises(SpecError, match=STOPPED):
        again._start(2, before, stopped)


def test_nor_is_a_script_that_is_restarted(folder: Path) -> None:
    file = folder / "train.py"
    file.write_text("print('step 1: loss 1.0')")
    spec = job_of({"name": "tiny", **FILLED}, file, "--set")
    job = {"script": str(file), "args": [], "restarted": True}
    begun = DriverStarted("r", 1, job, (), ModelProfile(0, 0, ()))
    before = [Line(0.0, 1, ((0.0, begun),))]
    stopped = replace(fold(fold(State(), begun, 0.0), StopAsked("enough"), 1.0), phase="stopped")
    options = Options(run_name="r", supervised=True)
    assert _ScriptRun(file, (), spec, options=options)._start(2, before, stopped).epoch == 2
    run = _ScriptRun(file, (), spec, options=replace(options, started_again=True))
    with pytest.raises(SpecError, match=STOPPED):
        run._start(2, before, stopped)


def test_the_driver_of_a_script_that_is_restarted_has_the_rules_of_today(folder: Path) -> None:
    """But for those about what is its own: its groups, its memory, its checkpoints, its steps."""
    file = folder / "train.py"
    file.write_text("print('step 1: loss 1.0')")
    spec = job_of({"name": "tiny", **FILLED}, file, "--set")
    start = _ScriptRun(file, (), spec, options=Options(run_name="r"))._start(1, [])
    without = {name for name, there in gates_of(start).items() if not there}
    own = {"forms_ahead", "saves_in_any", "saves_in_time", "awaits_stop", "blames_program"}
    assert without == own


def test_it_knows_what_the_gpus_of_its_pools_compute(folder: Path) -> None:
    """An H100 that costs 2.9 times as much as an A100 computes three times as much."""
    file = folder / "train.py"
    file.write_text("print('step 1: loss 1.0')")
    spec = job_of({"name": "tiny", **FILLED}, file, "--set")
    run = _ScriptRun(file, (), spec, options=Options(run_name="r"))
    run.pools = (
        Pool("old", "A100", 8, "spot", 8.0, 0, 8), Pool("new", "H100", 8, "spot", 23.0, 0, 8),
    )  # fmt: skip
    state = fold(State(), run._start(1, []), 0.0)
    assert [pool.name for pool in pool_allocation.by_price(state)] == ["new", "old"]
