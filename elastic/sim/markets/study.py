"""Many starts over the same traces: each policy's cost, time and misses, as medians with their
5th and 95th percentiles."""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, nan
from typing import Any, get_args

from elastic.catalog.restart_times import RAY_TRAIN
from elastic.driver import Decide
from elastic.errors import SpecError
from elastic.ledger.on_demand_price import on_demand_price
from elastic.planner.cost.model_cost import ModelCost
from elastic.policy.decide import decide
from elastic.sim.markets.baselines import BASELINES
from elastic.sim.markets.bound import least_usd
from elastic.sim.markets.market_backend import PoolMarket
from elastic.sim.markets.market_run import RunResult, RunSubject, run_on
from elastic.sim.markets.tick_world import TickWorld, play, tick_world, together
from elastic.sim.markets.traces import Trace
from elastic.types import Pool
from elastic.types.nouns import Source

ELASTIC, BOUND, ON_DEMAND = "elastic", "bound", "on-demand"
TICKS_MOST, PLAYED_MOST = 1500, 200_000  # of the bound and of baselines: more are put together
START_TICKS = 8  # that a start is cut into at most
EGRESS_USD_PER_GB = 0.02  # between regions of AWS: its price list for EC2, data transfer
BOUND_NODES = 64  # beyond that the bound takes too long


@dataclass(frozen=True)
class Study:
    """`traces`: spot pool -> its trace. `policies`: names of BASELINES, VARIANTS, elastic, bound.
    `n_starts`: evenly over the traces. `unannounced`: share of nodes that are taken without a
    notice."""

    subject: RunSubject
    traces: Mapping[str, Trace]
    policies: tuple[str, ...]
    n_starts: int = 16
    unannounced: float = 0.0
    own_policy: str = ""

    @property
    def spot(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.subject.pools if pool.name in self.traces)

    @property
    def n_nodes(self) -> int:
        bound = self.subject.job.max_nodes
        n = sum(pool.max_nodes for pool in self.spot)
        return n if bound is None else min(n, bound)

    @property
    def least_node_s(self) -> float:
        """Of one node, for the whole job: by as many as each does most on."""
        efficient_s = self.subject.efficient_s
        whole_s = self.group_s if efficient_s is None else min(efficient_s, self.group_s)
        return self.n_nodes * whole_s

    @property
    def group_s(self) -> float:
        """Of the whole job on as many nodes as the other policies take."""
        return self.subject.ideal_s if self.subject.group_s is None else self.subject.group_s

    def head_usd(self, seconds: float) -> float:
        """Of the head, which every policy pays as long as it runs."""
        return seconds / 3600 * self.subject.job.head_usd_per_h

    @property
    def deadline_s(self) -> float:
        hours = self.subject.job.deadline_h
        return 3600 * hours if hours else self.subject.given_up_s

    @property
    def on_demand_usd_per_h(self) -> float:
        """Of a node with the GPUs of one of the spot pools; infinite = not known of one of them."""
        pools = self.subject.pools
        usd = [on_demand_price(pool, pools)[0] for pool in self.spot]
        paid = [
            inf if each is None else each * max(1, pool.gpus_per_node) * pool.max_nodes
            for each, pool in zip(usd, self.spot, strict=True)
        ]
        return sum(paid) / sum(pool.max_nodes for pool in self.spot)

    def priced(self, start_at_s: float) -> Study:
        """With pools at the prices that their traces have then."""
        usd = {name: trace.usd_at(start_at_s) for name, trace in self.traces.items()}
        pools = tuple(
            pool if (now := usd.get(pool.name)) is None else replace(pool, usd_per_node_h=now)
            for pool in self.subject.pools
        )
        return replace(self, subject=replace(self.subject, pools=pools))

    def starts_s(self) -> list[float]:
        """Where in the traces the runs begin."""
        whole_s = min(trace.ends_s for trace in self.traces.values())
        return [k * whole_s / self.n_starts for k in range(self.n_starts)]


