"""What certify tries, in the order in which it is tried, and what cannot be run here."""

from __future__ import annotations

from elastic.certify.checks import (
    fault_checks,
    layout_checks,
    move_checks,
    scenario_checks,
    speed_checks,
    storage_checks,
    ways_in,
)
from elastic.certify.gpu import gpu_checks
from elastic.certify.harness.lab import Lab
from elastic.certify.tasks import Task
from elastic.scenarios.check import Check, not_run

NO_PLANNER = (
    "certify does not compare predicted with measured step times: elastic ledger RUN shows both of "
    "each generation, after elastic profile JOB has measured this hardware"
)


def tasks_of(lab: Lab) -> list[Task]:
    """Of this machine."""
    several = lab.place.ranks > 1
    found = [
        storage_checks.task(lab.storage),
        *([fault_checks.abort_task(lab)] if several else []),
        layout_checks.task(lab),
    ]
    found += [fault_checks.story_task(lab), move_checks.task(lab)] if several else []
    found += [speed_checks.task(lab), *gpu_checks.tasks(lab)]
    played = scenario_checks.tasks(lab)  # the main path is the first one
    return [*found, *played[:1], *ways_in.tasks(lab), *played[1:]]


def left_out(lab: Lab) -> list[Check]:
    """What cannot be run here, each with its reason."""
    several = lab.place.ranks > 1
    out = [
        not_run(name, "it needs two ranks at least")
        for name in ("abort", "kill", "growth", "notice", "reshard")
        if not several
    ]
    whys = scenario_checks.left_out(lab.place) | ways_in.left_out(lab)
    out += [not_run(name, why) for name, why in (whys | gpu_checks.left_out(lab.place)).items()]
    return [*out, not_run("planner error", NO_PLANNER)]
