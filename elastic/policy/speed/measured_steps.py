"""What steps of a run took under each plan, and what a step of another one will take.

A plan like one that was measured (layout, shares and stages, on the same nodes or on as many of the
same pools) is expected to take what that took. Any other takes the time of the measured plan that
is nearest by the cost model (where it knows the hardware, else by the number of ranks), times the
power of the two predictions' ratio that the measured plans follow: 1 where they differ as
predicted, 0 where they take equally long, as processes do that share the cores of one machine.

From one measured plan no power follows. Where all nodes share the cores of one machine, its steps
are cut in two by what its ranks have told of themselves (seconds of a processor, see RanksTimed):
the part in which the blocks keep the cores busy, which takes as long with any number of workers
that do so, and the rest, which goes by the number of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import fmean, linear_regression, median

from elastic.planner.choice import Choice
from elastic.policy.state.state import MeasuredSteps, State
from elastic.types import DriverStarted, Plan, StepDone
from elastic.types.replacing import replace

KEPT_PLANS = 32
KEPT_STEPS = 31  # of a plan, the newest
LEAST_STEPS = 3  # that are believed
FORWARD = 1 / 3  # of the work of a block: what its ranks time
SAME = 0.01  # of each other: predictions that say nothing of how times follow them
TOLD = 1.5  # times as many workers, that say how steps follow their number
LEAST_POWER = 0.5  # that is believed


def with_step(state: State, plan: Plan, event: StepDone) -> tuple[MeasuredSteps, ...]:
    """What is measured, with one step more; not a plan's first one, which builds and compiles."""
    ordinary_s = event.step_time_s - event.data_s - event.copy_s
    if event.step <= state.entered_step + 1 or ordinary_s <= 0:
        return state.measured
    before, last = state.measured[:-1], state.measured[-1] if state.measured else None
    if last is None or (
        last.plan is not plan
        and (last.plan.generation != plan.generation or last.plan.samples != plan.samples)
    ):
        before, last = state.measured, MeasuredSteps(plan)
    seconds = (*last.seconds[1 - KEPT_STEPS :], ordinary_s)
    waited = (*last.waited[1 - KEPT_STEPS :], event.data_s / (event.data_s + ordinary_s))
    return (*before[1 - KEPT_PLANS :], MeasuredSteps(last.plan, seconds, waited))


def still_known(state: State, event: DriverStarted) -> tuple[MeasuredSteps, ...]:
    """To a driver that does not attach: nothing where the pools are others than they were. What
    their nodes cost has no part in it."""
    before, now = state.pools, event.pools
    if event.keeps_measured:
        before, now = (
            tuple(replace(pool, usd_per_node_h=0.0) for pool in pools) for pools in (before, now)
        )
    return state.measured if before == now else ()


def expected_s(state: State, choice: Choice) -> float:
    """0 = nothing was measured."""
    seen = _believed(state)
    if not state.expects_measured or not seen:
        return 0.0
    same = [one for one in seen if _parts(one.plan) == _parts(choice)]
    chosen = Counter(worker.node_id for worker in choice.ranks)
    for like in (dict, lambda workers_per_node: _pools(state, workers_per_node)):
        wanted = like(chosen)
        for one in same:
            if like(one.plan.workers_per_node) == wanted:
                return median(one.seconds)
    return _scaled(state, choice, seen)


def _believed(state: State) -> list[MeasuredSteps]:
    """The newest first."""
    return [
        one
        for one in reversed(state.measured)
        if len(one.seconds) >= LEAST_STEPS and one.plan.phase == state.job.phase
    ]


def _parts(of: Plan | Choice) -> tuple[object, ...]:
    return of.layout, sorted(of.samples), of.layers


def _pools(state: State, workers_per_node: Mapping[str, int]) -> Mapping[str, int]:
    """Workers by pool; of nodes that nobody knows any more by their names."""
    found, nodes = defaultdict[str, int](int), state.nodes
    for name, n in workers_per_node.items():
        node = nodes.get(name)
        found[name if node is None else node.pool] += n
    return found


def _scaled(state: State, choice: Choice, seen: Sequence[MeasuredSteps]) -> float:
    modelled = choice.hardware_known and all(one.plan.model_step_s for one in seen)
    of: Callable[[Plan | Choice], float]
    of = (lambda it: it.model_step_s) if modelled else (lambda it: 1 / it.layout.world_size)
    wanted = log(of(choice))
    points = [(log(of(one.plan)), log(median(one.seconds))) for one in seen]
    at, measured, near = min(
        ((*point, one.plan) for point, one in zip(points, seen, strict=True)),
        key=lambda row: abs(row[0] - wanted),
    )
    power = _power(points)
    if power is None and not modelled and (cores := _shared_cores(state, choice)):
        return _on_shared_cores(state, choice, near, took_s=exp(measured), cores=cores)
    return exp(measured + (1.0 if power is None else power) * (wanted - at))


def _shared_cores(state: State, choice: Choice) -> int:
    """0 = its nodes have machines of their own."""
    nodes = [state.nodes.get(name) for name in {worker.node_id for worker in choice.ranks}]
    return min((node.shared_cores if node is not None else 0 for node in nodes), default=0)


def _on_shared_cores(
    state: State, choice: Choice, near: Plan, *, took_s: float, cores: int
) -> float:
    before, after = near.layout.world_size, choice.layout.world_size
    busy_s = min(took_s, _processor_s(state, near) / min(before, cores))
    return busy_s * min(before, cores) / min(after, cores) + (took_s - busy_s) * before / after


def _processor_s(state: State, plan: Plan) -> float:
    """Of all its ranks together, in the blocks of one step; 0 = they have not told."""
    told = [
        windows[-1].unit_s
        for worker in plan.ranks
        if (windows := state.speeds.get(worker)) and windows[-1].generation == plan.generation
    ]
    layout = plan.layout
    units = sum(plan.samples) * sum(plan.layers) * layout.tp * layout.cp
    return fmean(told) * units / FORWARD if told else 0.0


def _power(points: Sequence[tuple[float, float]]) -> float | None:
    """Between 0 and 1; None until two plans were measured that should differ."""
    predicted = [at for at, _ in points]
    if max(predicted) - min(predicted) < SAME:
        return None
    slope, _ = linear_regression(predicted, [measured for _, measured in points])
    return min(1.0, max(0.0, slope))


def worker_s(state: State, workers: int) -> float:
    """Worker-seconds of a step on so many workers, as the plans that were measured follow their
    number: what each step has beside the work that is shared counts the more the more they are.
    Where these differ too little to tell, as those of the steps so far."""
    seen = _believed(state) if state.heeds_scaling else []
    points = [(-log(one.plan.layout.world_size), log(median(one.seconds))) for one in seen]
    sizes = [at for at, _ in points]
    power = _power(points) if points and max(sizes) - min(sizes) > log(TOLD) else None
    if power is None:
        return state.worker_step_s
    wanted = -log(workers)
    at, measured = min(points, key=lambda point: abs(point[0] - wanted))
    step_s = exp(measured + max(LEAST_POWER, power) * (wanted - at))
    shares = [share for one in seen for share in one.waited]
    return workers * step_s / (1 - (fmean(shares) if shares else 0.0))
