"""How a run ends: all steps done, stopped with its last step saved, or failed; each says why."""

from __future__ import annotations

import math

from elastic.policy import restarts
from elastic.policy.copies import recovery
from elastic.policy.copies.retention import (
    COPY_TRIES,
    COPY_WAIT_S,
    LAST_COPY_LEAST_S,
    last_heard_s,
    last_tries,
    removal,
    stop_refused,
    tried_until_s,
)
from elastic.policy.faults import recurring_breaks, retries
from elastic.policy.pools import hard_limits
from elastic.policy.state.state import ENDED, State, StopWish
from elastic.types import AUTO, Abort, Decision, DriverStarted, Quiesce, Stop
from elastic.types.events import SIGNAL
from elastic.types.replacing import replace

AGAIN_MOST_S = 60.0  # between two tries to store the last checkpoint
SLOW_SAVE = 3.0  # times what a checkpoint took: the last one may be as slow as that


def ended(state: State, now_s: float) -> Decision | None:
    if state.fatal:
        return stop("failed", state.fatal)
    group = state.target or state.plan
    if state.job.restarted and group is not None and state.script_ended >= group.workers:
        done = f"the script has ended on all {len(group.ranks)} ranks"
        return stop("succeeded", done)
    if state.steps and state.saved_step >= state.steps:
        done = f"all {state.steps} steps finished; the checkpoint of the last step is stored"
        left = removal(replace(state, being_read=""))  # nothing is read to its end any more
        return Decision((*left.actions, Stop("succeeded", done)), done)
    why = recurring_breaks.verdict(state) or retries.gave_up(state)
    return stop("failed", why) if why else None


def stop_kept(state: State, event: DriverStarted, at_s: float) -> StopWish | None:
    """What a person has asked for stands until the run has stopped, or until a person starts it,
    with `--supervise` or without. A signal is meant for the process that it was sent to, a limit is
    looked at anew, and of what was trained enough the last steps may be gone."""
    wish = state.stop
    if wish is None or not (event.keeps_stop and event.supervised) or state.phase in ENDED:
        return None
    other = not of_a_person(wish) or (wish.done and not event.attached)
    return None if other else replace(wish, at_s=at_s)


def of_a_person(wish: StopWish) -> bool:
    """Neither a limit's nor a signal's to one process."""
    return not wish.limit and not wish.reason.startswith(SIGNAL)


def stopped_by_a_person(state: State | None) -> str:
    """Why; '' = the run has not stopped, or nobody had asked it to."""
    wish = state.stop if state is not None and state.phase == "stopped" else None
    return wish.reason if wish is not None and of_a_person(wish) and not wish.done else ""


def stop_wish(state: State, now_s: float) -> StopWish | None:
    """The wish to stop, also when the budget or the time has run out since the last event. A
    person's waits for storage: it would end what nobody can save."""
    wish = state.stop
    if wish is None or (state.away and not wish.limit and not state.quiescing):
        return hard_limits.wish(state, now_s)
    waits = stop_refused(state) or _takes_its_time(state, wish)
    return (hard_limits.wish(state, now_s) if waits else None) or wish


def bound_s(state: State, wish: StopWish, now_s: float) -> float:
    """Until when a wish to stop waits for its checkpoint: a person's for `orphan_lease_s` where
    storage refuses it or it is not stored yet, longer while ranks write it, and no longer than the
    budget lasts. What all steps have made has its time behind the deadline, too."""
    until_s = wish.at_s + hard_limits.stop_most_s(state)
    if (stop_refused(state) and not wish.limit) or _takes_its_time(state, wish):
        until_s = max(until_s, wish.at_s + state.job.orphan_lease_s)
    if _takes_its_time(state, wish):
        # what is written is still hashed and committed, of which nobody tells
        most_s = max(LAST_COPY_LEAST_S, state.job.orphan_lease_s)
        until_s = max(until_s, state.busy_at_s + most_s)
    late_s = _late_until_s(state, now_s)
    if wish.limit and late_s is not None:
        until_s = max(until_s, late_s)
    spent_s = (
        hard_limits.spent_at_s(state, now_s) if _heeds_limits(state, wish, now_s) else math.inf
    )
    return min(until_s, max(wish.at_s, spent_s))


def _takes_its_time(state: State, wish: StopWish) -> bool:
    """A person has asked to stop, and memory alone holds the newest step."""
    return not wish.limit and hard_limits.awaits_save(state)


def _late_until_s(state: State, now_s: float) -> float | None:
    """Until when the checkpoint of the last step is waited for though the deadline is over."""
    end_s = hard_limits.deadline_s(state)
    late = end_s is not None and now_s >= end_s and hard_limits.owes_last(state)
    return end_s + _slow_save_s(state) if late and end_s is not None else None