@dataclass(frozen=True)
class PolicyTrial:
    """One policy from one start. `usd`: infinite or no number = not known; `reason`: why a run of
    ours ended."""

    usd: float
    wall_s: float
    done: bool
    goodput: float
    transitions: int = 0
    reason: str = ""

    @property
    def over_budget(self) -> bool:
        return not self.done and self.reason.startswith("the budget of $")


@dataclass(frozen=True)
class StartResult:
    """All policies from one start. `on_demand_usd`: of the job on demand alone; infinite =
    not known."""

    start_at_s: float
    on_demand_usd: float
    trials: Mapping[str, PolicyTrial]


# ----------------------------------------------------------------------------- what a part is worth


def _whole_pool(subject: RunSubject) -> RunSubject:
    """Runs on all nodes or on none."""
    gpus = max(
        (pool.gpus_per_node * pool.max_nodes for pool in subject.pools if pool.paid), default=1
    )
    most = subject.job.max_workers or gpus
    return replace(subject, job=replace(subject.job, min_workers=min(most, gpus)))


def _restarted(subject: RunSubject) -> RunSubject:
    """Every change ends all processes and starts them anew, whatever a run of ours has taken for
    it; one of another cause as one for which nobody is waited for."""
    by_cause, sources = RAY_TRAIN.by_cause, get_args(Source)
    changes_s = {f"{cause}/{of}": s for cause, s in by_cause.items() for of in sources}
    least_s = min(by_cause.values())
    slow = replace(subject.delays, enter_s=least_s, restore_s=least_s, changes_s=changes_s)
    return replace(subject, delays=slow)


def _no_replicas(subject: RunSubject) -> RunSubject:
    return replace(subject, job=replace(subject.job, peer_copies=0))


def _no_notice(subject: RunSubject) -> RunSubject:
    pools = tuple(replace(pool, notice_s=0.0) for pool in subject.pools)
    return replace(subject, pools=pools)


def _no_on_demand(subject: RunSubject) -> RunSubject:
    pools = tuple(pool for pool in subject.pools if pool.market_type != "on-demand")
    return replace(subject, pools=pools)


RESTARTING = ", ".join(f"{cause} {s:g} s" for cause, s in RAY_TRAIN.by_cause.items())
VARIANTS: Mapping[str, tuple[Callable[[RunSubject], RunSubject], str]] = {
    "all-or-none": (_whole_pool, "elastic, but on all nodes or on none"),
    "restarting": (_restarted, f"elastic, but each change restarts all ({RESTARTING})"),
    "no-replicas": (_no_replicas, "elastic without replicas in other nodes' memory"),
    "no-notice": (_no_notice, "elastic, every node taken without a notice"),
    "no-on-demand": (_no_on_demand, "elastic on spot alone"),
}
KNOWN = (ELASTIC, *VARIANTS, *BASELINES, BOUND)
USUAL = (ELASTIC, ON_DEMAND, "greedy", "uniform-progress", "restart", BOUND)


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Raises SpecError for a policy that nobody knows."""
    for name in names:
        if name not in KNOWN:
            raise SpecError(f"--compare: no policy '{name}'; there are {', '.join(KNOWN)}")
    return tuple(dict.fromkeys((ELASTIC, *names)))


# ----------------------------------------------------------------------------------------- the runs


def world_of(study: Study, start_at_s: float, *, most: int | None = None) -> TickWorld:
    """What the bound sees, or baselines in the first `most` of their finer ticks, at the prices of
    the traces, which elsewhere are those of the pools. A group that no pool alone can hold spans
    them all. Raises SpecError for a deadline that cannot be met, and for pools without a price."""
    spot, subject = study.spot, study.subject
    fixed = [pool for pool in subject.pools if pool.market_type == "on-demand"]
    for pool in (*spot, *fixed):
        trace = study.traces.get(pool.name)
        if not pool.usd_per_node_h and not (trace and any(trace.usd_per_node_h)):
            raise SpecError(
                f"pool {pool.name} has no price: dollars cannot be told; give usd_per_node_h"
            )
    markets = [_own_price(study.traces[pool.name].scaled(pool.max_nodes), pool) for pool in spot]
    gaps = [
        min((b - a for a, b in zip(t.at_s, t.at_s[1:], strict=False)), default=t.ends_s)
        for t in study.traces.values()
    ]
    start_s = subject.delays.boot_s + subject.delays.prepare_s
    coarsest_s = study.deadline_s / (TICKS_MOST if most is None else PLAYED_MOST)
    like = TickWorld(
        min(max(min(gaps), coarsest_s, start_s / START_TICKS), study.deadline_s),
        (),
        study.n_nodes,
        study.group_s * study.n_nodes,
        0.0,
        study.on_demand_usd_per_h,
        start_s,
        _egress_usd(study),
    )
    world = tick_world(
        like,
        markets,
        start_at_s=start_at_s,
        deadline_s=study.deadline_s,
        ideal_s=subject.ideal_s if subject.every_s is None else subject.every_s,
        most=most,
    )
    if max(pool.max_nodes for pool in spot) >= study.n_nodes:
        return world
    return together(world)


def _own_price(trace: Trace, pool: Pool) -> Trace:
    """At the pool's price, where it has none."""
    own = trace.usd_per_node_h or (pool.usd_per_node_h,) * len(trace.at_s)
    return replace(trace, usd_per_node_h=own)


