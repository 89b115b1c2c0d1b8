"""What a job will cost and take on a spot market, before a dollar is spent: `elastic simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from elastic.api.planning.model_source import Subject, machines_of
from elastic.api.planning.plan_nodes import MachineGroup, known_of, own_of
from elastic.api.planning.query import Query
from elastic.api.planning.run_nodes import least_workers, within_max_nodes
from elastic.errors import InfeasiblePlan, SpecError
from elastic.ledger.run_folder import JOURNAL
from elastic.observe.find_runs import lines_of, open_run
from elastic.planner import dollars
from elastic.planner.offers import Aim
from elastic.policy.pools.hazard import RECLAIMS_PER_NODE_H
from elastic.sim.markets.calibration import Calibration, calibrated
from elastic.sim.markets.generators import FittedMarket, fitted, usual
from elastic.sim.markets.market_run import RunResult, RunSubject
from elastic.sim.markets.study import (
    BOUND,
    BOUND_NODES,
    ELASTIC,
    KNOWN,
    USUAL,
    VARIANTS,
    PolicySummary,
    Study,
    carried_out,
    checked,
    run_once,
    summary,
)
from elastic.sim.markets.traces import Trace, load_traces, of_run
from elastic.sim.scripted_faults import Delays
from elastic.text import hours, usd
from elastic.types import DriverStarted, Job, Plan, Pool

DRY_H = 0.25  # that a pool gives nothing in place of a node that it took, where no trace says more
YEAR_S = 365 * 86400.0
# Of nodes of a cloud, where no run has measured them: seconds to boot, to import the program, of a
# change from live memory, to read and to store a checkpoint.
USUAL_DELAYS = Delays(
    boot_s=180.0, prepare_s=60.0, enter_s=3.0, restore_s=30.0, store_s=20.0, detect_s=1.0,
    confirm_s=10.0, silent_s=30.0, quiesce_s=1.0, release_s=2.0, copy_s=1.0,
)  # fmt: skip


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step: as measured for the plan's phase and layout, else as the cost model alone
    has it (what a simulated run expects comes of its own steps), corrected by what was measured
    (`ratio`); both with the part that validations take. Of hardware that nobody knows the model
    says nothing: there `whole_s` is a step on `workers`, fewer take longer in proportion."""

    whole_s: float
    workers: int
    measured: Mapping[tuple[int, str], float] = field(default_factory=dict)
    ratio: float = 1.0
    later_s: tuple[float, ...] = ()  # `whole_s` of the job's other phases
    validating: tuple[float, ...] = ()  # of each phase, by the time of its steps

    def __call__(self, plan: Plan) -> float:
        own = self.measured.get((plan.phase, str(plan.layout))) or self.ratio * plan.model_step_s
        whole_s = (self.whole_s, *self.later_s)[plan.phase]
        more = self.validating[plan.phase] if self.validating else 0.0
        return own * (1 + more) or whole_s * self.workers / len(plan.ranks)


@dataclass(frozen=True)
class Simulation:
    """What is asked for. `trace`: a file or a folder (a pool per file); '' = made up. `fit`: a
    trace, of which others like it are made. `calibrate`: a run whose measured times are taken."""

    subject: Subject
    trace: str = ""
    fit: str = ""
    calibrate: str = ""
    compare: tuple[str, ...] = USUAL
    own_policy: str = ""
    deadline_h: float = 0.0
    n_starts: int = 16
    unannounced: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """`policies`: by name; `notes`: where numbers come from that nobody gave."""

    study: Study
    policies: Mapping[str, PolicySummary]
    steps: int
    notes: tuple[str, ...]
    fit: Mapping[str, float] | None = None

    def plain(self) -> dict[str, Any]:
        study, subject = self.study, self.study.subject
        return {
            "job": subject.name, "steps": self.steps,
            "ideal_h": round(subject.ideal_s / 3600, 3), "deadline_h": subject.job.deadline_h,
            "budget_usd": subject.job.budget_usd,
            "starts": study.n_starts, "nodes": subject.n_nodes,
            "traces": {
                pool: {"name": trace.name, "share": round(trace.share, 4),
                       "days": round(trace.ends_s / 86400, 2)}
                for pool, trace in study.traces.items()
            },
            "fit": dict(self.fit) if self.fit else None,
            "policies": {name: one.plain() for name, one in self.policies.items()},
            "notes": list(self.notes),
        }  # fmt: skip

    def one_run(self) -> RunResult:
        """The project's own policy from the first start, with its history."""
        return run_once(self.study, self.study.starts_s()[0], keep=True)


