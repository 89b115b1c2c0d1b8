"""Which checkpoints stay, and what becomes of them: failed, damaged, removed.

Job keys: keep_last (the newest n), keep_every (also those of steps that are a multiple), keep_best
(also the n of the lowest validation_loss, of equal ones those of validated steps first),
storage_quota_gb (fewer, so that the next copy fits).
The newest copy that is not known to be damaged stays always, and so does the one that the run
resumes from. While results are compared (check_numbers_every), the newest from before the last
comparison that found nothing stays too. While copies are read back (verify_copies), nothing is
removed before a newer one was found right, the newest such stays, and so does the one that is being
read, however many are stored meanwhile; the quota alone has more weight. Under a quota damaged ones
are removed where others are there.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from elastic.policy.state.layered import less
from elastic.policy.state.state import State
from elastic.text import size
from elastic.types import (
    Copy,
    CopyDamaged,
    CopyFailed,
    CopyReadBegun,
    CopyRemoved,
    CopyVerified,
    Decision,
    Evaluated,
    RemoveCopy,
)
from elastic.types.replacing import follows_from, replace

KEPT_EVALUATIONS = 4096  # and those that a checkpoint is judged by
# for the copy of the last step, and for one that a notice makes urgent
COPY_TRIES, COPY_WAIT_S = 3, 5.0
# for the copy of the last step, at least: since that step, or since anything was heard of it
LAST_COPY_LEAST_S = 120.0


def retention(state: State) -> Decision:
    """Removes what need not stay, while the plan runs undisturbed: nothing is to go back to an
    older copy then."""
    if state.phase != "running" or state.failure is not None or state.below_step is not None:
        return Decision()
    return removal(state)


def removal(state: State) -> Decision:
    """As `retention`, also at the end of the run."""
    keep, damaged = kept(state), _without_room(state)
    gone = [copy for copy in state.durable if copy.uri not in keep]
    if not gone and not damaged:
        return Decision()
    gone += damaged
    steps = ", ".join(str(copy.step) for copy in gone)
    n_bytes = sum(copy.n_bytes for copy in gone)
    also = "".join(f"; step {c.step} is damaged, and counts for the quota" for c in damaged)
    why = (
        f"checkpoints of step {steps} ({size(n_bytes)}) are removed: {_rules(state)}"
        f"{also}{_and_more(state, keep)}, {len(keep)} stay"
    )
    return Decision(tuple(RemoveCopy(copy.uri) for copy in gone), why)


def _without_room(state: State) -> list[Copy]:
    """The damaged ones that would keep later ones from being stored. The newest stays where there
    is no other: it may be mended."""
    if not (state.frees_damaged and state.job.storage_quota_gb):
        return []
    return list(state.damaged_copies[not state.durable :])


def _and_more(state: State, keep: Collection[str]) -> str:
    """Why more of them stay than the keys of the job say, each with its step."""
    by_rule = {copy.uri for copies in _by_rules(state) for copy in copies}
    whys = (
        (_from_before_a_check(state), "is from before the last check of results"),
        (_being_read(state), "stays while it is read back"),
        (_verified(state), "stays until a newer one was read back and is right"),
    )
    said = {
        copy.step: f"; step {copy.step} {why}"
        for copies, why in whys
        for copy in copies
        if copy.uri in keep and copy.uri not in by_rule
    }
    target = state.target.resume if state.target is not None else None
    if target is not None and target.uri and target.uri not in by_rule:
        said.setdefault(target.step, f"; from step {target.step} the run resumes")
    return "".join(said.values())


def _by_rules(state: State) -> tuple[Sequence[Copy], Sequence[Copy], Sequence[Copy]]:
    """The copies that the keys of the job keep: the last, the best, every m-th."""
    copies, every, steps = state.durable, state.job.keep_every, sorted(state.validation)
    # as it was last measured at or before the copy's step
    losses = {
        copy.uri: state.validation[steps[at - 1]]
        for copy in copies
        if (at := bisect(steps, copy.step))
    }
    own = state.validation if state.keeps_validated else ()
    finite = (copy for copy in copies if losses.get(copy.uri, math.inf) < math.inf)
    scored = sorted(finite, key=lambda c: (losses[c.uri], c.step not in own, -c.step))
    stepped = [copy for copy in copies if every and copy.step % every == 0]
    return copies[: max(1, state.job.keep_last)], scored[: state.job.keep_best], stepped


@follows_from(
    "being_read", "checked_step", "durable", "job", "keeps_validated", "target", "validation",
    "verified",
)  # fmt: skip
def kept(state: State) -> frozenset[str]:
    """URIs of the copies that stay, by descending claim: newest, best, every m-th."""
    last, best, stepped = _by_rules(state)
    right, read = _verified(state), _being_read(state)
    wanted = [*last[:1], *right[:1], *read, *last, *_from_before_a_check(state), *best, *stepped]
    wanted += right
    found = list(dict.fromkeys(copy.uri for copy in wanted))[: _most(state)]
    return frozenset((*found, state.target.resume.uri) if state.target else found)


def _verified(state: State) -> list[Copy]:
    """The newest copy that was read back and is right; all where none was."""
    if not state.job.verify_copies:
        return []
    return [copy for copy in state.durable if copy.uri in state.verified][:1] or list(state.durable)


def _being_read(state: State) -> list[Copy]:
    """Until it is known whether that one is right: the next ones would be given up as well."""
    return [copy for copy in state.durable if copy.uri == state.being_read]


def _from_before_a_check(state: State) -> list[Copy]:
    """What the run goes back to where ranks turn out to have silently corrupted results since the
    last check that found nothing."""
    wanted = bool(state.job.check_numbers_every)
    return [copy for copy in state.durable if copy.step <= state.checked_step][:1] if wanted else []


def _most(state: State) -> int | None:
    """How many copies the quota allows with room for the next; at least one."""
    quota_gb = state.job.storage_quota_gb
    if not quota_gb or not state.durable or not state.durable[0].n_bytes:
        return None
    return max(1, int(quota_gb * 1e9 / (1.02 * state.durable[0].n_bytes)) - 1)


def _rules(state: State) -> str:
    keys = {
        key: getattr(state.job, key)
        for key in ("keep_last", "keep_every", "keep_best", "storage_quota_gb")
    }
    return ", ".join(f"{key}={value:g}" for key, value in keys.items() if value)


# -------------------------------------------------------------------------------------------- folds


def _evaluated(state: State, event: Evaluated, at_s: float) -> State:
    loss = event.metrics.get("validation_loss")
    if loss is None or not (math.isfinite(loss) or state.scores_all):
        return state
    known = {**state.validation, event.step: loss if math.isfinite(loss) else math.inf}
    steps = sorted(known)
    kept = steps[-KEPT_EVALUATIONS:]
    if state.scores_all and len(kept) < len(steps):
        scored = {steps[at - 1] for copy in state.durable if (at := bisect(steps, copy.step))}
        kept = sorted(scored.union(kept))
    return replace(state, validation={step: known[step] for step in kept})


def _copy_failed(state: State, event: CopyFailed, at_s: float) -> State:
    at_last = (
        event.step >= state.steps > (state.copy_failed.step if state.copy_failed is not None else 0)
    )
    # that of the last step has all its tries, whatever failed before it
    failures = 1 if at_last else state.copy_failures + 1
    # one that a notice asked for: again
    stored = 0 if failures < COPY_TRIES else state.stored_generation
    return replace(
        state,
        copy_failed=event,
        copy_failed_at_s=at_s,
        copy_failures=failures,
        stored_generation=stored,
    )


def tried_until_s(state: State) -> float | None:
    """Until when the checkpoint of the last step is, or that of a stop, which was not stored; None:
    a few times."""
    bad = state.copy_failed
    if bad is None:
        return None
    if state.saves_again and state.stop is not None:
        return state.stop.at_s + state.job.orphan_lease_s
    waits = state.waits_to_save and bad.step >= state.steps > 0
    return state.last_step_at_s + state.job.orphan_lease_s if waits else None


def stop_refused(state: State) -> bool:
    """Storage has refused the checkpoint of a person's stop, which is tried again."""
    stop, bad = state.stop, state.copy_failed
    if not state.saves_again or stop is None or stop.limit or bad is None:
        return False
    return bad.step > state.saved_step and state.copy_failed_at_s >= stop.at_s


