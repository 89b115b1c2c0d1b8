"""How fast each worker computes, as its ranks have told: estimates, histories, and words for a
person.

A report (RanksTimed) says what a unit of work takes each rank, a median over some steps. Reports
that agree are joined, so that a worker's history is a list of windows in which it was about as
fast: a jump begins a new one at once, jitter does not. Rates outlive generations; those of a node
end with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median
from typing import Any

from elastic.planner.cost import default_hardware
from elastic.planner.cost.sites import rate, site_of
from elastic.policy.state.state import Moved, State, Window
from elastic.types import DeviceNoted, Node, RanksTimed, SharesSet, WorkerId, rank_timing
from elastic.types.replacing import replace

WARM_UP_STEPS = 4  # after a transition; a report that hardly goes beyond them is not believed
AGREE = 0.15  # relative: reports that differ less tell of the same speed
JOINED_S = 10.0  # agreeing reports become one window of at least this length
KEPT_WINDOWS = 128
STEPS_MOST = 64  # that an estimate is made from
SPREAD_LEAST = 0.03  # three steps may happen to be alike
# standard error of a median of n normal values / (their median deviation / sqrt n): 1.4826 x 1.2533
MEDIAN_ERROR = 1.86
ERRORS = 2.0  # standard errors that an estimate may be wrong by
# relative: speeds that differ by less are not told apart; a GPU's clock moves that much by itself
BAND = 0.1
REMEMBERED_S = 900.0  # moves, and what is called lasting
SLOW = 1.25  # times as long as the others: worth a word


@dataclass(frozen=True)
class Estimate:
    """`unit_s` may be wrong by the part `error`, from `n_steps` steps; `since_s`: since when it is
    about that."""

    unit_s: float
    error: float
    n_steps: int
    since_s: float


def estimate(windows: Sequence[Window]) -> Estimate:
    """The newest windows that agree, each by the steps that it adds, as far back as STEPS_MOST
    steps; `since_s` goes back further, over generations."""
    newest = windows[-1]
    n, total, spread, since_s = 0, 0.0, 0.0, newest.from_s
    for window in reversed(windows):
        if abs(window.unit_s - newest.unit_s) > AGREE * newest.unit_s:
            break
        since_s = window.from_s
        take = min(window.n_steps, STEPS_MOST - n) if window.generation == newest.generation else 0
        n, total, spread = n + take, total + take * window.unit_s, spread + take * window.spread
    n = max(1, n)
    error = ERRORS * MEDIAN_ERROR * max(SPREAD_LEAST, spread / n) / sqrt(n)
    return Estimate(total / n if total else newest.unit_s, error, n, since_s)


def estimates(state: State) -> dict[WorkerId, Estimate]:
    return {worker: estimate(windows) for worker, windows in state.speeds.items()}


def measured_steps(state: State) -> int:
    """What every worker's estimate is made from at least."""
    return min((found.n_steps for found in estimates(state).values()), default=0)


def recent(moved: tuple[Moved, ...], now_s: float) -> tuple[Moved, ...]:
    """Those that are not long ago."""
    return tuple(one for one in moved if one.at_s > now_s - REMEMBERED_S)


def remembered(moved: tuple[Moved, ...], state: State, at_s: float) -> tuple[Moved, ...]:
    """One more move, and those that are not long ago."""
    return (*recent(moved, at_s), Moved(at_s, measured_steps(state)))


# -------------------------------------------------------------------------------------------- rates


def rates(state: State, nodes: Sequence[Node]) -> dict[WorkerId, float] | None:
    """Units per second of every worker of these nodes; None = nothing was measured, or unequal
    batch shares did not fit. A worker within BAND of the median of its pool counts as that. Who was
    never measured: the median of its pool, else that of another pool as the hardware of the two
    differs, else the median of all."""
    if not state.speeds or state.uneven_failed or not state.job.rebalance:
        return None
    known = {
        worker: 1 / found.unit_s
        for worker, found in estimates(state).items()
        if _counts(state, worker)
    }
    if not known:
        return None
    pools = {node.node_id: node.pool for node in state.nodes.values()}
    by_pool: dict[str, list[float]] = {}
    for worker, one in known.items():
        by_pool.setdefault(pools.get(worker.node_id, ""), []).append(one)
    middles = {pool: median(found) for pool, found in by_pool.items()}
    found = {}
    for node in nodes:
        middle = _middle(state, node.pool, middles)
        for k in range(node.gpus):
            one = known.get(WorkerId(node.node_id, k), middle)
            found[WorkerId(node.node_id, k)] = middle if abs(one - middle) <= BAND * middle else one
    return found


