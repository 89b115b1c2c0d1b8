"""Runs with something between their steps: hours without a driver, another phase of the job."""

from __future__ import annotations

from typing import Any

from support.observe.priced_run import PAID
from support.observe.small_run import JOB, plan, tick

from elastic.ledger.journal import Line
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Layout,
    ModelProfile,
    Node,
    NodePrepared,
    NodeReady,
    PlanEntered,
    Pool,
    Resume,
    SampleProfile,
    StepDone,
)

MODEL = ModelProfile(4, 1000, ())
ALL = ("a", "b", "c")


def driver(
    at_s: float, epoch: int, pools: tuple[Pool, ...] = PAID, **keys: Any
) -> tuple[float, DriverStarted]:
    return at_s, DriverStarted("tiny-1", epoch, JOB | keys, pools, MODEL)


def entered(
    driver: tuple[float, DriverStarted], generation: int, step: int, **prepared: Any
) -> list[Line]:
    """Three nodes of the driver's first pool, which train four seconds after it began."""
    at_s, start = driver
    source = Resume("durable", step) if step else Resume()
    made = plan(generation, ALL, Layout(dp_shard=6), resume=source)
    nodes = [NodeReady(Node(name, start.pools[0].name, 2)) for name in ALL]
    ready = [NodePrepared(name, **prepared) for name in ALL]
    return [
        tick(at_s, start),
        tick(at_s + 2, *nodes),
        tick(at_s + 3, *ready, actions=(EnterPlan(made),), reason="all are prepared"),
        tick(at_s + 4, PlanEntered(generation, step)),
    ]


def steps(from_s: float, generation: int, numbers: range, each_s: float = 0.5) -> list[Line]:
    return [
        tick(from_s + each_s * k, StepDone(generation, number, 4.0, 1024, each_s))
        for k, number in enumerate(numbers, 1)
    ]


def two_drivers(gap_s: float, pools: tuple[Pool, ...] = PAID, **keys: Any) -> list[Line]:
    """Twenty steps of half a second, `gap_s` without anything, ten steps more."""
    later_s = 14.0 + gap_s
    return [
        *entered(driver(0.0, 1, steps=400, **keys), 1, 0),
        *steps(4.0, 1, range(1, 21)),
        *entered(driver(later_s, 2, pools, steps=400, **keys), 2, 20),
        *steps(later_s + 4.0, 2, range(21, 31)),
    ]


def two_phases(**keys: Any) -> list[Line]:
    """Fifty steps of a second, then ten of the hundred that each ask ten times as much."""
    samples = tuple(SampleProfile(flop, (), 0, 0) for flop in (1.0, 10.0))
    keys = {"steps": 100, "phases": [{"from_step": 50, "global_batch": 8}]} | keys
    second = plan(2, ALL, Layout(dp_shard=6), phase=1, cause="phase", resume=Resume("live", 50))
    return [
        *entered(driver(0.0, 1, **keys), 1, 0, phase_samples=samples),
        *steps(4.0, 1, range(1, 51), 1.0),
        tick(54.0, actions=(EnterPlan(second),), reason="phase 2"),
        tick(54.0, PlanEntered(2, 50)),
        *steps(54.0, 2, range(51, 61), 10.0),
    ]
