"""`tests/chaos.py`: what it prints, and its exit code."""

from __future__ import annotations

from collections.abc import Callable

import chaos
import pytest


def right(seed: int) -> tuple[list[str], list[str]]:
    return ["loss", "loss"], []


def wrong_at_8(seed: int) -> tuple[list[str], list[str]]:
    return ["loss"], ["a step is missing"] if seed == 8 else []


def raises_at_8(seed: int) -> tuple[list[str], list[str]]:
    if seed == 8:
        raise KeyError("gone")
    return ["loss"], []


@pytest.mark.parametrize(("one", "code"), [(right, 0), (wrong_at_8, 1), (raises_at_8, 1)])
@pytest.mark.parametrize("engine", ["virtual", "markets", "processes"])
def test_its_exit_code_says_whether_a_run_was_wrong(
    engine: str,
    one: Callable[[int], tuple[list[str], list[str]]],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(chaos, "simulated" if engine == "virtual" else engine, one)
    monkeypatch.setattr("sys.argv", ["chaos.py", "--engine", engine, "--seed", "7", "--runs", "3"])
    assert chaos.main() == code
    said = capsys.readouterr().out
    assert f"{engine}: seeds from 7 on" in said and f"{code} runs are wrong" in said
    assert ("seed 8: " in said) == bool(code)


def test_a_seed_that_it_draws_is_printed_and_so_is_that_of_a_wrong_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[int] = []

    def wrong(seed: int) -> tuple[list[str], list[str]]:
        drawn.append(seed)
        return [], ["all of it"]

    monkeypatch.setattr(chaos, "simulated", wrong)
    monkeypatch.setattr("sys.argv", ["chaos.py", "--runs", "1"])
    assert chaos.main() == 1
    said = capsys.readouterr().out
    assert f"virtual: seeds from {drawn[0]} on" in said and f"seed {drawn[0]}: all of it" in said
