"""The arithmetic of the Ray Train bench: from the lines of its workers to seconds and steps
lost."""

from __future__ import annotations

import importlib.util
import json

import pytest
import ray_train
from ray_train_figures import Done, change, figures, finished, first_after
from trial import Clock


def lines(group: int, world: int, steps: range, first_s: float, step_s: float = 0.2) -> list[str]:
    """As `world` workers write them, the last one 0.01 s after the others."""
    return [
        json.dumps({
            "group": group, "rank": rank, "world": world, "step": step,
            "at_s": first_s + (step - steps[0]) * step_s + 0.01 * (rank == world - 1),
        })
        for step in steps for rank in range(world)
    ]  # fmt: skip


def story(world: int = 3) -> list[Done]:
    """Four workers up to step 27 at 105.21; a new group continues behind the checkpoint of step 20
    at 180.01."""
    return finished([*lines(1, 4, range(1, 28), 100.0), *lines(2, world, range(21, 31), 180.0)])


def test_a_step_ends_with_its_last_worker() -> None:
    found = finished(lines(1, 4, range(1, 3), 10.0))
    assert [(d.step, d.world) for d in found] == [(1, 4), (2, 4)]
    assert [d.at_s for d in found] == pytest.approx([10.01, 10.21])


def test_a_step_that_a_worker_did_not_finish_does_not_count() -> None:
    whole = lines(1, 4, range(1, 4), 10.0)
    assert [d.step for d in finished(whole[:-1])] == [1, 2]
    again = lines(2, 4, range(3, 5), 90.0)  # the same step in a later group of the same size
    assert [(d.group, d.step) for d in finished(whole[:-1] + again)] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (2, 4),
    ]


def test_a_loss_counts_from_the_kill_to_the_first_step_of_those_left() -> None:
    found = change(story(), 105.3, 3)
    assert found.answer_s == pytest.approx(180.01 - 105.3)
    assert found.still_s == pytest.approx(180.01 - 105.21 - 0.2)  # less an ordinary step
    assert found.step_s == pytest.approx(0.2)
    assert found.steps_lost == 7  # 21 to 27 once more


def test_training_between_the_notice_and_the_deadline_is_no_standstill() -> None:
    found = change(story(), 101.0, 3)
    assert found.answer_s == pytest.approx(79.01)
    assert found.still_s == pytest.approx(74.6)


def test_an_ordinary_step_is_the_median_of_the_old_groups_last() -> None:
    slow = lines(1, 4, range(1, 41), 0.0, 3.0)
    new = lines(3, 3, range(60, 65), 190.0)
    later = lines(1, 4, range(41, 66), 120.0)  # of the same group
    found = change(finished([*slow, *later, *new]), 125.0, 3)
    assert found.step_s == pytest.approx(0.2)
    assert found.steps_lost == 6
    other = lines(2, 4, range(41, 51), 120.0)
    assert change(finished([*slow, *other, *new]), 125.0, 3).step_s == pytest.approx(0.2)


def test_only_a_group_that_is_new_and_of_that_size_answers() -> None:
    steps = finished([
        *lines(1, 3, range(1, 10), 10.0), *lines(2, 4, range(5, 10), 40.0), *lines(3, 3, range(9,
        12), 70.0),
    ])  # fmt: skip
    assert first_after(steps, 10.5, 3) == Done(3, 3, 9, pytest.approx(70.01))
    assert first_after(steps, 10.5, 4) == Done(2, 4, 5, pytest.approx(40.01))
    with pytest.raises(ValueError, match="no step of 4 workers after 60"):
        change(steps, 60.0, 4)
    with pytest.raises(ValueError, match="no step before"):
        change(steps, 5.0, 3)


def test_each_cause_has_its_figures() -> None:
    found = change(story(), 105.0, 3)
    assert figures("kill", found) == {
        "ray_train_loss_s": 75.01, "ray_train_loss_steps_lost": 7, "ray_train_kill_step_s": 0.2,
    }  # fmt: skip
    assert figures("notice", found)["ray_train_notice_idle_s"] == 74.6
    assert figures("notice", found)["ray_train_notice_to_step_s"] == 75.01
    assert figures("growth", found)["ray_train_growth_s"] == 74.6
    assert figures("growth", found)["ray_train_growth_to_step_s"] == 75.01


def test_what_cannot_be_measured_has_a_reason_and_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = ray_train.measure(Clock(60.0))
    assert set(found["ray_train_failed"]) == {"kill", "notice", "growth"}
    assert "pip install -c constraints.txt -e ." in found["ray_train_failed"]["kill"]
    assert "ray_train_loss_s" not in found
    late = ray_train.measure(Clock(60.0, began_s=-1e6))
    assert "not within the bench's 60 s" in late["ray_train_failed"]["growth"]
