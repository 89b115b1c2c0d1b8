"""The list of seeded faults fits the code, and the runner tells a fault that is caught from one
that is not."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import run as runner
import seeded
import yaml
from seeded import TIERS, Copy, Fault, Refused, judge, prove, read_faults, seeded_text, told

ROOT = Path(__file__).resolve().parents[2]
FAULTS = read_faults()
LEAST = {"policy": 12, "reshard": 12, "ledger": 7, "observe": 5, "data.order": 12}  # drawn


def test_there_are_enough_of_each_kind() -> None:
    origins = Counter(fault.origin for fault in FAULTS)
    assert (
        set(origins) == {"drawn", "written"} and min(origins.values()) >= 60 and len(FAULTS) >= 120
    )
    drawn = Counter(fault.part for fault in FAULTS if fault.origin == "drawn")
    assert all(drawn[part] >= n for part, n in LEAST.items())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_each_applies_exactly_once_and_is_python(fault: Fault) -> None:
    text = seeded_text(fault, (ROOT / fault.file).read_text())
    compile(text, fault.file, "exec")
    assert fault.why and (fault.tests or fault.origin == "drawn")
    for test in fault.tests:
        assert (ROOT / test.partition("::")[0]).exists(), f"{test}: no such test"


def test_each_has_a_result_and_what_was_caught_once_is_caught() -> None:
    kept = json.loads((ROOT / "tests" / "mutants" / "results.json").read_text())
    judged = {fault.id for fault in FAULTS if not fault.equivalent}
    assert judged <= set(kept), f"run `make mutants`: {sorted(judged - set(kept))}"
    lost = [key for key in judged if kept[key].get("before") and not kept[key]["now"]]
    assert not lost, f"caught before, missed now: {lost}"


# ---------------------------------------------------------------------------------- a small project


CODE = """
import time

LIMIT = 3

def allowed(n):
    return n < LIMIT

def wait(seconds):
    time.sleep(seconds)

def spare():
    return 1
"""
TESTS = """
import pytest
from small import code

def test_the_limit():
    assert code.allowed(2) and not code.allowed(3)

@pytest.mark.e2e
def test_waiting():
    code.wait(0.0)
