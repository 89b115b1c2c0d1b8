"""Bare processes as torchrun would start them: their numbers, their errors, and that none is
left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic.certify.harness.layouts_tried import GLOBAL_BATCH
from elastic.certify.harness.place import Place
from elastic.certify.reference import bare_runs
from elastic.cluster.ray import processes
from elastic.scenarios.limit import Failed, Limit, OutOfTime
from elastic.scenarios.one_process import program_file

PLACE = Place("cpu-gloo", 2)


@pytest.mark.whole
def test_the_plain_loop_trains_and_messages_have_a_rate() -> None:
    found = bare_runs.run(
        PLACE, ("elastic.certify.reference.bare_torch", "train", "3"), Limit.after(600)
    )
    assert len(found["step_s"]) == 3
    assert min(found["step_s"]) > 0
    assert found["losses"][-1] < found["losses"][0]
    assert bare_runs.wire(PLACE, Limit.after(600)) > 0.01
    assert GLOBAL_BATCH % PLACE.ranks == 0
    assert Path(program_file("large")).is_file()


def test_what_they_wrote_is_in_the_error() -> None:
    with pytest.raises(Failed, match="No module named elastic.certify.nothing"):
        bare_runs.run(PLACE, ("elastic.certify.nothing",), Limit.after(60))


@pytest.mark.parametrize(
    ("limit_s", "most_s", "error"), [(0.5, 60.0, OutOfTime), (60.0, 0.5, Failed)]
)
def test_they_end_with_their_time(limit_s: float, most_s: float, error: type[Exception]) -> None:
    before = set(processes.descendants(os.getpid()))
    with pytest.raises(error):
        bare_runs.run(
            PLACE,
            ("elastic.certify.reference.bare_torch", "train", "100000"),
            Limit.after(limit_s),
            most_s=most_s,
        )
    assert set(processes.descendants(os.getpid())) <= before