def last_tries(state: State) -> int:
    """How often the checkpoint of the last step has failed."""
    bad = state.copy_failed
    return state.copy_failures if bad is not None and bad.step >= state.steps > 0 else 0


def last_heard_s(state: State) -> float:
    """When something was heard last of the last step and its checkpoint, of which a rank tells once
    a minute while it writes."""
    found = max(state.last_step_at_s, state.busy_at_s)
    if state.awaits_last:
        return max(found, state.entered_at_s, state.attached_at_s)
    return found if tried_until_s(state) is None else max(found, state.entered_at_s)


def last_copy_late(state: State, generation: int, *, at_s: float) -> State:
    """A checkpoint of the last step that was waited for in vain has failed, as one that a rank
    could not store has. Where one has said so already, that is known."""
    bad = state.copy_failed
    if bad is not None and (bad.generation, bad.step) == (generation, state.step):
        return state
    why = f"nothing was heard of it for {at_s - last_heard_s(state):.0f} s"
    return _copy_failed(state, CopyFailed(generation, state.step, why), at_s)


def without_copy(state: State, uri: str) -> State:
    return replace(state, durable=tuple(copy for copy in state.durable if copy.uri != uri))


def _read_begun(state: State, event: CopyReadBegun, at_s: float) -> State:
    return replace(state, being_read=event.uri)


def _read(state: State, uri: str) -> State:
    return replace(state, being_read="") if state.being_read == uri else state


def _copy_damaged(state: State, event: CopyDamaged, at_s: float) -> State:
    known = {copy.uri for copy in state.damaged_copies}
    new = [copy for copy in state.durable if copy.uri == event.uri and copy.uri not in known]
    return replace(
        without_copy(_read(state, event.uri), event.uri),
        damaged={**state.damaged, event.uri: event.reason},
        damaged_copies=tuple(sorted((*new, *state.damaged_copies), key=lambda c: -c.step)),
    )


def _copy_verified(state: State, event: CopyVerified, at_s: float) -> State:
    there = {copy.uri for copy in state.durable}
    return replace(
        _read(state, event.uri), verified=(state.verified & there) | ({event.uri} & there)
    )


def _copy_removed(state: State, event: CopyRemoved, at_s: float) -> State:
    return without_copy(state, event.uri)


def ordered_removal(state: State, action: RemoveCopy, at_s: float) -> State:
    """From now on nothing resumes from it."""
    state = replace(
        _read(state, action.uri),
        spoilt=tuple(uri for uri in state.spoilt if uri != action.uri),
        damaged=less(state.damaged, action.uri),
        damaged_copies=tuple(c for c in state.damaged_copies if c.uri != action.uri),
    )
    return without_copy(state, action.uri)


HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    Evaluated: _evaluated, CopyFailed: _copy_failed, CopyDamaged: _copy_damaged,
    CopyReadBegun: _read_begun, CopyVerified: _copy_verified, CopyRemoved: _copy_removed,
}  # fmt: skip
