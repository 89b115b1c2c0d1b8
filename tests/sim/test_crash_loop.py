"""A pool whose nodes die at start, or are rejected: it is retried ever later, the reason stands in
the run's status, and the run continues as soon as the pool is well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.sim.market import FIXED, SLOW, SPOT, play

from elastic.ledger.journal import Line
from elastic.observe import run_tables
from elastic.observe.run_view import view_of
from elastic.sim.replay import replay
from elastic.sim.scripted_faults import Fault, FaultKind
from elastic.types import NodeLost, RequestNodes

HOUR_S = 3600.0
WHY = {"crash": "ended at start", "refuse": "rejected: scripted"}


def asked(lines: Sequence[Line], pool: str) -> list[tuple[float, int]]:
    """When, and how many."""
    orders = [
        (line.at_s, action) for line in lines if line.decision for action in line.decision.actions
    ]
    return [
        (at_s, order.count)
        for at_s, order in orders
        if isinstance(order, RequestNodes) and order.pool == pool and order.count
    ]


@pytest.mark.parametrize("kind", ["crash", "refuse"])
def test_a_pool_of_bad_nodes_is_asked_ever_later_and_taken_up_again_when_it_is_well(
    kind: FaultKind,
) -> None:
    run = play(
        [Fault(0.0, kind, pool="spot", lasts_s=2 * HOUR_S)], (SPOT,), SLOW, steps=5, min_workers=1
    )
    assert run.state.phase == "succeeded" and not run.backend.violations
    during = [(at_s, n) for at_s, n in asked(run.journal.lines, "spot") if at_s < 2 * HOUR_S]
    # all nodes of the first two starts have failed
    later = [(at_s, n) for at_s, n in during if at_s > 240.0]
    assert {n for _, n in later} == {1}, "one is tried at a time"
    assert 5 <= len(later) <= 9 and sum(n for _, n in during) <= 20, during
    waits = [b[0] - a[0] for a, b in zip(later, later[1:])]
    assert all(longer > 1.2 * wait for wait, longer in zip(waits, waits[1:])), waits
    assert asked(run.journal.lines, "spot")[-1][1] == 3, "all the others, once one has started"
    ill = [line for line in run.journal.lines if line.at_s < 2 * HOUR_S]
    said = "\n".join(run_tables.status(view_of(ill)))
    assert f"starts in a row ended before a node was prepared (the last one: {WHY[kind]})" in said
    assert "retried after" in said
    told = [note.text for note in view_of(ill).notes if note.kind == "NodeRefused"]
    assert bool(told) == (kind == "refuse") and all(
        text.endswith("(spot) is rejected: scripted") for text in told
    )
    assert replay(run.journal.lines).identical
    lost = [
        event
        for line in run.journal.lines
        for _, event in line.events
        if isinstance(event, NodeLost)
    ]
    assert {event.cause for event in lost} >= {"released" if kind == "refuse" else "ended at start"}


@pytest.mark.parametrize("kind", ["crash", "refuse"])
def test_the_next_pool_does_the_work_meanwhile(kind: FaultKind) -> None:
    pools = (SPOT, replace(FIXED, max_nodes=2))
    run = play(
        [Fault(0.0, kind, pool="spot", lasts_s=9 * HOUR_S)],
        pools,
        SLOW,
        steps=20,
        min_workers=1,
        waiting_usd_per_h=20.0,
    )
    assert run.state.phase == "succeeded" and not run.backend.violations
    assert (
        asked(run.journal.lines, "fixed")
        and sum(n for _, n in asked(run.journal.lines, "spot")) <= 20
    )
    found = view_of(run.journal.lines).launches.medians()
    assert set(found) == {"fixed"} and found["fixed"]["median_s"] >= SLOW.boot_s + SLOW.prepare_s
    assert f"first step  fixed {found['fixed']['median_s']:.1f} s" in "\n".join(
        run_tables.status(view_of(run.journal.lines))
    )
