"""The policy against real spot traces: where its settings come from, what they are worth on traces
that they were not searched on, and the published single-node setting.

search: RESERVE and AHEAD of the slack (elastic/policy/pools/slack.py), on the first half of each
trace of `--traces FOLDER`: mean dollars against on demand over traces, deadlines and starts; the
least is taken. proof: on the second halves, where the dollars went too. paper: the jobs, prices,
start-up times and deadlines of tables 4 and 5 of "Can't Be Late" (Wu et al., NSDI 2024), its
policies and ours, on the traces of one node. foresight: on these traces, what the best policy
without it costs (foresight.py), greedy beside it, over the least that was possible with it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import report
from foresight import without_foresight
from simulate import DEADLINES, FIXED_USD, JOB_H, SMOKE_H, SPOT_USD, subject
from trial import Clock

from elastic.ledger.journal import Line
from elastic.policy.pools import slack
from elastic.sim.markets.generators import usual
from elastic.sim.markets.market_run import RunSubject
from elastic.sim.markets.study import Study, carried_out, run_once, spread, summary, world_of
from elastic.sim.markets.traces import Trace, load_traces
from elastic.types import EnterPlan, NodeLost, NodePrepared, NodeReady, PlanEntered, Pool, StepDone

PARTS = ("search", "proof", "paper", "foresight")
MOST_S = 4 * 3600.0
RESERVES, AHEADS = (3.0, 6.0, 9.0, 12.0, 16.0), (0.0, 2.0, 4.0)
POLICIES = ("elastic", "on-demand", "greedy", "time-sliced", "uniform-progress", "bound")
PAPER_POLICIES = ("elastic", "on-demand", "greedy", "uniform-progress", "bound")


@dataclass(frozen=True)
class Workload:
    """A row of tables 4 and 5: hours of the job, deadlines, seconds of a start, dollars per hour,
    and what uniform progress saved."""

    name: str
    hours: float
    deadlines_h: tuple[float, float]
    start_s: float
    spot_usd: float
    fixed_usd: float
    saved: tuple[float, float]


# prices on demand: list prices of then; of the second by its discount of 91 %
WORKLOADS = (
    Workload("ML training", 72.0, (84.0, 100.0), 18 * 60.0, 0.92, 3.06, (0.41, 0.48)),
    Workload("bioinformatics", 22.5, (24.0, 28.0), 11 * 60.0, 0.34, 3.76, (0.63, 0.84)),
    Workload("data analytics", 27.0, (30.0, 36.0), 12 * 60.0, 1.85, 4.03, (0.27, 0.32)),
)


def half(trace: Trace, second: bool) -> Trace:
    """A trace of its own, so that no run from one half sees the other."""
    begin_s = trace.ends_s / 2 if second else 0.0
    length_s = trace.ends_s / 2
    changes = [at_s for at_s in trace.changes(begin_s, begin_s + length_s) if at_s < length_s]
    at = (0.0, *changes)
    nodes = tuple(trace.nodes_at(begin_s + at_s) for at_s in at)
    return Trace(f"{trace.name}, {'second' if second else 'first'} half", at, nodes, length_s)


# ------------------------------------------------------------------------------------------- search


def search(traces: Sequence[Trace], starts: int, smoke: bool) -> dict[str, Any]:
    """`reserve/ahead` -> mean dollars against on demand, and misses."""
    found: dict[str, Any] = {}
    before = slack.RESERVE, slack.AHEAD
    cells = [(r, a) for r in RESERVES for a in AHEADS]
    try:
        for slack.RESERVE, slack.AHEAD in cells[:1] if smoke else cells:
            shares, misses = [], 0
            for trace in traces:
                for late in _deadlines(half(trace, second=False), smoke):
                    study = Study(late, {"spot": half(trace, second=False)}, ("elastic",), starts)
                    for one in carried_out(study, processes=1):
                        shares.append(one.trials["elastic"].usd / one.on_demand_usd)
                        misses += not one.trials["elastic"].done
            found[f"{slack.RESERVE:g}/{slack.AHEAD:g}"] = {
                "vs_on_demand": round(mean(shares), 4), "misses": misses,
            }  # fmt: skip
            print(f"{slack.RESERVE:g}/{slack.AHEAD:g}", mean(shares), misses, file=sys.stderr)
    finally:
        slack.RESERVE, slack.AHEAD = before
    return found


def _deadlines(trace: Trace, smoke: bool) -> list[RunSubject]:
    hours, times = (SMOKE_H, DEADLINES[1:2]) if smoke else (JOB_H, DEADLINES)
    return [subject(trace.most, hours).with_deadline(each * hours) for each in times]


# -------------------------------------------------------------------------------------------- proof


def proof(trace: Trace, starts: int, smoke: bool) -> dict[str, Any]:
    """Deadline -> medians of each policy, and of ours where its dollars went."""
    rows: dict[str, Any] = {}
    seen = half(trace, second=True)
    for late in _deadlines(seen, smoke):
        study = Study(late, {"spot": seen}, POLICIES, starts)
        results = carried_out(study, processes=1 if smoke else None)
        ours = [one.trials["elastic"].usd for one in results]
        even = [one.trials["uniform-progress"].usd for one in results]
        found: dict[str, Any] = {
            name: {
                "vs_on_demand": one.cost_vs_on_demand and round(one.cost_vs_on_demand.median, 3),
                "vs_bound": one.cost_vs_bound and round(one.cost_vs_bound.median, 3),
                "misses": one.deadline_misses,
            }
            for name, one in summary(results).items()
        }
        found["vs_uniform"] = round(median(a / b for a, b in zip(ours, even, strict=True)), 3)
        found["dollars"] = dollars(study)
        rows[f"{(late.job.deadline_h or 0.0) / late.ideal_s * 3600:g}"] = found
    return rows


def dollars(study: Study) -> dict[str, float]:
    """Of our policy, as shares of all: by market; of it before a node was prepared (`starting`),
    while it was and no plan used it (`beside`), and of steps that were done again (`again`)."""
    sums: dict[str, float] = defaultdict(float)
    for seed, start_s in enumerate(study.starts_s()):
        found = run_once(study, start_s, seed=seed, keep=True)
        for name, usd in spent(found.lines, study.subject).items():
            sums[name] += usd
    whole = sums["spot"] + sums["on_demand"]
    return {name: round(usd / whole, 4) for name, usd in sorted(sums.items())}


def spent(lines: Sequence[Line], of: RunSubject) -> dict[str, float]:
    usd_per_s = {pool.name: pool.usd_per_node_h / 3600 for pool in of.pools}
    market = {pool.name: pool.market_type.replace("-", "_") for pool in of.pools}
    born: dict[str, float] = {}
    pools: dict[str, str] = {}
    ready, gone, used = dict[str, float](), dict[str, float](), defaultdict[str, float](float)
    plans: dict[int, tuple[str, ...]] = {}
    members, since_s, step, step_usd, again, at_s = (), 0.0, 0, 0.0, 0.0, 0.0
    for line in lines:
        for at_s, event in line.events:
            if isinstance(event, NodeReady):
                born[event.node.node_id] = max(0.0, at_s - of.delays.boot_s)
                pools[event.node.node_id] = event.node.pool
            elif isinstance(event, NodePrepared):
                ready.setdefault(event.node_id, at_s)
            elif isinstance(event, NodeLost):
                gone[event.node_id] = at_s
            elif isinstance(event, StepDone):
                step, rate = event.step, sum(usd_per_s[pools[name]] for name in members)
                step_usd = event.step_time_s * rate
            elif isinstance(event, PlanEntered):
                for name in members:
                    used[name] += min(at_s, gone.get(name, at_s)) - since_s
                again += max(0, step - event.step) * step_usd
                members, since_s, step = plans[event.generation], at_s, event.step
        for action in line.decision.actions if line.decision else ():
            if isinstance(action, EnterPlan):
                plans[action.plan.generation] = tuple(action.plan.nodes)
    for name in members:
        used[name] += min(at_s, gone.get(name, at_s)) - since_s
    found: dict[str, float] = defaultdict(float)
    for name, pool in pools.items():
        end_s = gone.get(name, at_s)
        began_s = min(ready.get(name, end_s), end_s)
        found[market[pool]] += (end_s - born[name]) * usd_per_s[pool]
        found["starting"] += (began_s - born[name]) * usd_per_s[pool]
        found["beside"] += max(0.0, end_s - began_s - used[name]) * usd_per_s[pool]
    return dict(found) | {"again": again}


# -------------------------------------------------------------------------------------------- paper


def paper(traces: Sequence[Trace], starts: int, smoke: bool) -> list[dict[str, Any]]:
    """What each policy saves against on demand, in the mean, as the paper tells it."""
    rows = []
    for work in WORKLOADS[:1] if smoke else WORKLOADS:
        for trace in traces:
            for hours, saved in zip(work.deadlines_h, work.saved, strict=True):
                study = Study(_subject(work, hours), {"spot": trace}, PAPER_POLICIES, starts)
                results = carried_out(study, processes=1 if smoke else None)
                rows.append(
                    {
                        "job": work.name, "trace": trace.name, "there": round(trace.share, 3),
                        "deadline_h": hours, "published": saved,
                    }
                    | {
                        name: round(1 - mean(r.trials[name].usd / r.on_demand_usd for r in results), 3)
                        for name in PAPER_POLICIES
                    }
                    | {"misses": sum(not r.trials["elastic"].done for r in results)}
                )  # fmt: skip
                print(rows[-1], file=sys.stderr)
    return rows


def _subject(work: Workload, deadline_h: float) -> RunSubject:
    of = subject(1, work.hours).with_deadline(deadline_h)
    usd = {"spot": work.spot_usd, "fixed": work.fixed_usd}
    pools: tuple[Pool, ...] = tuple(replace(p, usd_per_node_h=usd[p.name]) for p in of.pools)
    # a preparation that takes longer than ten minutes counts as stuck
    delays = replace(of.delays, boot_s=work.start_s - of.delays.prepare_s)
    return replace(of, pools=pools, delays=delays)


# ---------------------------------------------------------------------------------------- foresight


def foresight(trace: Trace, starts: int, smoke: bool) -> dict[str, Any]:
    """Deadline -> dollars over the least, as spreads; and starts that were late."""
    rows: dict[str, Any] = {}
    for late in _deadlines(trace, smoke):
        study = Study(late, {"spot": trace}, ("greedy", "bound"), starts)
        results = carried_out(study, processes=1)
        least = [one.trials["bound"].usd for one in results]
        paid = without_foresight(trace, world_of(study, 0.0), study.starts_s())
        greedy = [one.trials["greedy"].usd for one in results]
        rows[f"{(late.job.deadline_h or 0.0) / late.ideal_s * 3600:g}"] = {
            "without_vs_bound": _over(paid, least),
            "greedy_vs_bound": _over(greedy, least),
            "misses": sum(usd == float("inf") for usd in paid),
        }
        print(trace.name, rows, file=sys.stderr)
    return rows


def _over(paid: Sequence[float], least: Sequence[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(paid, least, strict=True)]
    return {"mean": round(mean(ratios), 4)} | spread(ratios).plain()


def measure(clock: Clock, given: Any) -> dict[str, Any]:
    made = usual(
        "made-up", nodes=1 if given.smoke else 2, length_s=12 * 86400.0, taken_per_node_h=0.2,
        dry_h=1.0, seed=2,
    )  # fmt: skip
    traces = load_traces(given.traces) if given.traces else [made]
    if given.only:
        traces = [trace for trace in traces if given.only in trace.name]
    starts = 1 if given.smoke else given.starts
    figures: dict[str, Any] = {
        "starts": starts, "usd_per_node_h": {"spot": SPOT_USD, "on_demand": FIXED_USD},
    }  # fmt: skip
    if "search" in given.parts:
        figures["search"] = search(traces, starts, given.smoke)
    if "proof" in given.parts:
        figures["proof"] = {trace.name: proof(trace, starts, given.smoke) for trace in traces}
        each = [row for rows in figures["proof"].values() for row in rows.values()]
        figures["cost_vs_bound"] = round(median(row["elastic"]["vs_bound"] for row in each), 3)
        figures["cost_vs_uniform_most"] = max(row["vs_uniform"] for row in each)
        figures["deadline_misses"] = sum(row["elastic"]["misses"] for row in each)
    if "paper" in given.parts:
        single = [trace for trace in traces if trace.most == 1]
        figures["paper"] = paper(single, starts, given.smoke)
    if "foresight" in given.parts:
        single = [trace for trace in traces if trace.most == 1]
        figures["foresight"] = {t.name: foresight(t, starts, given.smoke) for t in single}
    return figures


def main() -> int:
    given = report.options(
        __doc__, MOST_S, repeats=1, parts=PARTS,
        values={"traces": "", "starts": "16", "only": ""},
    )  # fmt: skip
    given.starts = int(given.starts)
    return report.finish("spot_policy", given, lambda clock: measure(clock, given))


if __name__ == "__main__":
    sys.exit(main())