def _heeds_limits(state: State, wish: StopWish, now_s: float) -> bool:
    """Budget and deadline end the wait."""
    refused = state.saves_again and state.copy_failed is not None
    late = _late_until_s(state, now_s) is not None
    return refused or late or _takes_its_time(state, wish)


def look_again_s(state: State, wish: StopWish, now_s: float) -> float | None:
    """When a run that is to stop is looked at again if nothing happens."""
    if state.away and not wish.limit:
        return None
    until_s = bound_s(state, wish, now_s)
    if not _heeds_limits(state, wish, now_s):
        return until_s
    times = [until_s, *([] if wish.limit else hard_limits.wakes(state, now_s))]
    return min((at_s for at_s in times if at_s > now_s), default=None)


def only_saves(state: State, now_s: float) -> bool:
    """Nothing runs, and what begins now is to save what only memory holds."""
    waits = state.phase == "waiting" and not state.job.restarted
    return state.saves_in_any and waits and stop_wish(state, now_s) is not None


def in_any_layout(state: State) -> State:
    """As if the job named no layout and no number of workers: what is saved is the same."""
    return replace(state, job=replace(state.job, layout=AUTO, min_workers=1))


def put_off(state: State, wish: StopWish, found: Decision) -> Decision:
    """Nothing new is begun: what breaks meanwhile is mended, since the state is in memory alone."""
    text = (
        f"{wish.reason}: {away(state)}; step {state.step} is saved when it answers, last "
        f"checkpoint at step {state.saved_step}"
    )
    return found if found.actions else Decision((), text, found.wake_at_s)


def away(state: State) -> str:
    """That storage is, and why."""
    return f"storage does not answer ({state.away.what})" if state.away else ""


def save_and_stop(state: State, now_s: float) -> Decision | None:
    """Save, then stop: the running generation is stopped at a step boundary with a checkpoint."""
    wish = stop_wish(state, now_s)
    if wish is None:
        return None
    until_s = bound_s(state, wish, now_s)
    if state.job.restarted:
        return _end_script(state, wish, now_s, bound_s=until_s)
    if state.durable_s:  # how long saving takes is known, and that much was kept for it
        until_s = min(until_s, max(wish.at_s, hard_limits.spent_at_s(state, now_s)))
    saved = f"step {state.step} reached, last checkpoint at step {state.saved_step}"
    ends = "succeeded" if wish.done and state.saved_step >= state.step else "stopped"
    if state.away and not wish.limit:
        return Decision((), f"{wish.reason}; {saved}: {away(state)}")
    plan = state.plan if state.target is None else None
    left = plan is not None and state.quiesced >= plan.workers
    done = left and (state.saved_step >= state.step or not state.step)
    if now_s >= until_s and not (state.saves_again and done):
        return stop("stopped", f"{wish.reason}; {saved}{_why_no_more(state, wish, now_s)}")
    if state.phase == "waiting":
        memory = recovery.from_memory(state)
        if memory and memory.step > state.saved_step and state.available:
            if state.away:  # which continues being paid for, but no longer than any save may take
                return Decision((), f"{wish.reason}; {saved}: {away(state)}", until_s)
            return None  # enter once more, to save what only memory holds
        return stop(ends, f"{wish.reason}; {saved}")
    if plan is None:
        return Decision(
            (), f"{wish.reason}: waits for generation {state.generation} to be entered", until_s
        )
    if state.phase_over and state.saved_step < state.step:
        return None  # its workers have left, and may not have heard: it is saved in the next phase
    if left and state.quiescing is None and state.keeps_stop and not _heard_all(state):
        if done:
            return stop(ends, f"{wish.reason}; {saved}")
        if 0 < state.steps <= state.step:
            return None  # they left by themselves, and may store it still: see `finishing`
        text = f"{wish.reason}; {saved}: the driver that was to store step {state.step} is gone"
        return Decision((Abort(state.generation),), f"{text}, it is stored anew", until_s)
    if state.quiescing is None:
        text = (
            f"{wish.reason}: generation {plan.generation} stops at its next step boundary and is "
            f"saved (step {state.step} is the last that was reported)"
        )
        return Decision((Quiesce(plan.generation, save=True),), text, until_s)
    if done:
        return stop(ends, f"{wish.reason}; {saved}")
    bad = state.copy_failed
    if left and bad and bad.step == state.step:
        if not state.saves_again:
            return stop("stopped", f"{wish.reason}; {saved}: {bad.reason}")
        if bad.generation == state.generation:
            return _saved_again(state, wish, now_s, until_s=until_s, said=f"{saved}: {bad.reason}")
    return Decision((), f"{wish.reason}: waiting for the checkpoint of step {state.step}", until_s)


