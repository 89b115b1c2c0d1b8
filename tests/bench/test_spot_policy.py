"""The bench of the policy on spot traces: halves that share nothing, and dollars that sum up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate import subject
from spot_policy import WORKLOADS, half, spent

from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import run_on
from elastic.sim.markets.traces import Trace

TRACE = Trace("t", (0.0, 3600.0, 9000.0, 12_600.0), (2, 0, 1, 2), 14_400.0)


def test_halves_are_traces_of_their_own() -> None:
    first, second = half(TRACE, second=False), half(TRACE, second=True)
    assert (first.at_s, first.nodes, first.ends_s) == ((0.0, 3600.0), (2, 0), 7200.0)
    assert (second.at_s, second.nodes) == ((0.0, 1800.0, 5400.0), (0, 1, 2))
    for at_s in (0.0, 1700.0, 5000.0, 7100.0):
        assert first.nodes_at(at_s) == TRACE.nodes_at(at_s)
        assert second.nodes_at(at_s) == TRACE.nodes_at(7200.0 + at_s)


def test_dollars_by_what_they_were_spent_on_are_the_bill() -> None:
    late = subject(2, 3.0).with_deadline(5.0)
    found = run_on(late, {"spot": PoolMarket(TRACE)}, keep=True)
    assert found.done
    usd = spent(found.lines, late)
    assert usd["spot"] + usd["on_demand"] == pytest.approx(found.usd, rel=0.02)
    assert 0 < usd["starting"] < 0.3 * found.usd and usd["beside"] >= 0
    unannounced = replace(TRACE, nodes=(2, 2, 1, 2))
    again = run_on(late, {"spot": PoolMarket(unannounced)}, keep=True)
    assert spent(again.lines, late)["again"] >= 0


def test_published_jobs_are_the_papers() -> None:
    """Table 4: discounts of spot, and deadlines of about 90 and 75 % of the job."""
    discounts = {"ML training": 0.67, "bioinformatics": 0.91, "data analytics": 0.55}
    for work in WORKLOADS:
        discount = 1 - work.spot_usd / work.fixed_usd
        assert discount == pytest.approx(discounts[work.name], abs=0.04), work
        tight, loose = (work.hours / deadline_h for deadline_h in work.deadlines_h)
        assert tight > loose > 0.7 and tight < 0.95
