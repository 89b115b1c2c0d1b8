"""What a journal says of how long things take, also where its run had phases, another driver, or
waited for its data."""

from __future__ import annotations

import pytest

from elastic.ledger.journal import Line
from elastic.sim.markets.calibration import Calibration, calibrated
from elastic.types import (
    Action,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Layout,
    ModelProfile,
    Node,
    NodeReady,
    Plan,
    Pool,
    RequestNodes,
    StepDone,
    WorkerId,
)

POOLS = (Pool("spot", "CPU", 1, "spot", 1.0, 0, 4),)


def started(epoch: int = 1, *, attached: bool = False) -> DriverStarted:
    return DriverStarted("r", epoch, {}, POOLS, ModelProfile(1, 1, ()), attached=attached)


def ready(name: str) -> NodeReady:
    return NodeReady(Node(name, "spot", 1))


def at(at_s: float, *events: Event, orders: tuple[Action, ...] = ()) -> Line:
    return Line(at_s, 1, tuple((at_s, event) for event in events), Decision(orders))


def asking(at_s: float, request_id: str) -> Line:
    return at(at_s, orders=(RequestNodes("spot", 1, request_id),))


def trained(
    generation: int, from_s: float, step_s: float, *, phase: int = 0, data_s: float = 0.0
) -> list[Line]:
    """Ten steps in a row."""
    ranks = (WorkerId("a", 0), WorkerId("b", 0))
    plan = Plan(generation, Layout(dp_shard=2), ranks, (1, 1), (4,), phase=phase)
    lines = [at(from_s, orders=(EnterPlan(plan),))]
    for k in range(10):
        step = StepDone(generation, 10 * generation + k, 1.0, 1, step_s, data_s=data_s)
        lines.append(at(from_s + (k + 1) * step_s, step))
    return lines


def boot(*lines: Line) -> tuple[float, int]:
    """Seconds, and of how many nodes."""
    found = calibrated([*lines, *trained(9, 1e6, 1.0)])
    return found.delays.boot_s, found.seen.get("boot_s", 0)


def test_what_a_lost_driver_had_asked_for_does_not_come_to_the_next() -> None:
    before = (at(0.0, started()), asking(10.0, "spot-1"))
    nodes = (asking(36_000.0, "spot-2"), at(36_100.0, ready("b")))
    assert boot(*before, at(36_000.0, started(2)), *nodes) == (100.0, 1)


def test_nodes_that_a_driver_attaches_to_have_not_booted_for_it() -> None:
    before = (at(0.0, started()), asking(10.0, "spot-1"), at(70.0, ready("a")))
    attached = at(500.0, started(2, attached=True))
    nodes = (asking(501.0, "spot-2"), at(502.0, ready("a")), at(561.0, ready("b")))
    assert boot(*before, attached, *nodes) == (60.0, 2)
    anew = (at(500.0, started(2)), asking(501.0, "spot-2"), at(561.0, ready("a")))
    assert boot(*before, *anew) == (60.0, 2)  # of the same name, on nodes of its own


def test_steps_of_each_phase_are_its_own() -> None:
    lines = [*trained(1, 0.0, 1.0), *trained(2, 100.0, 8.0, phase=1)]
    found = calibrated(lines)
    assert found.step_s == pytest.approx({(0, "dp_shard=2"): 1.0, (1, "dp_shard=2"): 8.0})


def test_what_waits_for_data_is_not_productive() -> None:
    def of(data_s: float) -> Calibration:
        return calibrated(trained(1, 0.0, 2.0, data_s=data_s))

    assert (of(0.0).productive, of(1.0).productive) == (pytest.approx(1.0), pytest.approx(0.5))
    assert of(1.0).work == pytest.approx(1.0)
