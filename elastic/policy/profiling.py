"""Profiles of a live run: one at a time, of one generation, begun some steps ahead so that all
ranks trace the same ones. A change of generation ends it: a trace of half a step, or of two
layouts, tells nothing. Steps that are traced take longer, and count for no measure that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any

from elastic.policy.state.state import Profiling, State
from elastic.types import Decision, Plan, ProfileAsked, RankProfiled, StartProfile
from elastic.types.replacing import replace

AHEAD_S = 0.5  # until every worker has the order
STEPS_AHEAD = 2
RANKS_MOST = 64  # each writes a file, and takes a core to do it
STALE_S = 600.0  # without a word of the ranks that are missing: they have died with it
KEPT = 16


def ranks_of(text: str, plan: Plan) -> tuple[tuple[int, ...], str]:
    """Of a plan, as they were asked for; or why there are none."""
    n = len(plan.ranks)
    if text == "all":
        found = tuple(range(n))
    elif text == "node":
        firsts = {worker.node_id: rank for rank, worker in reversed(list(enumerate(plan.ranks)))}
        found = tuple(sorted(firsts.values()))
    else:
        found = tuple(sorted({int(word) for word in text.split(",")}))
        if found[-1] >= n:
            return (), f"there is no rank {found[-1]}: they are 0 to {n - 1}"
    if len(found) > RANKS_MOST:
        return (), f"{len(found)} ranks at once are too many: name up to {RANKS_MOST} of them"
    return found, ""


def too_late(state: State, steps: int) -> str:
    """Why so many steps more cannot be traced; '' = they can."""
    left = state.steps - _from_step(state)
    return "" if left >= steps else f"only {max(0, left)} steps are left to be traced, not {steps}"


def begun(state: State) -> Decision | None:
    """The order to the ranks, once the running generation has made its first steps."""
    asked, plan = state.profiling, state.plan
    if asked is None or plan is None or (asked.order is not None and not asked.again):
        return None
    if asked.order is not None:
        text = f"the driver has restarted: profile {asked.order.profile_id} is ordered again"
        return Decision((asked.order,), text)
    if state.step < state.entered_step + STEPS_AHEAD:
        return None
    ranks, why = ranks_of(asked.asked.ranks, plan)
    if why or too_late(state, asked.asked.steps):
        return None  # ended by the next event (see `judged`)
    order = StartProfile(
        plan.generation, asked.asked.profile_id, asked.asked.steps, ranks, _from_step(state)
    )
    first, last = order.from_step + 1, order.from_step + order.steps
    text = f"profile {order.profile_id}: steps {first} to {last} are traced on ranks "
    return Decision((order,), text + ", ".join(map(str, ranks)))


def _from_step(state: State) -> int:
    ahead = ceil(AHEAD_S / state.step_time_s) if state.step_time_s else 0
    return state.step + STEPS_AHEAD + ahead


def judged(state: State) -> State:
    """Without a profile that cannot begin any more."""
    asked, plan = state.profiling, state.plan
    if asked is None or asked.order is not None or plan is None:
        return state
    if state.job.restarted:
        return ended(state, "a script that is restarted has no steps that elastic could trace")
    why = ranks_of(asked.asked.ranks, plan)[1] or too_late(state, asked.asked.steps)
    return ended(state, why) if why else state


def ended(state: State, why: str, begun_only: bool = False) -> State:
    """Without the profile that is under way, if any; `begun_only`: if it has begun."""
    profiling = state.profiling
    if profiling is None or (begun_only and profiling.order is None):
        return state
    return replace(
        _noted(state, profiling.asked.profile_id, why),
        profiling=None,
        profiled_step=state.step + 1 if profiling.order is not None else state.profiled_step,
    )


def _noted(state: State, profile_id: str, why: str) -> State:
    kept = dict(list(state.profiles.items())[1 - KEPT :])
    return replace(state, profiles={**kept, profile_id: why})


def counts(state: State, step: int) -> bool:
    """Does the step tell how long steps take?"""
    order = state.profiling.order if state.profiling is not None else None
    return step > state.profiled_step and (order is None or step <= order.from_step)


def forgotten(state: State) -> Mapping[str, str]:
    """How profiles have ended, where a driver has begun anew."""
    return ended(state, "the driver has ended, and its workers with it").profiles


def again(state: State) -> State:
    """By a driver that has attached the order is given once more, to whom it may not have
    reached."""
    profiling = state.profiling
    return replace(state, profiling=replace(profiling, again=True)) if profiling else state


def ordered(state: State, action: StartProfile, at_s: float) -> State:
    profiling = state.profiling
    if profiling is None or profiling.asked.profile_id != action.profile_id:
        return state
    return replace(state, profiling=replace(profiling, order=action, again=False))


def _asked(state: State, event: ProfileAsked, at_s: float) -> State:
    now = state.profiling
    if event.profile_id in state.profiles or (now and now.asked.profile_id == event.profile_id):
        return state
    if now is not None and (now.order is None or at_s - now.at_s < STALE_S):
        why = f"profile {now.asked.profile_id} is under way; ask again when it has ended"
        return _noted(state, event.profile_id, why)
    state = ended(state, f"its ranks have not reported within {STALE_S:.0f} s")
    return judged(replace(state, profiling=Profiling(event, at_s)))


def _rank_profiled(state: State, event: RankProfiled, at_s: float) -> State:
    now = state.profiling
    order = now.order if now is not None else None
    if now is None or order is None or order.profile_id != event.profile_id:
        return state
    said = f"rank {event.rank}: {event.error}" if event.error else ""
    now = replace(now, written=now.written | {event.rank}, error=now.error or said)
    state = replace(state, profiling=now)
    return ended(state, now.error) if now.written >= {*order.ranks} else state


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    ProfileAsked: _asked,
    RankProfiled: _rank_profiled,
}
