"""The simulator: how fast it is, and how the policy stands on spot traces against others and the
least that was possible.

speed: a run of a month on markets whose nodes are taken at a given rate, by the number of nodes:
events and node-months per second of CPU of one process, exponents over nodes and over time, and by
how much more memory four times the time takes. traces: a job of 48 hours on each trace of `--traces
FOLDER` (without it, on made-up markets), deadlines of 1.1, 1.25, 1.5 and 2 times the time without
faults, from `--starts` moments: misses, dollars against on demand, against the bound, and ours
against each other policy; medians, p5 and p95. `--write FILE` keeps each trace and deadline as it
is done, and the same command goes on with those that are missing. A node starts in 12 minutes, and
its prices are those of the year in which the traces were taken.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from statistics import linear_regression, median
from time import monotonic, process_time
from typing import Any

import report
from trial import Clock

from elastic.sim.markets.generators import usual
from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import RunSubject, run_on
from elastic.sim.markets.study import ELASTIC, Study, carried_out, spread, summary
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
LONGER, LONG_NODES = (0.25, 0.5, 1.0), 64  # parts of the time, and on how many nodes
TOLD_EVERY_S = 30.0
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
    began_s = process_time()
    found = run_on(month, {"spot": PoolMarket(trace)})
    took_s = process_time() - began_s
    assert found.done, found.reason
    return {
        "events_per_s": found.n_events / took_s,
        "node_months_per_s": nodes * found.wall_s / MONTH_S / took_s,
        "seconds": took_s,
        "events": found.n_events,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def exponent(rows: Sequence[tuple[float, float]]) -> float:
    """How the second number grows with the first."""
    slope, _ = linear_regression([log(x) for x, _ in rows], [log(y) for _, y in rows])
    return round(slope, 2)


def speeds(sizes: Sequence[int], days: float) -> dict[str, Any]:
    """Memory first: a process never tells of less than it had before."""
    longer = {part: speed(LONG_NODES, part * days) for part in LONGER}
    rows = {nodes: speed(nodes, days) for nodes in sizes}
    first, last = longer[LONGER[0]], longer[LONGER[-1]]
    return {
        "events_per_s": round(median(row["events_per_s"] for row in rows.values()), 1),
        "node_months_per_s": round(rows[sizes[-1]]["node_months_per_s"], 2),
        "seconds": {n: round(row["seconds"], 2) for n, row in rows.items()},
        "events": {n: row["events"] for n, row in rows.items()},
        "nodes_exponent": exponent([(n, row["seconds"]) for n, row in rows.items()]),
        "time_exponent": exponent([(part, row["seconds"]) for part, row in longer.items()]),
        "memory_mb": {n: round(row["mb"]) for n, row in rows.items()},
        "memory_of_longer": round(last["mb"] / first["mb"], 3),
    }


def on_deadline(trace: Trace, times: float, starts: int, *, smoke: bool) -> dict[str, Any]:
    """Of each policy."""
    hours = SMOKE_H if smoke else JOB_H
    late = subject(trace.most, hours).with_deadline(times * hours)
    study = Study(late, {"spot": trace}, POLICIES, starts)
    told = Told(f"{trace.name}, {times:g} x ideal", starts)
    found = carried_out(study, processes=1 if smoke else None, progress=told)
    ours = [result.trials[ELASTIC].usd for result in found]
    row: dict[str, Any] = {}
    for name, one in summary(found).items():
        theirs = [result.trials[name].usd for result in found]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True) if 0 < b < float("inf")]
        row[name] = {
            "vs_on_demand": one.cost_vs_on_demand and one.cost_vs_on_demand.plain(),
            "vs_bound": one.cost_vs_bound and one.cost_vs_bound.plain(),
            "elastic_vs_it": spread(ratios).plain() if ratios else None,
            "misses": one.deadline_misses,
        }
    return row


class Written:
    """What is found, trace by trace and deadline by deadline; in a file, where one is named, so
    that a bench that was interrupted goes on with what is missing."""

    def __init__(self, path: str, starts: int) -> None:
        self.path, self.starts = Path(path) if path else None, starts
        self.traces: dict[str, dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            before = json.loads(self.path.read_text())
            if before["starts"] != starts:
                sys.exit(f"{path} is of {before['starts']} starts, not {starts}: name another file")
            self.traces = before["traces"]

    def row(self, trace: str, times: float, find: Callable[[], dict[str, Any]]) -> None:
        rows = self.traces.setdefault(trace, {})
        if f"{times:g}" in rows:
            return
        rows[f"{times:g}"] = find()
        if self.path is not None:
            whole = self.path.with_suffix(".new")
            whole.write_text(json.dumps({"starts": self.starts, "traces": self.traces}))
            whole.replace(self.path)


class Told:
    """On stderr, how far a study has come: now and then, and at its end."""

    def __init__(self, what: str, starts: int) -> None:
        self.what, self.starts, self.began_s = what, starts, monotonic()
        self.last_s = self.began_s

    def __call__(self, done: int) -> None:
        now_s = monotonic()
        if done == self.starts or now_s >= self.last_s + TOLD_EVERY_S:
            self.last_s = now_s
            took = f"{now_s - self.began_s:.0f} s"
            print(f"{self.what}: {done} of {self.starts} starts, {took}", file=sys.stderr)


def measure(clock: Clock, given: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if "speed" in given.parts:
        sizes, days = (SIZES[:2], 3.0) if given.smoke else (SIZES, 30.0)
        figures |= speeds(sizes, days)
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
        written = Written(given.write, starts)
        for trace in traces:
            for times in DEADLINES[1:2] if given.smoke else DEADLINES:
                find = partial(on_deadline, trace, times, starts, smoke=given.smoke)
                written.row(trace.name, times, find)
        each = [row["elastic"] for rows in written.traces.values() for row in rows.values()]
        figures |= {
            "traces": written.traces,
            "cost_vs_bound": round(
                median(row["vs_bound"]["median"] for row in each if row["vs_bound"]), 3
            ),
            "deadline_misses": sum(row["misses"] for row in each),
            "starts": starts,
        }
    return figures


def main() -> int:
    given = report.options(
        __doc__, MOST_S, repeats=1, parts=PARTS, values={"traces": "", "starts": "16", "write": ""}
    )
    given.starts = int(given.starts)
    return report.finish("simulate", given, lambda clock: measure(clock, given))


if __name__ == "__main__":
    sys.exit(main())