def _egress_usd(study: Study) -> float:
    """Per node, of its part of the state; within a region it costs nothing."""
    if len({pool.region for pool in study.spot}) < 2:
        return 0.0
    n_bytes = ModelCost.of(study.subject.model).state_bytes / study.n_nodes
    return n_bytes / 1e9 * EGRESS_USD_PER_GB


def markets_of(study: Study, start_at_s: float) -> dict[str, PoolMarket]:
    return {
        pool.name: PoolMarket(
            study.traces[pool.name].scaled(pool.max_nodes), start_at_s, study.unannounced
        )
        for pool in study.spot
    }


def policy_of(path: str) -> Decide:
    """A policy of the user's own, by its import path `module:function`. Raises SpecError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SpecError(
            f"--policy {path}: {error}; give module:function, a (State, now_s) -> Decision"
        ) from None
    if not callable(found):
        raise SpecError(f"--policy {path}: it is no function of (State, now_s)")
    policy: Decide = found
    return policy


def run_once(study: Study, start_at_s: float, *, seed: int = 0, keep: bool = False) -> RunResult:
    """The project's own policy, or `own_policy`."""
    own = policy_of(study.own_policy) if study.own_policy else decide
    subject = study.priced(start_at_s).subject
    return run_on(subject, markets_of(study, start_at_s), seed=seed, decide=own, keep=keep)


def from_start(study: Study, seed: int) -> StartResult:
    """Every policy from one start, the `seed`-th."""
    start_at_s = study.starts_s()[seed]
    study = study.priced(start_at_s)
    world = world_of(study, start_at_s)
    trials: dict[str, PolicyTrial] = {}
    for name in study.policies:
        if name == BOUND:
            most = replace(world, work_node_s=study.least_node_s)
            usd = least_usd(most) if world.n_nodes <= BOUND_NODES else nan
            usd += study.head_usd(study.subject.ideal_s)
            trials[name] = PolicyTrial(usd, world.deadline_s, usd < inf, 1.0)
        elif name in BASELINES:
            trials[name] = _baseline(study, start_at_s, name)
        else:
            changed = VARIANTS[name][0](study.subject) if name in VARIANTS else study.subject
            found = run_once(replace(study, subject=changed), start_at_s, seed=seed)
            trials[name] = PolicyTrial(
                found.usd,
                found.wall_s,
                found.done,
                found.goodput,
                sum(found.causes.values()),
                found.reason,
            )
    on_demand_usd = world.on_demand_usd + study.head_usd(world.least_s)
    return StartResult(start_at_s, on_demand_usd, trials)