def _saved_again(
    state: State, wish: StopWish, now_s: float, *, until_s: float, said: str
) -> Decision:
    """Storage refused the checkpoint of a stop, and memory holds its step: another generation
    stores it, the later the longer that lasts."""
    wait_s = min(AGAIN_MOST_S, max(COPY_WAIT_S, (state.copy_failed_at_s - wish.at_s) / 2))
    again_s, text = state.copy_failed_at_s + wait_s, f"{wish.reason}; {said}"
    if now_s >= again_s:
        return Decision((Abort(state.generation),), f"{text}: retried")
    lease = f" for {state.job.orphan_lease_s:.0f} s (orphan_lease_s)"
    most = "as long as this limit allows" if wish.limit else f"and so on{lease}"
    return Decision((), f"{text}: retried in {wait_s:.0f} s, {most}", min(again_s, until_s))


def _why_no_more(state: State, wish: StopWish, now_s: float) -> str:
    """Why a stop is not saved, when its time is over."""
    bad, passed_s = state.copy_failed, now_s - wish.at_s
    if not state.saves_again or bad is None or bad.step <= state.saved_step:
        return f" ({passed_s:.0f} s were not enough to save more)"
    most = "this limit waits no longer" if wish.limit else f"tried for {passed_s:.0f} s"
    return f": {bad.reason} ({most})"


def _end_script(state: State, wish: StopWish, now_s: float, *, bound_s: float) -> Decision:
    """A script that is restarted saves by itself when it gets SIGTERM."""
    if state.phase == "waiting":
        return stop("stopped", wish.reason)
    if now_s >= bound_s:
        late = f"some ranks had not ended after {now_s - wish.at_s:.0f} s"
        return stop("stopped", f"{wish.reason}; {late}")
    if state.asked is None or state.asked.cause is not None:
        text = f"asked to stop ({wish.reason}): every rank gets SIGTERM"
        return Decision((Quiesce(state.generation, grace_s=restarts.GRACE_S),), text, bound_s)
    return Decision(wake_at_s=bound_s)


def stop(outcome: str, reason: str) -> Decision:
    return Decision((Stop(outcome, reason),), reason)  # type: ignore[arg-type]


def finishing(state: State, now_s: float) -> Decision:
    """All steps are done: the copy of the last one is stored, retried where it fails, and without
    it the run has failed."""
    bad, until_s = state.copy_failed, tried_until_s(state)
    if state.away:
        return Decision(
            (),
            f"all {state.steps} steps are done, last checkpoint at step {state.saved_step}: "
            f"{away(state)}",
        )
    if bad is not None and bad.step >= state.steps:
        tries = state.copy_failures
        waits = "" if until_s is None else f" for {state.job.orphan_lease_s:.0f} s (orphan_lease_s)"
        wait_s = min(AGAIN_MOST_S, COPY_WAIT_S * 2 ** max(0, tries - COPY_TRIES))
        again_s = state.copy_failed_at_s + wait_s
        if tries >= COPY_TRIES and (until_s is None or again_s >= until_s):
            text = f"the copy of the last step could not be stored in {tries} tries{waits}"
            return stop("failed", f"{text}: {bad.reason}")
        text = f"the copy of the last step was not stored ({bad.reason})"
        if now_s < again_s:
            more = f", and so on{waits}" if waits else ""
            return Decision((), f"{text}: retried in {wait_s:.0f} s{more}", again_s)
        if bad.generation == state.generation:
            return Decision((Abort(state.generation),), f"{text}: retried")
    most_s = _last_copy_most_s(state)
    bound_s = last_heard_s(state) + most_s
    if now_s < bound_s:
        return Decision(
            (),
            f"all {state.steps} steps are done: waiting for the checkpoint of the last one",
            bound_s,
        )
    late = f"the copy of step {state.step} was not stored within {most_s:.0f} s"
    tries = last_tries(state) + 1
    again = tries < COPY_TRIES or (until_s is not None and now_s < until_s)
    if state.awaits_last and not again and _heard_all(state):
        return stop("failed", f"{late}, in {tries} tries")
    return Decision((Abort(state.generation),), late)


def _last_copy_most_s(state: State) -> float:
    """How long nothing need be heard of the checkpoint of the last step while ranks owe their
    parts."""
    if not state.awaits_last:
        return LAST_COPY_LEAST_S
    most_s = _slow_save_s(state)
    return max(most_s, state.job.orphan_lease_s) if _heard_all(state) else most_s


def _slow_save_s(state: State) -> float:
    return max(LAST_COPY_LEAST_S, SLOW_SAVE * hard_limits.stored_s(state))


def _heard_all(state: State) -> bool:
    """Else some parts may have been stored and told to a driver that is gone: no rank tells that
    again."""
    return state.attached_at_s <= max(state.last_step_at_s, state.entered_at_s)