def _counts(state: State, worker: WorkerId) -> bool:
    """A worker that is left out of the plan is not measured any more: what was long ago says
    nothing of it."""
    in_plan = state.plan is not None and worker in state.plan.workers
    return in_plan or state.speeds[worker][-1].at_s > state.timed_at_s - REMEMBERED_S


def _middle(state: State, pool: str, middles: Mapping[str, float]) -> float:
    if pool in middles:
        return middles[pool]
    of_kind = by_hardware(state)
    scaled = [
        middle * of_kind[pool] / of_kind[other]
        for other, middle in middles.items()
        if {pool, other} <= set(of_kind)
    ]
    return median(scaled or middles.values())


def by_hardware(state: State) -> dict[str, float]:
    """What GPUs of each pool whose kind is known compute, by the cost model."""
    kinds = {profile.accelerator_type: profile for profile in state.hardware}
    return {
        pool.name: rate(
            site_of(
                state.job,
                default_hardware.among(kinds[pool.accelerator_type], pool.gpus_per_node),
                pool.gpus_per_node,
            )
        )
        for pool in state.pools
        if pool.accelerator_type in kinds
    }


def kinds(state: State) -> dict[str, tuple[Any, ...]]:
    """Of every node; those of equal kinds may change places in a plan."""
    found = rates(state, list(state.nodes.values())) or {}
    made: dict[str, tuple[Any, ...]] = {name: (node.pool,) for name, node in state.nodes.items()}
    for worker, one in sorted(found.items()):
        made[worker.node_id] += (round(log(one) / log(1 + BAND)),)
    return made


# -------------------------------------------------------------------------------------- who is slow


def times_slower(state: State) -> dict[WorkerId, float]:
    """Of every measured worker: its seconds per unit over those of the faster half of its pool."""

    def pool_of(worker: WorkerId) -> str:
        node = state.nodes.get(worker.node_id)
        return node.pool if node else ""

    units = {worker: found.unit_s for worker, found in estimates(state).items()}
    return rank_timing.times_slower(
        units, pool_of, rank_timing.unlike_stages(state.model, state.plan)
    )


def of_nodes(slower: Mapping[WorkerId, float], node_ids: Iterable[str]) -> dict[str, float]:
    """Of each that of its slowest GPU; 1 = not measured."""
    worst: dict[str, float] = {}
    for worker, times in slower.items():
        worst[worker.node_id] = max(times, worst.get(worker.node_id, times))
    return {node_id: worst.get(node_id, 1.0) for node_id in node_ids}


def speed_message(
    state: State, node_id: str, slower: Mapping[WorkerId, float], *, now_s: float
) -> str:
    """`node b computes 2.1 times slower than the faster half (all 2 of its GPUs, for 12 s; its GPU
    says: clocks lowered)`."""
    mine = {worker: times for worker, times in slower.items() if worker.node_id == node_id}
    slow = {worker: times for worker, times in mine.items() if times >= SLOW}
    if not mine:
        return f"node {node_id}: not measured"
    worst = max(mine, key=lambda worker: mine[worker])
    which = (
        "its GPU"
        if len(mine) == 1
        else f"all {len(mine)} of its GPUs"
        if len(slow) == len(mine)
        else f"GPU {worst} only"
    )
    parts = [which, _how_long(state.speeds[worst], now_s)]
    notes = dict.fromkeys(
        note for worker in slow or mine if (note := state.device_notes.get(worker))
    )
    parts += [f"the device says: {', '.join(notes)}"] if notes else []
    data_s = state.speeds[worst][-1].data_s
    if data_s > 0.1 * state.step_time_s > 0:
        parts.append(f"it also waits {data_s:.2g} s a step for its batches")
    return (
        f"node {node_id} computes {mine[worst]:.2g} times slower than the faster ones "
        f"({'; '.join(parts)})"
    )


def _how_long(windows: Sequence[Window], now_s: float) -> str:
    now = estimate(windows)
    others = [w for w in windows if w.from_s < now.since_s]
    slow_s = sum(
        w.at_s - w.from_s for w in windows if abs(w.unit_s - now.unit_s) <= AGREE * now.unit_s
    )
    back = others and any(abs(w.unit_s - now.unit_s) <= AGREE * now.unit_s for w in others)
    if back:
        return f"now and then: {slow_s:.0f} s of the last {now_s - windows[0].from_s:.0f} s"
    return f"for {max(0.0, now_s - now.since_s):.0f} s" + (
        ", before it was not" if others else " without a break"
    )