def _baseline(study: Study, start_at_s: float, name: str) -> PolicyTrial:
    """Of its world no more is made than it lives in."""
    baseline, most = BASELINES[name], TICKS_MOST
    while True:
        world = world_of(study, start_at_s, most=most)
        own = replace(world, start_s=baseline.start_s) if baseline.start_s is not None else world
        found = play(own, baseline.made(), baseline.lost_s)
        if found.done_s is not None or world.n_ticks == world.whole_ticks:
            break
        most *= 2
    wall_s = world.deadline_s if found.done_s is None else found.done_s
    usd = found.usd + study.head_usd(wall_s)
    if name == "skynomad" and not isfinite(study.on_demand_usd_per_h):
        usd = nan  # its rule weighs that price
    goodput = study.subject.productive * found.busy_share
    return PolicyTrial(usd, wall_s, found.done_s is not None, goodput, found.starts)


@contextmanager
def _workers(n: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A map over processes; what is under way is given up when the caller is interrupted."""
    if n <= 1:
        yield map
        return
    pool = ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool.map
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def carried_out(
    study: Study, *, processes: int | None = None, progress: Callable[[int], None] | None = None
) -> list[StartResult]:
    """All starts, over the cores of the machine; the same results for any number of processes."""
    world_of(study, study.starts_s()[0])  # what is wrong with the question is said at once
    n = min(study.n_starts, processes or len(os.sched_getaffinity(0)))
    found: list[StartResult] = []
    with _workers(n) as over:
        for result in over(partial(from_start, study), range(study.n_starts)):
            found.append(result)
            if progress is not None:
                progress(len(found))
    return found


# --------------------------------------------------------------------------------------- in numbers


@dataclass(frozen=True)
class Spread:
    median: float
    p5: float
    p95: float

    def plain(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 4) for name in ("median", "p5", "p95")}


def spread(values: Sequence[float]) -> Spread:
    """By linear interpolation between the values in order."""
    rows = sorted(values)

    def at(share: float) -> float:
        place = share * (len(rows) - 1)
        low = int(place)
        high = min(low + 1, len(rows) - 1)
        return rows[low] + (rows[high] - rows[low]) * (place - low)

    return Spread(at(0.5), at(0.05), at(0.95))


SPREADS = ("cost_usd", "cost_vs_on_demand", "cost_vs_bound", "wall_h", "goodput", "transitions")


@dataclass(frozen=True)
class PolicySummary:
    """Of one policy over all starts; a spread is None where it cannot be told. `deadline_misses`:
    starts from which the job was not done; `budget_ends`: those of them that its budget ended."""

    cost_usd: Spread | None
    wall_h: Spread
    goodput: Spread
    deadline_misses: int
    budget_ends: int
    transitions: Spread
    cost_vs_on_demand: Spread | None = None
    cost_vs_bound: Spread | None = None

    def plain(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: value.plain() if (value := getattr(self, name)) is not None else None
            for name in SPREADS
        }
        return found | {"deadline_misses": self.deadline_misses, "budget_ends": self.budget_ends}


def summary(results: Sequence[StartResult]) -> dict[str, PolicySummary]:
    """Policy -> its numbers; `bound` is among them, where it was asked for."""
    found: dict[str, PolicySummary] = {}
    paid = [result.on_demand_usd for result in results]
    bounds = [result.trials[BOUND].usd for result in results if BOUND in result.trials]
    for name in results[0].trials:
        trials = [result.trials[name] for result in results]
        usd = [trial.usd for trial in trials]
        found[name] = PolicySummary(
            spread(usd) if all(map(isfinite, usd)) else None,
            spread([trial.wall_s / 3600 for trial in trials]),
            spread([trial.goodput for trial in trials]),
            sum(not trial.done for trial in trials),
            sum(trial.over_budget for trial in trials),
            spread([float(trial.transitions) for trial in trials]),
            _against(usd, paid),
            _against(usd, bounds),
        )
    return found


def _against(usd: Sequence[float], other: Sequence[float]) -> Spread | None:
    known = len(other) == len(usd) and all(map(isfinite, (*usd, *other))) and all(other)
    return spread([a / b for a, b in zip(usd, other, strict=True)]) if known else None
