"""How a bench ends: which figures decide, what no figure may be, the line of JSON, the exit
code."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest
import report
from figures import Changes, Found, overhead, recovery
from trial import Clock, Failed
from verdict import counted, numbers, unsound, worse

BASELINES = json.loads(report.BASELINES.read_text())
STORED = {
    "ratio": {"value": 0.1, "times": 2.0},
    "lost": {"most": 0, "exact": True},
    "speed": {"least": 0.7, "parts": ["fast", "faster"]},
    "found_s": {"most": 15, "parts": ["change"]},
}


def given(
    smoke: bool = False, parts: Sequence[str] | None = None, most_s: float = 5.0
) -> Namespace:
    return Namespace(
        json=True, most_s=most_s, smoke=smoke, **({"parts": list(parts)} if parts else {})
    )


@pytest.mark.parametrize(
    ("figures", "sentences"),
    [
        ({"ratio": 0.19, "lost": 0}, []),
        (
            {"ratio": 0.21, "lost": 0},
            ["ratio is 0.21, more than 0.2 (stored is 0.1, allowed 2.0 times that)"],
        ),
        ({"ratio": 0.1, "lost": 1}, ["lost is 1, more than 0 (promised)"]),
        ({"lost": 0}, ["ratio was not measured"]),
        ({"ratio": None, "lost": 0}, ["ratio was not measured"]),
        (
            {"ratio": float("nan"), "lost": 0},
            ["ratio is nan, more than 0.2 (stored is 0.1, allowed 2.0 times that)"],
        ),
    ],
)
def test_the_verdict(figures: dict[str, Any], sentences: list[str]) -> None:
    assert worse(figures, {name: STORED[name] for name in ("ratio", "lost")}) == sentences


def test_a_figure_below_its_floor_is_worse() -> None:
    stored = {"speed": {"least": 0.7}}
    assert worse({"speed": 0.71}, stored) == []
    assert worse({"speed": 0.69}, stored) == ["speed is 0.69, less than 0.7 (promised)"]
    assert worse({}, stored) == ["speed was not measured"]
    assert worse({"equal": False}, {"equal": {"least": 1}}) == [
        "equal is False, less than 1 (promised)"
    ]


def test_only_the_parts_that_were_asked_for_count() -> None:
    assert set(counted(STORED)) == set(counted(STORED, ["fast", "faster", "change"])) == set(STORED)
    assert set(counted(STORED, ["change"])) == {"ratio", "lost", "found_s"}
    assert set(counted(STORED, ["faster"])) == {"ratio", "lost", "speed"}


def test_in_the_smoke_size_promises_are_held_and_ratios_must_only_be_there() -> None:
    few = counted(STORED, ["fast", "change"], smoke=True)
    good = {"ratio": 9.0, "lost": 0, "speed": 0.01, "found_s": 99.0}
    assert worse(good, few) == []
    assert worse(good | {"lost": 1}, few) == ["lost is 1, more than 0 (promised)"]
    assert worse(good | {"speed": 0.0}, few) == ["speed is 0.0, not above 0"]
    assert worse({**good, "ratio": None}, few) == ["ratio was not measured"]


def test_what_nothing_can_have_measured() -> None:
    figures = {
        "a_s": 0.1,
        "b": [1, float("inf")],
        "c": {"d_s": -0.5},
        "excess_loss_s": -2.0,
        "ok": True,
        "why": "so",
        "n": None,
    }
    assert unsound(figures) == ["b.1 is inf", "c.d_s is -0.5, below 0"]
    assert dict(numbers(figures)) == {
        "a_s": 0.1,
        "b.0": 1,
        "b.1": float("inf"),
        "c.d_s": -0.5,
        "excess_loss_s": -2.0,
    }
    assert unsound({"step_s": float("nan")}) == ["step_s is nan"]


def test_every_baseline_names_a_figure() -> None:
    known = recovery(
        Found({n: [] for n in ("loss", "notice", "growth", "hang")}, {}, {}), [], Changes()
    )
    assert set(BASELINES["recovery"]) <= {*known, "n_sizes_failed", "processes_left"}
    assert set(BASELINES["overhead"]) <= {*overhead([]), "processes_left"}
    for stored in (stored for bench in BASELINES.values() for stored in bench.values()):
        assert set(stored) - {"parts", "exact"} in ({"most"}, {"least"}, {"value", "times"})
        assert stored.get("times", 2.0) > 1


@pytest.mark.parametrize(
    "bench",
    [name for name, of in BASELINES.items() if any("parts" in stored for stored in of.values())],
)
def test_every_part_of_a_baseline_can_be_asked_for(bench: str) -> None:
    module: Any = import_module(bench)
    parts = next(
        getattr(module, name) for name in ("PARTS", "MODELS", "COURSES") if hasattr(module, name)
    )
    assert {
        part for stored in BASELINES[bench].values() for part in stored.get("parts", ())
    } <= set(parts)


@pytest.mark.parametrize(("ratio", "code"), [(1.0, 0), (9.0, 1), (float("nan"), 1), (-1.0, 1)])
def test_a_bench_ends_with_its_figures_and_its_verdict(
    ratio: float, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "baselines", lambda bench: {"ratio": {"value": 1.0, "times": 2.0}})
    assert report.finish("x", given(), lambda clock: {"ratio": ratio}) == code
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["bench"] == "x" and "smoke" not in found
    assert bool(found["figures"]["worse"]) == bool(err) == bool(code)
    assert set(found["figures"]["load"]) == {"before", "after", "most", "cpus"}


@pytest.mark.parametrize(
    ("smoke", "parts", "figures", "code"),
    [
        # nothing is said of the speeds that nobody asked for
        (False, ["change"], {"found_s": 3.0}, 0),
        (False, ["change"], {"found_s": 16.0}, 1),
        (False, ["fast"], {"found_s": 3.0}, 1),
        (False, ["fast"], {"speed": 0.6}, 1),
        (True, ["fast"], {"speed": 0.6}, 0),
        (True, ["fast"], {"speed": 0.6, "lost": 1}, 1),  # a promise
        (True, ["fast"], {"speed": 0.6, "step_s": float("nan")}, 1),
        (True, ["fast"], {}, 1),
    ],
)
def test_the_exit_code(
    smoke: bool, parts: list[str], figures: dict[str, Any], code: int,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(report, "baselines", lambda bench: STORED)
    assert report.tell("x", given(smoke, parts), {"ratio": 0.1, "lost": 0} | figures) == code
    found = json.loads(capsys.readouterr().out)
    assert found.get("smoke", False) is smoke


def test_a_bench_that_could_not_measure_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def late(clock: Clock) -> dict[str, Any]:
        clock.look("the start")
        raise AssertionError("the bound is passed")

    assert report.finish("recovery", given(most_s=1e-9), late) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the start: not within the bench's 0 s" in err


def failing(clock: Clock) -> dict[str, Any]:
    raise Failed("nothing was there")


@pytest.mark.parametrize(("measure", "code"), [(lambda clock: {}, 0), (failing, 1)])
def test_a_bench_without_baselines_is_judged_all_the_same(
    measure: Callable[[Clock], dict[str, Any]], code: int
) -> None:
    assert report.baselines("nobody") == {}
    assert report.finish("nobody", given(), measure) == code


@pytest.mark.parametrize(
    ("words", "repeats", "parts"),
    [
        ([], 5, ["a", "b"]),
        (["--smoke"], 1, ["b"]),
        (["--smoke", "--parts", "a", "--repeats", "3"], 3, ["a"]),
    ],
)
def test_the_command_line(
    words: list[str], repeats: int, parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    monkeypatch.setattr("signal.signal", lambda number, what: None)
    found = report.options("about", 10.0, 5, ("a", "b"), ("b",))
    assert (found.smoke, found.repeats, found.parts) == ("--smoke" in words, repeats, parts)