# --------------------------------------------------------------------------------------------- fold


def _ranks_timed(state: State, event: RanksTimed, at_s: float) -> State:
    plan = state.plan
    if plan is None or event.generation != plan.generation or len(event.unit_s) != len(plan.ranks):
        return state
    if event.step - state.entered_step <= WARM_UP_STEPS:
        return state
    found: dict[WorkerId, Window] = {}
    for rank, (worker, unit_s) in enumerate(zip(plan.ranks, event.unit_s, strict=True)):
        if unit_s > 0:
            spread = event.spread[rank] if rank < len(event.spread) else 0.0
            data_s = event.data_s[rank] if rank < len(event.data_s) else 0.0
            found[worker] = Window(
                at_s, at_s, unit_s, event.n_steps, spread, data_s, event.generation, event.step
            )
    joined = all(_joins(state.speeds.get(worker, ()), window) for worker, window in found.items())
    speeds = dict(state.speeds)
    for worker, window in found.items():
        speeds[worker] = _with(speeds.get(worker, ()), window, joined, state=state)
    return replace(state, speeds=speeds, timed_at_s=at_s)


def _joins(windows: Sequence[Window], new: Window) -> bool:
    last = windows[-1] if windows else None
    return (
        last is not None
        and last.generation == new.generation
        and abs(last.unit_s - new.unit_s) <= AGREE * last.unit_s
        and last.at_s - last.from_s < JOINED_S
    )


def _with(
    windows: tuple[Window, ...], new: Window, joined: bool, *, state: State
) -> tuple[Window, ...]:
    """The newer report counts by the steps that it adds. A window begins where the one before ends,
    or as many steps ago as its median is made from."""
    last = windows[-1] if windows else None
    if last is None or last.generation != new.generation:
        began_s = max(state.entered_at_s, new.at_s - new.n_steps * state.step_time_s)
        return (*windows, replace(new, from_s=began_s))[-KEPT_WINDOWS:]
    steps = max(1, min(new.n_steps, new.step - last.step))
    if abs(new.unit_s - last.unit_s) > AGREE * last.unit_s:  # since when, the number of steps says
        since_s = max(last.from_s, new.at_s - new.n_steps * state.step_time_s)
        return (*windows[:-1], replace(last, at_s=since_s), replace(new, from_s=since_s))[
            -KEPT_WINDOWS:
        ]
    if not joined:
        return (*windows, replace(new, from_s=last.at_s, n_steps=steps))[-KEPT_WINDOWS:]
    if new.n_steps >= last.n_steps + steps:  # a median over all of them
        return (*windows[:-1], replace(new, from_s=last.from_s))
    n = last.n_steps + steps
    mean = (last.n_steps * last.unit_s + steps * new.unit_s) / n
    return (*windows[:-1], replace(new, from_s=last.from_s, unit_s=mean, n_steps=n))


def _shares_set(state: State, event: SharesSet, at_s: float) -> State:
    plan = state.plan
    if (
        plan is None
        or event.generation != plan.generation
        or len(event.samples) != len(plan.samples)
    ):
        return state
    plan = replace(plan, samples=event.samples)
    return replace(
        state, plan=plan, plans={**state.plans, plan.generation: plan}, shares_ordered=None,
        reshared=state.reshared | {plan.generation},
    )  # fmt: skip


def _device_noted(state: State, event: DeviceNoted, at_s: float) -> State:
    notes = {worker: note for worker, note in state.device_notes.items() if worker != event.worker}
    return replace(state, device_notes={**notes, event.worker: event.note} if event.note else notes)


def forget(state: State, node_id: str) -> State:
    """The node is gone, or comes back as another."""
    return replace(
        state,
        speeds={
            worker: found for worker, found in state.speeds.items() if worker.node_id != node_id
        },
        device_notes={
            worker: note for worker, note in state.device_notes.items() if worker.node_id != node_id
        },
        pinned_rounded=state.pinned_rounded - {node_id},
        unpinned={name: why for name, why in state.unpinned.items() if name != node_id},
    )


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    RanksTimed: _ranks_timed, SharesSet: _shares_set, DeviceNoted: _device_noted,
}  # fmt: skip
