"""The simulator: how fast it is, and how the policy stands on spot traces against others and the
least that was possible.

speed: a run of a month on markets whose nodes are taken at a given rate, by the number of nodes:
events and node-months per second of one process. traces: a job of 48 hours on each trace of
`--traces FOLDER` (without it, on made-up markets), deadlines of 1.1, 1.25, 1.5 and 2 times the time
without faults, from `--starts` moments: dollars against on demand and against the bound, misses.
A node starts in 12 minutes, and its prices are those of the year in which the traces were taken.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import report
from trial import Clock

from elastic.sim.markets.generators import usual
from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import RunSubject, run_on
from elastic.sim.markets.study import Study, carried_out, summary
from elastic.sim.markets.traces import Trace, load_traces
from elastic.sim.scripted_faults import Delays
from elastic.types import Job, ModelProfile, OptimizerSpec, Plan, Pool, TensorSpec

PARTS = ("speed", "traces")
MOST_S = 3600.0
HOUR, MONTH_S = 3600.0, 30 * 86400.0
JOB_H, SMOKE_H, STEP_S, START_S = 48.0, 8.0, 20.0, 720.0
SPOT_USD, FIXED_USD = 0.918, 3.06  # per hour: a p3.2xlarge in us-west-2 when the traces were taken
DEADLINES = (1.1, 1.25, 1.5, 2.0)
POLICIES = ("elastic", "on-demand", "greedy", "time-sliced", "uniform-progress", "restart", "bound")
SIZES = (16, 64, 256, 1000)
TAKEN_PER_H = 0.1  # of all nodes together: what grows is their number, not what happens
MODEL = ModelProfile(
    4,
    1_000_000,
    (TensorSpec("w", (1000, 1000), "float32", 0, 1),),
    (OptimizerSpec(("exp_avg",)),),
    tp_limit=2,
)


class Even:
    """Seconds of a step: in proportion to the workers."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __call__(self, plan: Plan) -> float:
        return STEP_S * self.workers / len(plan.ranks)


def subject(nodes: int, hours: float, **keys: Any) -> RunSubject:
    job = Job.from_plain(
        {
            "name": "job", "steps": round(hours * HOUR / STEP_S), "global_batch": 240 * nodes,
            "layout": "dp_shard=1" if nodes == 1 else "auto", "max_workers": nodes,
            "purpose": "deadline", "durable_every": "auto",
        } | keys
    )  # fmt: skip
    pools = (
        Pool("spot", "CPU", 1, "spot", SPOT_USD, 0, nodes, notice_s=0.0),
        Pool("fixed", "CPU", 1, "on-demand", FIXED_USD, 0, nodes),
    )
    delays = Delays(boot_s=180.0, prepare_s=START_S - 180.0, enter_s=5.0, detect_s=1.0)
    return RunSubject("job", job, pools, MODEL, Even(nodes), hours * HOUR, delays, batch_s=300.0)


def speed(nodes: int, days: float) -> dict[str, float]:
    length_s = days * 86400.0
    trace = usual(
        "made-up", nodes=nodes, length_s=2 * length_s, taken_per_node_h=TAKEN_PER_H / nodes,
        dry_h=0.25, seed=1,
    )  # fmt: skip
    month = replace(
        subject(nodes, length_s / HOUR, purpose="cheapest", on_demand_floor=0, durable_every=900),
        batch_s=HOUR,
    )
    began_s = perf_counter()
    found = run_on(month, {"spot": PoolMarket(trace)}, keep=True)
    took_s = perf_counter() - began_s
    assert found.done, found.reason
    events = sum(len(line.events) for line in found.lines)
    return {
        "events_per_s": events / took_s,
        "node_months_per_s": nodes * found.wall_s / MONTH_S / took_s,
        "seconds": took_s,
        "events": events,
    }


def on_trace(trace: Trace, starts: int, smoke: bool) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    hours, deadlines = (SMOKE_H, DEADLINES[1:2]) if smoke else (JOB_H, DEADLINES)
    for times in deadlines:
        late = subject(trace.most, hours).with_deadline(times * hours)
        study = Study(late, {"spot": trace}, POLICIES, starts)
        found = summary(carried_out(study, processes=1 if smoke else None))
        rows[f"{times:g}"] = {
            name: {
                "vs_on_demand": one.cost_vs_on_demand and round(one.cost_vs_on_demand.median, 3),
                "vs_bound": one.cost_vs_bound and round(one.cost_vs_bound.median, 3),
                "misses": one.deadline_misses,
            }
            for name, one in found.items()
        }
    return rows


def measure(clock: Clock, given: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if "speed" in given.parts:
        sizes, days = (SIZES[:2], 3.0) if given.smoke else (SIZES, 30.0)
        rows = {nodes: speed(nodes, days) for nodes in sizes}
        figures |= {
            "events_per_s": round(median(row["events_per_s"] for row in rows.values()), 1),
            "node_months_per_s": round(rows[sizes[-1]]["node_months_per_s"], 2),
            "seconds": {n: round(row["seconds"], 2) for n, row in rows.items()},
        }
    if "traces" in given.parts:
        traces = (
            load_traces(given.traces)
            if given.traces
            else [
                usual(
                    "made-up",
                    nodes=2,
                    length_s=12 * 86400.0,
                    taken_per_node_h=0.2,
                    dry_h=1.0,
                    seed=2,
                )
            ]
        )
        starts = 1 if given.smoke else given.starts
        found = {trace.name: on_trace(trace, starts, given.smoke) for trace in traces}
        each = [row["elastic"] for rows in found.values() for row in rows.values()]
        figures |= {
            "traces": found,
            "cost_vs_bound": round(median(row["vs_bound"] for row in each), 3),
            "deadline_misses": sum(row["misses"] for row in each),
            "starts": starts,
        }
    return figures


def main() -> int:
    given = report.options(
        __doc__, MOST_S, repeats=1, parts=PARTS, values={"traces": "", "starts": "16"}
    )
    given.starts = int(given.starts)
    return report.finish("simulate", given, lambda clock: measure(clock, given))


if __name__ == "__main__":
    sys.exit(main())
