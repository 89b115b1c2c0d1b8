"""Verdicts: what passes, what fails, and that nothing passes without a bound."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic.certify.result import CertifyReport
from elastic.errors import InternalError, SpecError
from elastic.scenarios.check import Bound, Check, failed, judge, not_run

MOST = Bound("seconds", "here", most=2.0)
LEAST = Bound("rate", "here", least=0.5)
PLACE = {"kind": "cpu-gloo", "ranks": 4, "gpus": [], "ray": "2.60.0"}


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({"seconds": 2.0, "rate": 0.5}, ""),
        ({"seconds": 2.1, "rate": 0.5}, "seconds is 2.1, more than 2"),
        ({"seconds": 1, "rate": 0.4}, "rate is 0.4, less than 0.5"),
        ({"rate": 1.0}, "seconds is None, not a number"),
        ({"seconds": float("nan"), "rate": 1.0}, "seconds is nan, not a number"),
        ({"seconds": "fast", "rate": 1.0}, "seconds is fast, not a number"),
    ],
)
def test_a_figure_beyond_its_bound_or_missing_fails(figures: dict, broken: str) -> None:
    check = judge("thing", figures, [MOST, LEAST])
    assert check.verdict == ("fail" if broken else "pass")
    assert check.why.startswith(broken)


@pytest.mark.parametrize(
    "bounds", [[], [Bound("seconds", "here")], [Bound("seconds", "here", most=1.0, least=0.0)]]
)
def test_a_check_that_could_not_fail_is_refused(bounds: list[Bound]) -> None:
    with pytest.raises(InternalError, match="could not fail"):
        judge("thing", {"seconds": 1.0}, bounds)


def test_small_differences_keep_their_digits() -> None:
    assert judge("thing", {"seconds": 1.23456789e-7}, [MOST]).figures == {"seconds": 1.23457e-7}


def test_a_result_survives_json() -> None:
    checks = (
        judge("a", {"seconds": 3.0}, [MOST]),
        not_run("b", "no GPU"),
        failed("c", ValueError("two\nlines")),
    )
    report = CertifyReport(PLACE, checks, 300.0, 12.5, interrupted=True)
    assert CertifyReport.from_plain(json.loads(json.dumps(report.plain())), "x") == report
    assert report.plain()["verdicts"] == {"pass": 0, "fail": 2, "not_run": 1}
    assert checks[2].why == "ValueError: two lines"


@pytest.mark.parametrize(
    "data", [{}, [], {"certify": 1}, {"certify": 1, "checks": [{"name": "a"}], "place": {}}]
)
def test_another_file_is_no_result(data: object) -> None:
    with pytest.raises(SpecError, match=r"x\.json: "):
        CertifyReport.from_plain(data, "x.json")


@pytest.mark.parametrize(
    ("verdicts", "interrupted", "code"),
    [
        (("pass", "not run"), False, 0), (("pass", "fail"), False, 1), (("not run",), False, 1),
        ((), False, 1), (("pass",), True, 3), (("fail",), True, 1),
    ],
)  # fmt: skip
def test_exit_codes(verdicts: tuple, interrupted: bool, code: int) -> None:
    checks = tuple(Check(f"c{i}", verdict) for i, verdict in enumerate(verdicts))
    assert CertifyReport(PLACE, checks, 300.0, 1.0, interrupted).exit_code == code


def test_rows_hold_place_numbers_bounds_and_errors_whole() -> None:
    why = " ".join(f"word{i}" for i in range(80))
    rows = [
        *replace(judge("a", {"seconds": 3.0}, [MOST]), where="this host").lines(),
        *not_run("b", why).lines(),
    ]
    text = " ".join(" ".join(rows).split())
    assert "fail a 0.0 s (this host) seconds 3 [seconds <= 2] seconds is 3, more than 2" in text
    assert why in text
    assert max(map(len, rows)) <= 128


def test_the_end_counts_and_names_what_failed() -> None:
    report = CertifyReport(
        PLACE,
        (judge("a", {"seconds": 3.0}, [MOST]), not_run("b", "no GPU")),
        300.0,
        12.5,
        interrupted=True,
    )
    assert report.summary() == [
        "",
        "failed: a",
        "0 passed, 1 failed, 1 not run in 12 s (interrupted)",
    ]
    fine = CertifyReport(PLACE, (judge("a", {"seconds": 1.0}, [MOST]),), 300.0, 12.5)
    assert fine.summary() == ["", "1 passed, 0 failed, 0 not run in 12 s"]
