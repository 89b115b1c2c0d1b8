"""Tiers of tests on a made-up project: each runs, all is added up, and a test that became slow is
named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.durations import Durations, by_folder, by_record, is_there, merged, read, slower, write
from support.places import TESTS
from support.scene_tools import missing_tools
from support.scheduling import UNKNOWN_S, expected_s, group_of
from tiers import Ran, closing

INI = (
    "[pytest]\naddopts = -ra\npythonpath = tests\nmarkers =\n    slow: s\n    e2e: e\n    whole: "
    "w\n    gpu: g\n"
)
CONFTEST = """
from support.durations import Durations
def pytest_addoption(parser):
    parser.addoption("--record-durations", action="store_true")
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())
def pytest_xdist_make_scheduler(config, log):
    from support.scheduling import LongestFirst
    return LongestFirst(config, log)
"""
UNIT = """
import time, pytest
def test_good(): pass
def test_bad(): assert 0
def test_long(): time.sleep(0.6)
@pytest.mark.parametrize("n", range(50))
def test_many(n): pass
"""
NOWHERE = """
import pytest
pytest.skip("no such machine: sshd (openssh-server)", allow_module_level=True)
"""
LATER = """
import pytest
@pytest.mark.e2e
def test_later(): pass
@pytest.mark.e2e
def test_not_here(): pytest.skip("nothing to see")
@pytest.mark.whole
def test_last(): pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tests = tmp_path / "tests"
    (tests / "support").mkdir(parents=True)
    for name in (
        "tiers.py",
        "support/durations.py",
        "support/places.py",
        "support/scheduling.py",
        "support/scene_tools.py",
    ):
        shutil.copy(TESTS / name, tests / name)
    (tmp_path / "pytest.ini").write_text(INI)
    for name, text in (("conftest.py", CONFTEST), ("test_unit.py", UNIT), ("test_later.py", LATER)):
        (tests / name).write_text(text)
    return tmp_path


def ran(project: Path, *words: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "tests/tiers.py", *words], cwd=project, capture_output=True, text=True
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.e2e
def test_each_tier_runs_and_all_is_added_up(project: Path) -> None:
    (project / "tests/durations.csv").write_text(
        "test,median_s,values_s\ntests/test_unit.py::test_long,0.10,0.10\n"
    )
    code, out = ran(project, "unit", "e2e", "--record")
    assert code == 1
    assert out[-1].startswith("1 failed, 53 passed, 1 skipped in ")
    by_tier = {line.split()[0]: line for line in out[-3:-1]}
    assert "FAILED  52 passed, 1 failed, 0 skipped" in by_tier["unit"]
    assert "ok      1 passed, 0 failed, 1 skipped" in by_tier["e2e"]
    assert any(line.startswith("FAILED tests/test_unit.py::test_bad") for line in out), (
        "as pytest names it"
    )
    assert any(
        "tests/test_unit.py::test_long took 0." in line and "times its record (0.1 s)" in line
        for line in out
    )
    kept = read(project / "tests/durations.csv")
    assert len(kept["tests/test_unit.py::test_long"]) == 2 and "tests/test_unit.py::*" in kept
    code, out = ran(project, "e2e")
    assert code == 0 and out[-1].startswith("1 passed, 1 skipped in ")


@pytest.mark.e2e
def test_the_last_line_says_what_was_skipped_and_why(project: Path) -> None:
    (project / "tests/test_nowhere.py").write_text(NOWHERE)
    code, out = ran(project, "e2e")
    assert code == 0
    assert out[-1].endswith(
        "; skipped: 1 of test_later: nothing to see; "
        "1 of test_nowhere: no such machine: sshd (openssh-server)"
    )


def test_reasons_of_skipped_tests_are_counted() -> None:
    one = Ran("e2e", 1.0, 0, passed=3, skipped=3, why={"test_a: no sshd": 2, "test_b: no GPU": 1})
    two = Ran("whole", 2.0, 0, passed=1, skipped=1, why={"test_a: no sshd": 1})
    assert closing([one, two]) == (
        "4 passed, 4 skipped in 3.00s; skipped: 3 of test_a: no sshd; 1 of test_b: no GPU"
    )
    assert closing([Ran("unit", 1.0, 0, passed=1)]) == "1 passed in 1.00s"


