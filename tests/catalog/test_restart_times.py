"""What trainers that restart take: in the table, on the pages and in the simulator what
docs/benchmarks.md has."""

from __future__ import annotations

import re

import pytest
from support.places import ROOT

from elastic.catalog.restart_times import RAY_TRAIN, RESTARTS
from elastic.sim.markets.baselines import BASELINES
from elastic.sim.markets.market_run import RunSubject
from elastic.sim.markets.study import VARIANTS
from elastic.sim.scripted_faults import Delays
from elastic.types import Job, Layout, ModelProfile, Plan, Resume
from elastic.types.nouns import Cause, Source


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_times_of_the_peers_are_those_of_the_benchmarks() -> None:
    text = page("benchmarks.md")
    course = text.split("preemptions: kill at", 1)[1].split("events: kill at", 1)[0]
    (idle,) = re.findall(r"^\| idle after it, s \|(.*)\|$", course, re.M)
    _, _, ray_train, torchrun = (float(cell) for cell in idle.split("|"))  # as its first row
    assert len(re.findall(r"kill|notice|add", course.split("\n")[0])) + 1 == 8
    by_name = {one.trainer: one.by_cause for one in RESTARTS}
    assert by_name["torchrun with tuned timeouts"]["loss"] == torchrun / 8
    assert by_name["Ray Train 2.60 with tuned timeouts"]["notice"] == ray_train / 8
    section = text.split("\n## ray_train", 1)[1].split("\n## ", 1)[0]
    for number in by_name["Ray Train 2.60 as it comes"].values():
        assert f"{number:g}" in section


@pytest.mark.parametrize(
    ("cause", "source", "takes_s"),
    [
        ("loss", "peer", 82.6),
        ("loss", "durable", 82.6),
        ("notice", "live", 87.3),
        ("growth", "live", 14.4),
        ("release", "live", 14.4),
    ],
)
def test_a_run_that_restarts_takes_them_by_the_cause(
    cause: Cause, source: Source, takes_s: float
) -> None:
    """Also where a run of ours was measured, which has changed live."""
    measured = Delays(changes_s={f"{cause}/{source}": 0.3})
    subject = RunSubject("", Job(), (), ModelProfile(0, 0, ()), lambda plan: 1.0, 1.0, measured)
    plan = Plan(2, Layout(), (), (), (), resume=Resume(source), cause=cause)
    assert VARIANTS["restarting"][0](subject).delays.entering_s(plan) == takes_s


def test_the_page_of_the_simulator_has_the_figures_that_it_takes() -> None:
    text = page("simulate.md")
    (row,) = re.findall(r"^\| `restart` \|.*$", text, re.M)
    assert re.findall(r"([0-9.]+) s\b", row) == [f"{BASELINES['restart'].lost_s:g}"]
    (said,) = re.findall(r"^`restarting` is ours.*$", text, re.M)
    assert re.findall(r"([0-9.]+) s\b", said) == [f"{s:g}" for s in RAY_TRAIN.by_cause.values()]
