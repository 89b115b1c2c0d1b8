"""A small job on spot nodes that come and go, with on-demand ones beside them."""

from __future__ import annotations

from typing import Any

from support.sim.scenario import MODEL

from elastic.driver import Decide
from elastic.policy.decide import decide as decide_by_default
from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import RunResult, RunSubject, run_on
from elastic.sim.markets.traces import Trace
from elastic.sim.scripted_faults import Delays
from elastic.types import Job, Pool


def on_markets(decide: Decide = decide_by_default, **keys: Any) -> RunResult:
    """A job of some hours on spot nodes that come and go, with on-demand ones to fall back on."""
    job = Job.from_plain(
        {
            "name": "j", "steps": 150, "global_batch": 240, "layout": "auto", "max_workers": 4,
            "durable_every": 30, "min_workers": 2,
        } | keys
    )  # fmt: skip
    pools = (
        Pool("spot", "CPU", 1, "spot", 1.0, 0, 4, notice_s=120.0),
        Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 4),
    )
    delays = Delays(boot_s=60.0, prepare_s=30.0, enter_s=2.0)
    trace = Trace("t", (0.0, 3000.0, 6000.0, 9000.0), (4, 1, 0, 3), 12000.0)
    run = RunSubject(
        "j", job, pools, MODEL, lambda plan: 240 / len(plan.ranks), 2.5 * 3600.0, delays
    )
    return run_on(run, {"spot": PoolMarket(trace, unannounced=0.5)}, seed=1, decide=decide)