def test_a_tool_that_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"ssh", "ip", "make", "nft"}
    monkeypatch.setattr("shutil.which", lambda tool, path="": tool if tool in there else None)
    assert missing_tools() == (
        "not on this machine: sshd, rsync (apt-get install openssh-server rsync)"
    )
    there |= {"sshd", "rsync"}
    assert missing_tools() == ""


@pytest.mark.e2e
def test_a_tier_that_is_none_is_refused(project: Path) -> None:
    code, _ = ran(project, "units")
    assert code == 2


def test_what_is_recorded() -> None:
    seconds = {
        "tests/a/test_x.py::test_one": 2.0,
        "tests/a/test_x.py::test_two[3]": 0.01,
        "tests/a/test_x.py::test_three": 0.02,
    }
    assert by_record(seconds) == {
        "tests/a/test_x.py::test_one": 2.0,
        "tests/a/test_x.py::*": pytest.approx(0.03),
    }
    assert by_folder(seconds) == {"tests/a": (3, pytest.approx(2.03))}


def test_a_record_keeps_the_last_values_and_forgets_tests_that_are_no_more(tmp_path: Path) -> None:
    here = "tests/test_tiers.py::test_what_is_recorded"
    assert is_there(here) and is_there("tests/test_tiers.py::*") and is_there(f"{here}[a::b]")
    assert not is_there("tests/test_tiers.py::test_that_never_was") and not is_there(
        "tests/test_none.py::*"
    )
    known = {
        here: [1.0, 2.0, 3.0],
        "tests/test_tiers.py::test_that_never_was": [1.0],
        "tests/config/test_job.py::*": [5.0],
    }
    found = merged(known, {here: 9.0})
    assert found == {here: [2.0, 3.0, 9.0], "tests/config/test_job.py::*": [5.0]}
    write(tmp_path / "kept.csv", found)
    assert read(tmp_path / "kept.csv") == found
    assert (tmp_path / "kept.csv").read_text().splitlines()[2] == f"{here},3.00,2.00,3.00,9.00"


def test_what_became_three_times_slower_is_named() -> None:
    known = {"a": [0.2, 0.3, 0.4], "b": [2.0], "c": [0.01]}
    (line,) = slower({"a": 1.0, "b": 5.0, "c": 0.2, "new": 60.0}, known)
    assert line == "a took 1.0 s: 3.3 times its record (0.3 s)"


def test_set_up_and_clearing_up_count_and_marked_tests_are_not_named() -> None:
    seen = Durations()
    for when, took_s in (("setup", 1.0), ("call", 2.0), ("teardown", 4.0)):
        for name, marks in (("plain", {}), ("marked", {"slow": 1})):
            seen.pytest_runtest_logreport(report(name, when, took_s, marks))
    assert seen.seconds == {"plain": 7.0, "marked": 7.0} and seen.unmarked == {"plain": 2.0}


def test_files_stay_together_and_the_longest_group_is_the_next() -> None:
    room = {group_of(f"tests/worker/state/test_{name}.py::t[1]") for name in "ab"}
    assert room == {"tests/worker/state/"}
    alone = "tests/worker/standalone/test_a.py"
    assert group_of(f"{alone}::t") == alone
    assert (
        group_of("tests/e2e/test_a.py::t[x::y]")
        == group_of("tests/e2e/test_a.py::u")
        == "tests/e2e/test_a.py"
    )
    apart = [f"tests/e2e/test_scenarios.py::t[{name}]" for name in "ab"]
    assert [group_of(node) for node in apart] == apart
    known = {"tests/a.py::long": [9.0, 3.0, 4.0], "tests/a.py::*": [1.0], "tests/b.py::*": [4.5]}
    assert (
        expected_s(["tests/a.py::long", "tests/a.py::short"], known)
        == 5.0
        > expected_s(["tests/b.py::x"], known)
        == 4.5
    )
    assert expected_s(["tests/new.py::x"], known) == UNKNOWN_S


def report(name: str, when: str, took_s: float, marks: dict[str, int]) -> pytest.TestReport:
    return pytest.TestReport(name, ("", 0, ""), marks, "passed", None, when, duration=took_s)  # type: ignore[arg-type]
