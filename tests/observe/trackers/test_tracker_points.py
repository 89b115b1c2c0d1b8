"""A point for each step, in order, each step once, whatever was undone or resumed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.observe.small_run import T0, lines

from elastic.config.job import job_of
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.metrics.run_numbers import RunNumbers
from elastic.observe.trackers.tracker_points import TrackerPoint, TrackerPoints
from elastic.observe.trackers.tracking import Tracking
from elastic.policy.state.fold import changes
from elastic.storage import open_storage
from elastic.types import NodeLoadSeen, StepDone


def points(given: list[Line]) -> list[TrackerPoint]:
    found: list[TrackerPoint] = []
    made, numbers = TrackerPoints(found.append), RunNumbers()
    for change in changes(given):
        numbers.take(change)
        made.take(change, numbers, True)
    made.close()
    return found


def test_each_step_is_told_once_with_what_is_known_of_the_run() -> None:
    """Steps 7 and 8 are trained twice."""
    found = points(lines())
    assert [one.step for one in found] == list(range(1, 13))
    for one in found:
        assert one.numbers["train/train_loss"] == pytest.approx(6.0 - 0.1 * one.step)
        assert one.numbers["train/tokens"] == 1024 * one.step
        assert one.numbers["train/tokens_per_s"] == 2048
        assert all(isinstance(value, float) for value in one.numbers.values())
    assert [one.numbers["train/workers"] for one in found] == [6] * 4 + [4] * 3 + [2] * 5
    assert [one.numbers["elastic/nodes"] for one in found] == [3] * 7 + [2] * 5
    goodput = [one.numbers["elastic/goodput"] for one in found if "elastic/goodput" in one.numbers]
    assert goodput and all(0 < value < 1 for value in goodput)
    assert found[-1].numbers["evaluated/validation_loss"] == 4.9
    assert "elastic/mfu" not in found[0].numbers, "nobody knows a peak of these nodes"


@pytest.mark.parametrize("at", range(1, len(lines())))
def test_another_driver_reads_on_from_what_was_kept(at: int) -> None:
    found: list[TrackerPoint] = []
    made, numbers = TrackerPoints(found.append), RunNumbers()
    for n, line in enumerate(lines()):
        if n == at:
            standing = json.loads(json.dumps(made.standing()))
            made = TrackerPoints(found.append)
            made.resume(standing)
        for change in changes((line,), numbers.state):
            numbers.take(change)
            made.take(change, numbers, True)
    made.close()
    assert found == points(lines())


def test_trackers_that_are_behind_what_was_kept_need_the_lines_before() -> None:
    keys = {"name": "tiny", "steps": 12, "global_batch": 8}
    job = job_of(keys, Path("/jobs/tiny/program.py"))
    track = Tracking(RunFolder.of(open_storage("/nowhere")), job, {})
    made, numbers = TrackerPoints(lambda point: None), RunNumbers()
    for change in changes(lines()):
        numbers.take(change)
        made.take(change, numbers, True)
    standing = made.standing()
    assert standing["_told"] == 11
    for known, resumes in (((12, 10), False), ((11, 12), True)):
        track._links = {str(step): SimpleNamespace(known=step) for step in known}  # type: ignore[misc]
        assert track.settled(standing) == resumes == track.resume(standing, numbers.state)


def test_what_held_a_step_up_is_told_and_what_is_not_known_is_not() -> None:
    given = [
        replace(line, events=tuple((at_s, _slow(event)) for at_s, event in line.events))
        for line in lines()
    ]
    held = {
        name: value
        for name, value in points(given)[3].numbers.items()
        if name in {f"elastic/{one}" for one in HELD}
    }
    assert held == {"elastic/data_s": 0.25, "elastic/copy_s": 0.125, "elastic/imbalance": 1.5}


def test_the_load_of_nodes_is_told_once_with_the_step_that_follows() -> None:
    given = lines()
    at = next(i for i, line in enumerate(given) for _, e in line.events if _is_step(e, 3))
    load = NodeLoadSeen("c", 0.5, 2**30, 2**32, 7)
    line = Line(given[at].at_s, 1, ((given[at].at_s, load),))
    told = {
        one.step: {name for name in one.numbers if name.startswith("system/")}
        for one in points([*given[:at], line, *given[at:]])
    }
    assert told.pop(3) == {
        "system/cpu_share", "system/memory_share_most", "system/worker_bytes_most",
    }  # fmt: skip
    assert not any(told.values())


def _is_step(event: object, step: int) -> bool:
    return isinstance(event, StepDone) and event.step == step


HELD = ("data_s", "copy_s", "imbalance", "pad_share", "expert_load")


def _slow(event: object) -> object:
    if not isinstance(event, StepDone):
        return event
    return replace(event, data_s=0.25, copy_s=0.125, imbalance=1.5)


def test_a_transition_is_told_with_the_next_step_that_is_told() -> None:
    """That behind the loss begins with a step that was told before."""
    told = {
        one.step: one.numbers
        for one in points(lines())
        if "elastic/transition/pause_s" in one.numbers
    }
    assert sorted(told) == [1, 5, 8]
    assert told[8]["elastic/transition/steps_lost"] == 2
    assert told[8]["elastic/transition/generation"] == 3
    assert told[8]["elastic/transition/pause_s"] > 0 == told[1]["elastic/transition/pause_s"]
    assert told[5]["elastic/transition/first_step_s"] > 0


def test_a_step_that_was_undone_before_it_was_told_is_told_as_it_was_done_last() -> None:
    """Of step 8 nobody had heard more than its end when it was lost."""
    given = [
        replace(line, events=tuple((at_s, _marked(event)) for at_s, event in line.events))
        for line in lines()
    ]
    found = {one.step: one.numbers["of"] for one in points(given)}
    assert [found[step] for step in (6, 7, 8, 9)] == [2, 2, 3, 3]


def _marked(event: object) -> object:
    if not isinstance(event, StepDone):
        return event
    return replace(event, logged={"of": float(event.generation)})


def test_numbers_that_are_none_are_told_as_they_are() -> None:
    given = lines()
    at = next(i for i, line in enumerate(given) if line.at_s == T0 + 4.5)
    ((at_s, event),) = given[at].events
    assert isinstance(event, StepDone)
    given[at] = replace(given[at], events=((at_s, replace(event, train_loss=math.nan)),))
    assert math.isnan(points(given)[0].numbers["train/train_loss"])
