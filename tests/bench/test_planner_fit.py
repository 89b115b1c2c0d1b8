"""The fit of the planner's constants: it reads them as the planner does, and finds those that made
the measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import planner_fit
import pytest
from planner_fit import errors, figures, fit, halves, kernels, loss, made_up, start, touched, write

from elastic.planner.cost.kernels import LOGIT_BYTES, _table, generation
from elastic.planner.published.measurements import Case


@pytest.fixture(name="made")
def _made() -> list[Case]:
    return made_up()


def test_the_constants_that_made_the_measurements_are_found(made: list[Case]) -> None:
    began = start(made)
    before, constants = figures(began, made), fit(made, began)
    assert before["median_abs_err"] > 0.15 and figures(constants, made)["median_abs_err"] < 0.02
    # from 0.82; `tail` slows products too
    assert constants["fsdp2", "Hopper", "matmul"] == pytest.approx(0.6, rel=0.12)
    # nothing is said of it
    assert constants["megatron-2022", "", "moved"] == began["megatron-2022", "", "moved"]


def test_halves_are_scored_with_what_the_other_half_was_fitted_to(made: list[Case]) -> None:
    found = halves(made, start(made), planner_fit.SMOKE_HALF)
    assert {name: some["rows"] for name, some in found.items()} == {
        "fitted_a": 2,
        "unseen_b": 2,
        "fitted_b": 2,
        "unseen_a": 2,
    }
    assert found["fitted_a"]["median_abs_err"] < 0.02 and found["unseen_b"]["median_abs_err"] < 0.1


def test_constants_are_read_as_the_planner_reads_them() -> None:
    table = {
        (software, arch, name): v
        for (software, arch), some in _table().items()
        for name, v in some.items()
    }
    for software in LOGIT_BYTES:
        for arch in {arch for of, arch in _table() if of == planner_fit.family(software) and arch}:
            assert kernels(table, software, arch) == generation(software, arch)


def test_rows_and_sources_weigh_the_same_and_large_errors_are_bounded(made: list[Case]) -> None:
    began = start(made)
    some = [replace(case, source=source) for case, source in zip(made, "aaab")]
    small = 0.1 + 0.1**2 / 2
    assert loss([0.0, 0.0, 0.0, 0.1], some, began, began) == pytest.approx(
        (small / 4 + small / 2) / 2
    )
    assert loss([9.0, 0, 0, 0], some, began, began) == loss([-1.2, 0, 0, 0], some, began, began)
    moved = began | {("", "", "link"): 2 * began["", "", "link"]}
    assert loss([0.0] * 4, some, moved, began) == pytest.approx(
        planner_fit.DRAWN * 0.6931471805599453**2
    )


def test_a_constant_touches_its_own_rows(made: list[Case]) -> None:
    assert touched(("", "", "link"), made) == touched(("fsdp2", "", "moved"), made) == [0, 1, 2, 3]
    assert (
        touched(("fsdp2", "Ampere", "matmul"), made)
        == touched(("fsdp2-compiled", "", "moved"), made)
        == []
    )
    assert errors(start(made), made)[0] > 0


def test_what_is_written_is_the_table(tmp_path: Path) -> None:
    table = {
        (software, arch, name): v
        for (software, arch), some in _table().items()
        for name, v in some.items()
    }
    write(table, tmp_path / "kernels.csv")
    assert (tmp_path / "kernels.csv").read_text() == planner_fit.KERNELS.read_text()


def test_measurements_that_are_not_there_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner_fit.main(["--shared", str(tmp_path)]) == 2
    assert "public.csv is not there; --shared names the folder" in capsys.readouterr().err
