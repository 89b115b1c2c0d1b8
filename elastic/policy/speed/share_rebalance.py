"""Shares of a step that follow the measured speeds.

A move costs hardly anything (no transition: tensors of other shapes for a step), so what holds it
back is doubt alone. Two horizons:

- At once, where the gain is sure. Each rank may really be as fast as its estimate within BAND
  (clocks, heat and neighbors move that much by themselves) and within its statistical error (two
  standard errors of the median over the steps that it was measured for). The least that a move can
  gain while every rank is somewhere within these bounds is the sure gain: all ranks are taken as
  alike as the bounds allow. It must be SURE of the step. So a rank that takes twice as long is
  acted upon after three steps, and speeds that wander within +-10 % never are, whatever the number
  of ranks.
- Later, where it is small but lasting: over the last LASTING_S the same shares would have been
  better by LASTING on average and in each third of that time, and nothing was moved meanwhile.

Against oscillation: each move of the last quarter of an hour widens BAND by itself once more, so
that a node that is slow now and then is followed a few times, and then left to the second rule,
which sees its mean. A move that was made on FEW steps is made exact once, when there are ENOUGH,
without BAND: then the errors alone are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from elastic.planner.cost import memory
from elastic.planner.cost.model_cost import ModelCost
from elastic.planner.hetero import unequal_shares
from elastic.planner.hetero.unequal_shares import most_that
from elastic.policy.pools import hard_limits, hazard
from elastic.policy.pools.gpu_memory import gpu_bytes, on_gpus
from elastic.policy.speed import speeds
from elastic.policy.speed.speeds import BAND, REMEMBERED_S, Estimate
from elastic.policy.state.state import State, Window
from elastic.types import Decision, Plan, SetShares, WorkerId
from elastic.types.replacing import replace

SURE, LASTING = 0.03, 0.03  # of the busiest rank's work
LASTING_S = REMEMBERED_S
SAMPLED = 60  # moments of that time
FEW, ENOUGH, EXACT = 16, 24, 0.02  # steps; what is left of BAND once there are enough
CONFIRM_S = 1.0  # a change that is younger may be over in a moment
LOOK_S = 2 * CONFIRM_S  # after a report
COST_STEPS = 2.0  # what a move must gain in all, in steps
LAST_STEPS = 4  # before the end: the new shares begin behind what has been read ahead
GIVEN_UP_S, GIVEN_UP_STEPS = 30.0, 20  # an order that is not confirmed by then may be given again
NAMED = 3  # nodes that a reason speaks of


@dataclass(frozen=True)
class Load:
    """What a sample costs each data-parallel rank of a plan, in seconds, and by what part that may
    be wrong."""

    sample_s: tuple[float, ...]
    error: tuple[float, ...]

    def busy_s(self, samples: Sequence[int]) -> float:
        return max(n * one for n, one in zip(samples, self.sample_s, strict=True))


def load_of(plan: Plan, units: Mapping[WorkerId, Estimate]) -> Load:
    """A data-parallel rank is as fast as the slowest member of each of its tp x cp groups, and as
    its pipeline allows."""
    layout = plan.layout
    alone = replace(layout, dp_replicate=1, dp_shard=1)
    sample_s, errors = [], []
    for d in range(layout.dp):
        group = _members(plan, d)
        rates = [1 / units[worker].unit_s for worker in group]
        sample_s.append(
            unequal_shares.busy_s(
                alone, (1,), plan.layers, n_microbatches=plan.n_microbatches, rates=rates
            )
        )
        errors.append(max(units[worker].error for worker in group))
    return Load(tuple(sample_s), tuple(errors))


def _members(plan: Plan, d: int) -> list[WorkerId]:
    """The workers of a data-parallel rank: stage by stage, its tp x cp group."""
    layout = plan.layout
    inner, stage = layout.cp * layout.tp, layout.world_size // layout.pp
    return [plan.ranks[p * stage + d * inner + k] for p in range(layout.pp) for k in range(inner)]


def shares(state: State, now_s: float) -> Decision | None:
    """Other shares for the running plan, where they pay; see the rule above."""
    plan = state.plan
    if plan is None or plan.layout.dp < 2:
        return None
    if not ready(state, now_s) or ordered(state, now_s):
        return None
    if now_s > state.timed_at_s and not any(
        w[-1].from_s > state.timed_at_s - CONFIRM_S for w in state.speeds.values()
    ):
        return None  # nothing has waited to be confirmed
    units = speeds.estimates(state)
    if not all(worker in units for worker in plan.ranks):
        return None
    load = load_of(plan, units)
    new, gain, why = _at_once(state, plan, load) or _lasting(state, plan, now_s) or ((), 0.0, "")
    if not new or gain * stay_steps(state) < COST_STEPS:
        return None
    young = [worker for worker in plan.ranks if units[worker].since_s > now_s - CONFIRM_S]
    if young:
        return Decision(wake_at_s=max(units[worker].since_s for worker in young) + CONFIRM_S)
    less_s = gain * compute_s(state, load.busy_s(plan.samples))
    text = (
        f"{_listed(new)} instead of {_listed(plan.samples)} samples a step: "
        f"{slow_ones(state, plan, now_s)}; the busiest rank has {gain:.0%} less to do ({why}), "
        f"about {less_s:.3g} s of a step, for {stay_s(state):.0f} s until the next expected loss "
        "or the end; nothing stops for it"
    )
    return Decision((SetShares(plan.generation, new, state.step),), text)


def ready(state: State, now_s: float) -> bool:
    """Soon after a report, where the speeds are followed."""
    return now_s <= state.timed_at_s + LOOK_S and followed(state)


def followed(state: State) -> bool:
    """There are speeds and some steps to go, and the job lets the speeds be followed."""
    plan = state.plan
    compiled = state.job.compile  # torch's compiler gives up on cut tensors of a shape that varies
    varying = compiled and plan is not None and plan.layout.tp > 1
    wanted = state.job.rebalance and not state.uneven_failed and not varying
    return bool(wanted and state.speeds and state.phase_ends_at - state.step > LAST_STEPS)


def ordered(state: State, now_s: float) -> bool:
    """Shares were ordered and may still be confirmed."""
    if state.shares_ordered is None:
        return False
    _, at_s = state.shares_ordered
    return now_s < at_s + max(GIVEN_UP_S, GIVEN_UP_STEPS * hard_limits.step_s(state))


def stay_s(state: State) -> float:
    """How long the plan is expected to run: until one of its nodes is taken, or to the end of the
    job."""
    plan = state.plan
    nodes = [node for name in plan.nodes if (node := state.nodes.get(name))] if plan else []
    per_h = hazard.reclaims_per_h(state, nodes)
    return min(
        (state.phase_ends_at - state.step) * hard_limits.step_s(state),
        3600 / per_h if per_h else inf,
    )


def stay_steps(state: State) -> float:
    step_s = hard_limits.step_s(state)
    return min(float(state.phase_ends_at - state.step), stay_s(state) / step_s if step_s else inf)


def compute_s(state: State, busy_s: float) -> float:
    """Of a step, what the busiest rank computes: its forward passes were timed, a backward pass
    takes twice as long."""
    step_s = hard_limits.step_s(state)
    return min(step_s, 3 * busy_s) if step_s else 3 * busy_s


# ------------------------------------------------------------------------------------ the two rules


def _at_once(state: State, plan: Plan, load: Load) -> tuple[tuple[int, ...], float, str] | None:
    moved = speeds.recent(state.shares_moved, state.timed_at_s)
    exact = bool(moved) and moved[-1].n_steps < FEW and speeds.measured_steps(state) >= ENOUGH
    band = EXACT if exact else BAND * (1 + len(moved))
    new = assigned_shares(state, plan, load)
    gain = 1 - load.busy_s(new) / load.busy_s(plan.samples)
    if (
        new == plan.samples
        or gain < SURE
        or (sure := sure_gain(state, plan, load, band=band)) < SURE
    ):
        return None
    return (
        new,
        gain,
        f"{sure:.0%} at least if the measured speeds are {band:.0%} and their errors off",
    )


def sure_gain(state: State, plan: Plan, load: Load, *, band: float) -> float:
    """The least that other shares gain, as a part of the busiest rank's work, where each rank is as
    fast as measured within `band` and its error: all finish as nearly at the same time as that
    allows."""
    times = [n * one for n, one in zip(plan.samples, load.sample_s, strict=True)]
    within = [1 + band + error for error in load.error]
    least = max(t / w for t, w in zip(times, within, strict=True))  # of the busiest rank at best
    alike = [min(least, t * w) for t, w in zip(times, within, strict=True)]
    best = Load(tuple(t / n for t, n in zip(alike, plan.samples, strict=True)), load.error)
    return 1 - best.busy_s(assigned_shares(state, plan, best)) / least


def _lasting(state: State, plan: Plan, now_s: float) -> tuple[tuple[int, ...], float, str] | None:
    """Shares by the mean speeds of the last LASTING_S."""
    since_s = now_s - LASTING_S
    if max([state.entered_at_s, *(one.at_s for one in state.shares_moved)]) > since_s:
        return None
    times = [since_s + (i + 0.5) * LASTING_S / SAMPLED for i in range(SAMPLED)]
    if any(state.speeds[worker][0].from_s > since_s for worker in plan.ranks):
        return None
    then = {worker: _units_at(state.speeds[worker], times) for worker in plan.ranks}
    mean = {worker: Estimate(sum(units) / SAMPLED, 0.0, 1, 0.0) for worker, units in then.items()}
    new = assigned_shares(state, plan, load_of(plan, mean))
    busy, better = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for i in range(SAMPLED):
        load = load_of(
            plan, {worker: Estimate(units[i], 0.0, 1, 0.0) for worker, units in then.items()}
        )
        busy[3 * i // SAMPLED] += load.busy_s(plan.samples)
        better[3 * i // SAMPLED] += load.busy_s(plan.samples) - load.busy_s(new)
    gain = sum(better) / sum(busy)
    if gain < LASTING or min(better) <= 0:
        return None
    return (
        new,
        gain,
        f"that would have been better all through the last {LASTING_S / 60:.0f} minutes",
    )


def _units_at(windows: Sequence[Window], times: Sequence[float]) -> list[float]:
    """What was measured at these times, which rise; of what came before or after all windows, the
    nearest."""
    found, i = [], 0
    for t in times:
        while i + 1 < len(windows) and windows[i].at_s < t:
            i += 1
        found.append(windows[i].unit_s)
    return found


# ------------------------------------------------------------------------------------------- shares


def assigned_shares(state: State, plan: Plan, load: Load) -> tuple[int, ...]:
    """The best shares in multiples of the number of microbatches (and of what the model keeps
    together), none larger than the memory of its GPUs allows."""
    unit = plan.n_microbatches * (max(1, state.model.together) if state.model is not None else 1)
    n_units, rates = sum(plan.samples) // unit, [1 / one for one in load.sample_s]
    most = [
        max(n, limit) // unit
        for n, limit in zip(plan.samples, most_samples(state, plan), strict=True)
    ]
    return unequal_shares.shares(n_units, rates, unit, most=most)


def most_samples(state: State, plan: Plan) -> list[int]:
    """Samples of a step that fit each data-parallel rank: by the memory of its GPUs where that and
    the model's activations are known, else by the job's microbatch_size; what fits nowhere is found
    out by the plan's own shares."""
    layout, m = plan.layout, plan.n_microbatches
    if layout.microbatch_size and layout.dp_replicate > 1 and layout.pp == 1:
        return [sum(plan.samples)] * layout.dp  # a replica with more samples has more microbatches
    batch = sum(plan.samples)
    fits: dict[int, int] = {}
    out = []
    for d in range(layout.dp):
        room = min(memory_of(state, worker.node_id) for worker in _members(plan, d))
        if room not in fits:
            fits[room] = m * rows_that_fit(state, plan, room, most=batch // m)
        out.append(fits[room])
    return out


def rows_that_fit(state: State, plan: Plan, room_bytes: int, *, most: int) -> int:
    """Samples of a microbatch."""
    model, layout = state.model, plan.layout
    pinned = state.job.microbatch_size or 0
    most = min(most, pinned) if pinned else most
    if model is None or model.sample is None or not room_bytes:
        return min(most, layout.microbatch_size) if layout.microbatch_size and room_bytes else most
    work, dtype = ModelCost.of(model), state.job.precision
    deepest = max(unequal_shares.blocks_at(layout, plan.layers))
    usable = memory.usable_bytes(room_bytes, layout, on_gpus(state, plan.nodes))

    def fits(rows: int) -> bool:
        step = memory.Step(
            plan.n_microbatches, rows * plan.n_microbatches, sum(plan.samples), dtype=dtype
        )
        return memory.stage_bytes(work, layout, step, n_blocks=deepest) <= usable

    return most_that(fits, most)


def memory_of(state: State, node_id: str) -> int:
    """Bytes of each of its GPUs; 0 = not known."""
    node = state.nodes.get(node_id)
    return gpu_bytes(state, state.pool(node.pool)) if node else 0


# -------------------------------------------------------------------------------------------- words


def slow_ones(state: State, plan: Plan, now_s: float) -> str:
    """Which nodes are slow, how much, and since when; for a reason."""
    slower = speeds.times_slower(state)
    worst = speeds.of_nodes(slower, plan.nodes)
    names = sorted(
        (name for name in worst if worst[name] >= speeds.SLOW), key=lambda name: -worst[name]
    )
    if not names:
        again = " any more" if speeds.recent(state.shares_moved, now_s) else ""
        return f"no node is {speeds.SLOW - 1:.0%} slower than the others of its pool{again}"
    said = [speeds.speed_message(state, name, slower, now_s=now_s) for name in names[:NAMED]]
    return "; ".join(said) + (
        f"; and {len(names) - NAMED} more nodes" if len(names) > NAMED else ""
    )


def _listed(samples: Sequence[int]) -> str:
    most = 16
    shown = ", ".join(map(str, samples[:most]))
    return shown + (f" ... ({len(samples)} ranks)" if len(samples) > most else "")
