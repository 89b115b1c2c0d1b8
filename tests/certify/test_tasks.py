"""How the minutes are divided, and what is said of the checks that had none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from elastic.certify.tasks import Task, TaskRefused, Tasks
from elastic.scenarios.check import Bound, Check, judge
from elastic.scenarios.limit import Failed, Limit, OutOfTime

FINE = Bound("n", "here", most=1)


def fine(
    *names: str, least_s: float = 0.0, weight: float = 1.0, raises: BaseException | None = None
) -> Task:
    """Yields a passing check for each name, the last of them only if it does not raise before."""

    def work(limit: Limit) -> Iterator[Check]:
        for name in names[:-1] if raises else names:
            yield judge(name, {"n": 1}, [FINE])
        if raises:
            raise raises

    return Task(names, work, least_s, weight)


def done(tasks: list[Task], budget_s: float = 100.0) -> tuple[dict[str, tuple[str, str]], Tasks]:
    told: list[Check] = []
    all_ = Tasks(told.append)
    all_.run(tasks, budget_s)
    assert told == all_.checks
    return {check.name: (check.verdict, check.why) for check in all_.checks}, all_


def test_what_has_too_little_time_is_not_run() -> None:
    found, _ = done([fine("a"), fine("b", least_s=200.0), fine("c")])
    assert found["a"] == found["c"] == ("pass", "")
    assert found["b"][0] == "not run"
    assert "needs about 200 s" in found["b"][1]
    assert "--minutes" in found["b"][1]


def test_what_was_broken_off_is_tried_again_with_what_others_left() -> None:
    shares: list[float] = []

    def hungry(limit: Limit) -> Iterator[Check]:
        shares.append(limit.left_s)
        yield judge("a", {"n": len(shares)}, [Bound("n", "here", most=5)])
        if limit.left_s < 60:
            raise OutOfTime("aborted")
        yield judge("b", {"n": 1}, [FINE])

    found, tasks = done([Task(("a", "b"), hungry, 0.0, 1.0), fine("c", weight=3.0)])
    assert shares == pytest.approx([25.0, 100.0], abs=1.0)
    assert [(check.name, check.verdict) for check in tasks.checks] == [
        ("a", "pass"),
        ("c", "pass"),
        ("b", "pass"),
    ]
    assert tasks.checks[0].figures == {"n": 1}, "what was found first stays"
    shares.clear()
    found, _ = done([Task(("a", "b"), hungry, 0.0, 1.0), fine("c", weight=0.5)], budget_s=30.0)
    assert len(shares) == 1, "so little more would not help"
    assert found["b"] == ("not run", "aborted")


def test_without_any_time_nothing_passes() -> None:
    found, _ = done([fine("a", least_s=1.0), fine("b", least_s=1.0)], budget_s=0.0)
    assert {verdict for verdict, _ in found.values()} == {"not run"}


def test_shares_follow_the_weights_and_a_short_task_leaves_its_rest() -> None:
    shares: list[float] = []

    def note(limit: Limit) -> Iterator[Check]:
        shares.append(limit.left_s)
        yield judge(f"n{len(shares)}", {"n": 1}, [FINE])

    done(
        [
            Task(("n1",), note, 0.0, 1.0),
            Task(("n2",), note, 0.0, 3.0),
            Task(("n3",), note, 0.0, 1.0),
        ]
    )
    assert shares == pytest.approx([20.0, 75.0, 100.0], abs=1.0)


def test_what_is_raised_is_the_result_of_the_check_that_was_due() -> None:
    found, _ = done([fine("a", "b", "c", raises=Failed("it broke")), fine("d")])
    assert found["c"] == ("fail", "Failed: it broke")
    found, _ = done([fine("a", raises=ValueError("no"))])
    assert found == {"a": ("fail", "ValueError: no")}


def test_an_error_after_the_last_check_is_not_swallowed() -> None:
    def work(limit: Limit) -> Iterator[Check]:
        yield judge("a", {"n": 1}, [FINE])
        raise Failed("afterwards")

    found, _ = done([Task(("a",), work, 0.0, 1.0)])
    assert found == {"a": ("pass", ""), "a (afterwards)": ("fail", "Failed: afterwards")}


@pytest.mark.parametrize("reason", [OutOfTime("its share was spent"), TaskRefused("NCCL says no")])
def test_out_of_time_and_refused_are_neither_pass_nor_fail(reason: Exception) -> None:
    found, _ = done([fine("a", "b", raises=reason), fine("c")])
    assert found == {"a": ("pass", ""), "b": ("not run", str(reason)), "c": ("pass", "")}


def test_ctrl_c_keeps_what_was_found() -> None:
    found, tasks = done([fine("a", "b", raises=KeyboardInterrupt()), fine("c")])
    assert found == {
        "a": ("pass", ""),
        "b": ("not run", "interrupted"),
        "c": ("not run", "interrupted before its turn"),
    }
    assert tasks.interrupted


def test_a_check_that_never_comes_is_not_run() -> None:
    found, _ = done([Task(("a",), lambda limit: iter(()), 0.0, 1.0)])
    assert found == {"a": ("not run", "it gave no result")}


def test_the_limit() -> None:
    Limit.after(5.0).look("x")
    with pytest.raises(OutOfTime, match="aborted at 'x'"):
        Limit(time.monotonic() - 1).look("x")