def simulate(
    asked: Simulation,
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Simulated:
    """Raises SpecError, InfeasiblePlan."""
    names = checked(asked.compare)
    notes: list[str] = []
    trace = _one_of(asked.fit) if asked.fit else None
    like = fitted(trace) if trace is not None else None
    study = _study(asked, names, notes, like=like)
    notes += [*_priced(study), *_bounded(study)]
    told = (lambda n: progress(n, study.n_starts)) if progress is not None else None
    policies = summary(carried_out(study, processes=processes, progress=told))
    notes += _spent(study, policies)
    return Simulated(
        study,
        policies,
        sum(each.steps for each in asked.subject.each_phase),
        tuple(notes),
        like.quality(trace) if like is not None and trace is not None else None,
    )


def _study(
    asked: Simulation, names: tuple[str, ...], notes: list[str], *, like: FittedMarket | None
) -> Study:
    source = asked.subject
    pools = source.pools
    spot = [pool for pool in pools if pool.market_type == "spot"]
    if not spot:
        where = source.cluster.file if source.cluster is not None else source.name
        raise SpecError(f"{where}: it has no spot pool; no market decides over it")
    if not source.steps:
        raise SpecError(f"{source.name}: it has no steps; give --set steps=N")
    measured = _measured(asked, notes)
    every = machines_of(source, {}, deadline_h=asked.deadline_h)
    at_once = _at_once(source, every)
    whole = _all_steps(source, at_once, measured)
    stand_by = _counted(every) != _counted(at_once)
    group = _group(asked, whole, at_once, measured=measured)
    validating = tuple(_validating(each.job, measured) for each in source.each_phase)
    delays = measured.delays if measured is not None else USUAL_DELAYS
    job = replace(source.whole or source.job, eval_every=0, drill=(), check_numbers_every=0)
    if asked.deadline_h:
        job = replace(job, deadline_h=asked.deadline_h)
    subject = RunSubject(
        source.name,
        job,
        pools,
        source.model,
        StepTimes(
            whole.step_s,
            whole.n_gpus,
            measured.step_s if measured is not None else {},
            whole.ratio,
            whole.later_s,
            validating,
        ),
        whole.seconds,
        delays,
        known_of(pools),
        pool_hardware=own_of(pools),
        phase_samples=source.phase_samples,
        efficient_s=group.efficient_s,
        group_s=group.seconds,
        every_s=_all_steps(source, every, measured).seconds if stand_by else None,
        n_nodes=sum(each.group.n_nodes for each in at_once),
        productive=(measured.productive if measured is not None else 1.0) / (1 + max(validating)),
    )
    traces = _traces(asked, spot, notes, like=like, length_s=subject.given_up_s)
    for trace in traces.values():
        if trace.tick_s > whole.seconds:
            raise SpecError(
                f"trace {trace.name}: its tick of {trace.tick_s:g} s is longer than the run, "
                f"which takes {whole.seconds:.3g} s on all nodes; give a finer trace, or more steps"
            )
    return Study(subject, traces, names, asked.n_starts, asked.unannounced, asked.own_policy)


def _bounded(study: Study) -> list[str]:
    """What the other policies take that the pools do not have, and that they are too slow with;
    what is not computed."""
    fixed = [pool for pool in study.subject.pools if pool.market_type == "on-demand"]
    n, asked = sum(pool.max_nodes for pool in fixed), set(study.policies) - {ELASTIC, *VARIANTS}
    names, told = ", ".join(sorted(asked)), list[str]()
    if asked and n < study.n_nodes:
        told.append(
            f"{names}: as published they take all {study.n_nodes} nodes on demand, and the cluster "
            f"has {n} such; elastic alone keeps to that"
        )
    if asked and study.group_s > study.deadline_s:
        told.append(
            f"{names}: they take no more nodes than spot pools have, {study.n_nodes}, on which the "
            f"job needs {hours(study.group_s / 3600)}: they miss the deadline, whatever the market"
        )
    if BOUND in study.policies and study.n_nodes > BOUND_NODES:
        told.append(f"bound: not computed above {BOUND_NODES} nodes; the job has {study.n_nodes}")
    return told


def _priced(study: Study) -> list[str]:
    """Pools whose traces have prices of their own, and prices that are not known."""
    found = []
    for pool in study.spot:
        if usd_per_h := study.traces[pool.name].usd_per_node_h:
            low, high = usd(min(usd_per_h)), usd(max(usd_per_h))
            told = low if low == high else f"{low} to {high}"
            found.append(
                f"pool {pool.name}: a node costs what its trace says, {told} an hour, for every "
                "policy and the bound"
            )
    if not isfinite(study.on_demand_usd_per_h):
        names = ", ".join(pool.name for pool in study.spot)
        found.append(
            f"what nodes as those of {names} cost on demand is not known: dollars with such nodes "
            "are not told, and the bound has spot alone; give instance_type, or an on-demand pool "
            "of these GPUs"
        )
    return found


def _spent(study: Study, found: Mapping[str, PolicySummary]) -> list[str]:
    """Runs that the job's budget ends: they are short and cheap for that reason alone."""
    budget_usd, n = study.subject.job.budget_usd, found[ELASTIC].budget_ends
    if not n or budget_usd is None:
        return []
    return [
        f"{n} of {study.n_starts} starts end before the job is done, since its budget_usd of "
        f"{usd(budget_usd)} is spent: dollars and days are those until then"
    ]


def _measured(asked: Simulation, notes: list[str]) -> Calibration | None:
    if not asked.calibrate:
        notes.append(
            f"start-up ({USUAL_DELAYS.boot_s:.0f} s and {USUAL_DELAYS.prepare_s:.0f} s), changes "
            f"({USUAL_DELAYS.enter_s:.0f} s) and checkpoints are usual ones; --calibrate RUN takes "
            "those of a run"
        )
        return None
    found, note = measured_by(asked.calibrate, USUAL_DELAYS)
    notes.append(note)
    unlike = _unlike(asked.subject, found.start) if found.start is not None else []
    if not unlike:
        return found
    notes.append(
        f"not as in run {asked.calibrate}: {', '.join(unlike)}; steps take what the cost model "
        f"predicts times {found.ratio:.2f}, measured by predicted seconds of that run"
    )
    return replace(found, step_s={})


def _unlike(source: Subject, start: DriverStarted) -> list[str]:
    """What makes steps of one layout take another time than those of a past run, whose journal does
    not say on which of several kinds of GPUs they ran."""
    job, before = source.whole or source.job, Job.from_plain(start.job)
    keys = ("global_batch", "precision", "phases")
    found = [key for key in keys if getattr(job, key) != getattr(before, key)]
    shapes, shapes_before = (
        {(spec.fqn, spec.shape) for spec in model.specs} for model in (source.model, start.model)
    )
    if shapes_before and shapes != shapes_before:
        found.append("the model")
    kinds, kinds_before = (
        {pool.accelerator_type for pool in pools} for pools in (source.pools, start.pools)
    )
    if kinds != kinds_before or len(kinds) > 1:
        found.append(f"GPUs ({', '.join(sorted(kinds_before))} there)")
    return found


def measured_by(run: str, defaults: Delays) -> tuple[Calibration, str]:
    """What a past run has measured, and a sentence on it. Raises SpecError."""
    try:
        found = calibrated(_lines(run), defaults)
    except SpecError as error:
        raise SpecError(f"--calibrate {run}: {error}") from None
    seen = ", ".join(f"{name} of {n}" for name, n in sorted(found.seen.items()))
    return found, f"measured by run {run}: {seen}; steps of {len(found.step_s)} layouts"


def _lines(run: str) -> Sequence[Any]:
    return list(lines_of(open_run(run)))


@dataclass(frozen=True)
class _AllSteps:
    """Of the job on `n_gpus`. `step_s`: of its first phase, `later_s` of the others; `seconds`: of
    all steps; `efficient_s`: of all, were they as efficient as on so many nodes as each does most
    on; `ratio`: measured by predicted seconds."""

    n_gpus: int
    step_s: float
    later_s: tuple[float, ...]
    seconds: float
    efficient_s: float
    ratio: float


def _at_once(source: Subject, machines: Sequence[MachineGroup]) -> list[MachineGroup]:
    """What a run may have; nodes on demand that stand by only where it cannot run without."""
    kept = [each.with_nodes(n) for each in machines if (n := each.group.n_nodes - each.standby)]
    least = least_workers(source.job, source.model, source.pools)
    few = sum(each.group.n_gpus for each in kept) < least
    return list(machines) if few else kept


def _all_steps(
    source: Subject, machines: Sequence[MachineGroup], measured: Calibration | None
) -> _AllSteps:
    """Raises InfeasiblePlan."""
    (step_s, efficient_s, ratio), *later = (
        _step_s(each, machines, measured, phase=k) for k, each in enumerate(source.each_phase)
    )
    steps = [each.steps for each in source.each_phase[1:]]
    return _AllSteps(
        sum(each.group.n_gpus for each in machines),
        step_s,
        tuple(of_step_s for of_step_s, _, _ in later),
        step_s * source.steps + sum(n * one[0] for n, one in zip(steps, later, strict=True)),
        efficient_s + sum(of_phase_s for _, of_phase_s, _ in later),
        ratio,
    )


def _group(
    asked: Simulation,
    whole: _AllSteps,
    at_once: Sequence[MachineGroup],
    *,
    measured: Calibration | None,
) -> _AllSteps:
    """On the spot pools alone, as the other policies take them; in proportion to their GPUs where
    the job cannot run on them."""
    source = asked.subject
    counts = {p.name: p.max_nodes if p.market_type == "spot" else 0 for p in source.pools}
    spot = within_max_nodes(source.job, machines_of(source, counts))
    if _counted(spot) == _counted(at_once):
        return whole
    try:
        return _all_steps(source, spot, measured)
    except InfeasiblePlan:
        times = whole.n_gpus / sum(each.group.n_gpus for each in spot)
        return replace(whole, seconds=times * whole.seconds, efficient_s=times * whole.efficient_s)


def _counted(machines: Sequence[MachineGroup]) -> dict[str, int]:
    return {each.group.pool: each.group.n_nodes for each in machines}


def _step_s(
    source: Subject, machines: Sequence[MachineGroup], measured: Calibration | None, *, phase: int
) -> tuple[float, float, float]:
    """Of a step on all nodes that the job may have at once; of all steps, were they as efficient
    there as on so many nodes as each does most; and measured by predicted seconds."""
    query = Query(source, Aim())
    whole = query.offers(machines).best[0]
    ratio = measured.ratio if measured is not None else 1.0
    own = measured.step_s.get((phase, str(whole.layout))) if measured is not None else None
    more = 1 + _validating(source.job, measured)
    step_s = more * (own or whole.step_s * ratio)
    n_nodes = sum(each.group.n_nodes for each in machines)
    best = step_s
    for n in _fewer(n_nodes):
        part = _share(machines, n / n_nodes)
        try:
            offer = query.offers(part).best[0]
        except InfeasiblePlan:
            continue
        there = sum(each.group.n_nodes for each in part)
        best = min(best, more * offer.step_s * ratio * there / n_nodes)
    return step_s, best * source.steps, ratio


def _validating(job: Job, measured: Calibration | None) -> float:
    """Time of the validations by that of the steps between them: measured, else estimated."""
    if measured is None or not measured.evaluation_s or not measured.step_s:
        return dollars.validating(job)
    one_s = fmean(measured.step_s.values())
    return measured.evaluation_s / one_s / job.eval_every if job.eval_every else 0.0


def _fewer(n: int) -> list[int]:
    found = []
    while n > 1:
        n //= 2
        found.append(n)
    return found


def _share(machines: Sequence[MachineGroup], share: float) -> list[MachineGroup]:
    counted = [each.with_nodes(int(each.group.n_nodes * share)) for each in machines]
    return [each for each in counted if each.group.n_nodes] or [machines[0].with_nodes(1)]


def _traces(
    asked: Simulation,
    spot: Sequence[Pool],
    notes: list[str],
    *,
    like: FittedMarket | None,
    length_s: float,
) -> dict[str, Trace]:
    if asked.trace and asked.fit:
        raise SpecError("--trace and --fit are two ways at once; give one of them")
    if like is not None:
        notes.append(f"markets are made up, {like.name}")
        length = min(YEAR_S, 4 * length_s)
        return {
            pool.name: like.made(nodes=pool.max_nodes, length_s=length, seed=asked.seed + k)
            for k, pool in enumerate(spot)
        }
    if not asked.trace:
        rate = RECLAIMS_PER_NODE_H["spot"]
        notes.append(
            f"no --trace: markets are made up, a node is taken {rate:g} times an hour, and another "
            f"one is there {60 * DRY_H:.0f} min later on average"
        )
        return {
            pool.name: usual(
                pool.name, nodes=pool.max_nodes, length_s=min(YEAR_S, 4 * length_s),
                taken_per_node_h=rate, dry_h=DRY_H, seed=asked.seed,
            )
            for pool in spot
        }  # fmt: skip
    found = _given(asked.trace)
    by_name = {trace.name: trace for trace in found}
    if all(pool.name in by_name for pool in spot):
        return {pool.name: by_name[pool.name] for pool in spot}
    if len(found) == 1:
        return {pool.name: found[0] for pool in spot}
    if len(found) != len(spot):
        names = ", ".join(pool.name for pool in spot)
        raise SpecError(
            f"{asked.trace}: {len(found)} traces for {len(spot)} spot pools ({names}); give one "
            "for all, or one for each, called as the pool"
        )
    pairs = ", ".join(f"{pool.name}: {t.name}" for pool, t in zip(spot, found, strict=True))
    notes.append(f"traces are taken in the order of the pools ({pairs})")
    return {pool.name: trace for pool, trace in zip(spot, found, strict=True)}


def _one_of(fit: str) -> Trace:
    found = load_traces(fit)
    if len(found) > 1:
        raise SpecError(
            f"--fit {fit}: a folder of {len(found)} traces; give one file, the markets of all "
            "pools are made like it"
        )
    return found[0]


def _given(trace: str) -> list[Trace]:
    """Of files, or what a past run has seen."""
    place = Path(trace)
    if place.is_file() or (place.is_dir() and not (place / JOURNAL).exists()):
        return load_traces(place)
    return list(of_run(_lines(trace)).values())


__all__ = ["KNOWN", "USUAL", "Simulated", "Simulation", "simulate"]