"""
ALWAYS_WRONG = "\ndef test_that_fails_anyway():\n    assert False\n"


def row(
    key: str, old: str, new: str, tests: str = "tests/test_code.py", **more: Any
) -> dict[str, Any]:
    return {
        "id": key,
        "file": "small/code.py",
        "old": old,
        "new": new,
        "origin": "written",
        "why": "-",
        "tests": [tests],
        **more,
    }


ROWS = [
    row("caught", "n < LIMIT", "n <= LIMIT"),
    row("slowly", "time.sleep(seconds)", "raise ValueError"),
    row("missed", "return 1", "return 2"),
    row("broken", "LIMIT = 3", "LIMIT = nothing"),
    row("same", "return 1", "return 1 + 0", equivalent="it is the same number"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # hypothesis takes half a second of each call
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pytest_timeout")
    root = tmp_path / "project"
    for name, text in (
        ("small/__init__.py", ""),
        ("small/code.py", CODE),
        ("tests/test_code.py", TESTS),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\nmarkers = ["e2e", "whole", "gpu"]\ntimeout = 60\n'
    )
    (root / "list").mkdir()
    listed(root, ROWS)
    return root


def listed(root: Path, rows: list[dict[str, Any]]) -> None:
    (root / "list" / "written.yaml").write_text(yaml.safe_dump(rows))


def results(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "list" / "results.json").read_text())
    return found


@pytest.mark.e2e
def test_the_runner_tells_what_is_caught_by_whom(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main([], project, project / "list") == 0
    limit, waiting = "tests/test_code.py::test_the_limit", "tests/test_code.py::test_waiting"
    assert results(project) == {
        "caught": {"now": {"test": limit, "how": "failed", "tier": "unit"}},
        "slowly": {"now": {"test": waiting, "how": "failed", "tier": "e2e"}},
        "missed": {"now": {}},
        "broken": {"now": {"test": "tests/test_code.py", "how": "import", "tier": "unit"}},
    }
    assert (project / "small" / "code.py").read_text() == CODE, "faults are in the copy only"
    out = capsys.readouterr().out
    assert (
        "| written, code | 5 | 1 | 0 | 2 | 1 | 0 | 1 |" in out
        and "1 survive\n- missed (small/code.py)" in out
    )


@pytest.mark.whole  # the runner is no part of CI
def test_a_fault_that_is_no_longer_caught_is_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["--only", "caught"], project, project / "list") == 0
    (project / "tests" / "test_code.py").write_text("def test_nothing():\n    pass\n")
    assert runner.main(["--only", "caught"], project, project / "list") == 1
    assert "caught before, missed now: caught" in capsys.readouterr().err
    assert results(project)["caught"]["now"]["how"] == "failed", "it stays recorded as caught"


@pytest.mark.whole  # the runner is no part of CI
def test_the_word_of_a_test_that_fails_anyway_counts_for_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "tests" / "test_code.py").write_text(TESTS + ALWAYS_WRONG)
    assert runner.main(["--only", "missed"], project, project / "list") == 1
    assert (
        "fails without a fault too: missed: tests/test_code.py::test_that_fails_anyway"
        in capsys.readouterr().err
    )
    assert results(project) == {}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [row("gone", "n > LIMIT", "n")],
            "gone does not apply to small/code.py: its old text stands there 0 times",
        ),
        (
            [row("twice", "return", "yield")],
            "twice does not apply to small/code.py: its old text stands there 2 times",
        ),
        (
            [row("idle", "return 1", "return 1")],
            "idle does not apply to small/code.py: changes nothing",
        ),
        (
            [row("one", "return 1", "return 2"), row("one", "LIMIT = 3", "LIMIT = 4")],
            "one: more than one fault has this id",
        ),
        (
            [row("odd", "return 1", "return 2", file="small/other.py")],
            "odd does not apply to small/other.py",
        ),
    ],
)
def test_a_list_that_does_not_fit_is_refused(
    project: Path, rows: list[dict[str, Any]], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listed(project, [{**row("", "", ""), **one} for one in rows])
    assert runner.main([], project, project / "list") == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1


@pytest.mark.whole  # the runner is no part of CI
def test_code_that_was_compiled_before_is_never_run(project: Path) -> None:
    """Faults of one size follow each other within a second; Python tells compiled code by size and
    second."""
    faults = [
        Fault(f"limit-{n}", "small/code.py", "LIMIT = 3", f"LIMIT = {n}", "written", "-", ())
        for n in (2, 4, 5)
    ]
    with Copy(project) as copy:
        for fault in faults:
            copy.seed(fault)
            assert copy.pytest(["tests"], TIERS["unit"]).verdict.caught, fault.id
        assert prove(copy, ["tests/test_code.py::test_the_limit"]) == (
            {"tests/test_code.py::test_the_limit": "unit"},
            set(),
        )


@pytest.mark.whole  # the runner is no part of CI
def test_a_hang_counts_as_caught_and_ends(project: Path) -> None:
    with Copy(project) as copy:
        copy.seed(
            Fault(
                "hangs", "small/code.py", "return n < LIMIT", "time.sleep(99)", "written", "-", ()
            )
        )
        found = copy.pytest(["tests"], TIERS["unit"], limit_s=2.0).verdict
        assert (found.test, found.how) == ("tests/test_code.py::test_the_limit", "timeout")


@pytest.mark.whole  # the runner is no part of CI
def test_one_that_takes_all_memory_is_ended(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded, "MOST_BYTES", 200 << 20)
    monkeypatch.setattr(seeded, "LOOK_S", 0.02)
    with Copy(project) as copy:
        copy.seed(
            Fault(
                "grows",
                "small/code.py",
                "return n < LIMIT",
                "return [b'x' * 9**9, time.sleep(99)]",
                "written",
                "-",
                (),
            )
        )
        began_s = time.monotonic()
        found = copy.pytest(["tests"], TIERS["unit"], limit_s=200.0).verdict
        assert time.monotonic() - began_s < 150 and (found.test, found.how) == (
            "tests/test_code.py::test_the_limit",
            "timeout",
        )


@pytest.mark.whole  # the runner is no part of CI
def test_the_test_that_caught_it_last_is_tried_first_and_may_have_gone(project: Path) -> None:
    fault = Fault(
        "late",
        "small/code.py",
        "time.sleep(seconds)",
        "raise ValueError",
        "written",
        "-",
        ("tests/test_code.py",),
    )
    with Copy(project) as copy:
        for known in (
            "tests/test_code.py::test_waiting",
            "tests/test_code.py::test_of_another_name",
        ):
            assert judge(copy, fault, known).test == "tests/test_code.py::test_waiting"
        assert not judge(copy, fault, "tests/test_code.py::test_waiting", tier="unit").caught


@pytest.mark.parametrize(
    ("status", "output", "test", "how"),
    [
        (0, "PASSED tests/test_a.py::test_b", "", ""),
        (5, "no tests ran", "", ""),
        (
            1,
            "FAILED tests/test_a.py::test_b[x - y] - assert 1",
            "tests/test_a.py::test_b[x",
            "failed",
        ),
        (
            1,
            "FAILED tests/test_a.py::test_b - Failed: Timeout (>240.0s) from pytest-timeout.",
            "tests/test_a.py::test_b",
            "timeout",
        ),
        (2, "ERROR tests/test_a.py - NameError: name 'x'", "tests/test_a.py", "import"),
        (
            -11,
            "tests/test_a.py::test_a PASSED\ntests/test_a.py::test_b ",
            "tests/test_a.py::test_b",
            "crash",
        ),
    ],
)
def test_what_pytest_says(status: int, output: str, test: str, how: str) -> None:
    found = told(status, output).verdict
    assert (found.test, found.how) == (test, how)


def test_pytest_that_cannot_begin_is_no_verdict() -> None:
    with pytest.raises(Refused, match="not found: tests/test_z.py"):
        told(4, "ERROR: file or directory not found: tests/test_z.py\n")
