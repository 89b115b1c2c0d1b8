"""Where the next generation takes its state from: the newest step whose every box has a living
holder, else storage."""

from __future__ import annotations

from operator import attrgetter

from elastic.errors import StateLost
from elastic.policy.faults import refused_layouts
from elastic.policy.faults.corruption import corrupted
from elastic.policy.state.state import State
from elastic.types import Copy, Holding, Layout, Plan, Resume, RollForward, WorkerId
from elastic.types.grid import replica_keys
from elastic.types.replacing import follows_from, replace

# of steps that are done again so that a layout can be compared with the one before
COMPARED_S = 60.0
REDO_STEPS = 2  # which is before the first checkpoint of a run with very long steps
REDO_S = 600.0  # work up to this long is done again from the start where nothing is ever stored


def from_memory(state: State, below: int | None = None) -> Resume | None:
    """The newest step of which every replica group of its generation has a living holder; None when
    there is none.

    `below`: only steps of less than that.
    """
    for (step, generation), held_there in sorted(_held(state).items(), reverse=True):
        plan = state.plans[generation]
        if (below is None or step < below) and covered(plan, held_there, alone(state)):
            chosen = _chosen(state, plan, held_there)
            return Resume("peer", step, generation, plan.layout, plan.layers, chosen)
    return None


@follows_from()
def _held(state: State) -> dict[tuple[int, int], list[Holding]]:
    """(step, generation) -> what living workers hold of it; nothing of generations that are
    forgotten or not to be trusted."""
    found: dict[tuple[int, int], list[Holding]] = {}
    for worker, held in state.holdings.items():
        for holding in held if state.lives(worker) else ():
            found.setdefault((holding.step, holding.generation), []).append(holding)
    return {
        (step, generation): held
        for (step, generation), held in found.items()
        if generation in state.plans
        and generation not in state.distrusted
        and not corrupted(state, generation, step)
    }


def forward(state: State) -> RollForward | None:
    """The step that some survivors have committed and others can still apply, if with these every
    box of it has a holder and without them it has not.

    That is safe: a rank has the result of a commit only when every rank had put its part in, and
    each does so after all of its gradients are summed. So whoever missed it holds the gradients of
    just this step beside the state before it, and nothing that the broken collective may have left
    half-done.
    """
    if not state.pending:
        return None
    held = _held(state)
    for (step, generation), there in sorted(held.items(), reverse=True):
        plan = state.plans[generation]
        if covered(plan, there, alone(state)):
            return None
        done = [h for h in there if h.kind == "live"]
        commit = next((state.commits[h.worker] for h in done if state.commits.get(h.worker)), None)
        before = held.get((step - 1, generation), [])
        waiting = [h for h in before if h.kind == "live" and state.pending.get(h.worker) == step]
        if commit and waiting and covered(plan, [*done, *waiting], alone(state)):
            return RollForward(generation, step, commit)
    return None


def covered(plan: Plan, holdings: list[Holding], alone: bool = False) -> bool:
    """Does every group of ranks with equal boxes have a holder? `alone`: see replica_key."""
    keys = replica_keys(plan.layout, alone)
    ranks = set(map(attrgetter("rank"), holdings))
    return {keys[rank] for rank in ranks if 0 <= rank < len(keys)} == set(keys)


def alone(state: State) -> bool:
    """Has each rank boxes that no other has?"""
    return state.model is not None and state.model.by_owners


def _chosen(state: State, plan: Plan, holdings: list[Holding]) -> tuple[Holding, ...]:
    """One holding per worker and rank (live before peer); workers of draining nodes only where no
    other would do."""
    by_place: dict[tuple[int, WorkerId], Holding] = {}
    for holding in holdings:
        at = holding.rank, holding.worker
        if at not in by_place or (holding.kind == "live" and by_place[at].kind != "live"):
            by_place[at] = holding
    every = sorted(by_place.values(), key=lambda h: (h.rank, str(h.worker)))
    if not state.draining:
        return tuple(every)
    staying = [h for h in every if state.nodes[h.worker.node_id].status != "draining"]
    return tuple(staying if covered(plan, staying, alone(state)) else every)


def newest(state: State) -> Resume:
    """The newest state that can be had: memory before storage at the same step. Raises StateLost
    when there is none.

    A run that has stored nothing yet starts again at step 0: a person could do nothing else. One
    that stores no checkpoints does so when no more than REDO_S of steps, or REDO_STEPS, are lost by
    that.
    """
    if state.job.restarted:  # what it has saved it knows itself
        return Resume("durable" if state.generation else "fresh", state.step)
    memory, durable = _below(state, state.below_step)
    if state.below_step and memory is None and durable is None:
        memory, durable = _below(state, None)  # nothing older is left: the same state again
    if memory and (durable is None or memory.step >= durable.step):
        return memory
    if durable:
        return _stored(durable)
    if state.astray and (
        left := from_memory(replace(state, distrusted=state.distrusted - set(state.astray)))
    ):
        return left  # what a generation of a wrong layout had taken over before its first step
    if state.damaged:
        raise StateLost(
            f"no checkpoint can be read: {'; '.join(state.damaged.values())}; mend one, or remove "
            "them all to start over (elastic checkpoint rm)"
        )
    lost_s = state.best_step * state.step_time_s
    anew = state.begins_anew and bool(state.job.durable_every)
    if anew or lost_s <= REDO_S or state.best_step <= REDO_STEPS:
        return Resume("fresh")
    raise StateLost(
        f"no copy of the training state is left: step {state.best_step} was reached ({lost_s:.0f} "
        "s of steps), no checkpoint was ever stored, and the living workers hold no complete "
        "copy; set checkpoint_every and start again"
    )


def _unproven(state: State, layout: Layout, old: Layout) -> tuple[str, ...]:
    """Axes that the copy's layout had not, and that were compared neither before the run began nor
    by a transition."""
    proven = state.compared.union(state.model.proven if state.model is not None else ())
    return tuple(axis for axis in refused_layouts.new_axes(layout, old) if axis not in proven)


def comparable(state: State, layout: Layout, resume: Resume) -> Resume:
    """Where the layout has an axis that the copy's had not and that nobody has compared, and
    nothing is known at the copy's step that would tell whether it computes the same: an older copy,
    from which a step is done again that is known, or else the run's first step. Where that costs
    more than COMPARED_S: the same copy."""
    if not state.probes or resume.layout is None or not _unproven(state, layout, resume.layout):
        return resume
    if refused_layouts.comparable(state, resume.step):
        return resume
    memory, durable = _below(state, resume.step)
    stored = None if state.away and state.redoes_unknown else durable
    found = [copy for copy in (memory, _stored(stored) if stored else None) if copy]
    if state.redoes_unknown:
        found = [copy for copy in found if refused_layouts.comparable(state, copy.step)]
        found += [Resume("fresh")] if not found and not state.away else []
    older = max(found, key=lambda copy: copy.step, default=None)
    if older is None or not refused_layouts.comparable(state, older.step):
        return resume
    if state.job.phase_at(older.step) != state.job.phase:
        return resume  # its layout may be none for those steps
    return older if (resume.step - older.step) * state.step_time_s <= COMPARED_S else resume


def unknown_axes(state: State, layout: Layout, resume: Resume) -> dict[str, str]:
    """Axes that the copy's layout had not, where nothing would tell whether they compute the same;
    and that."""
    if not state.probes or resume.layout is None or refused_layouts.comparable(state, resume.step):
        return {}
    axes = _unproven(state, layout, resume.layout)
    why = (
        f"nothing is known at step {resume.step} that would tell whether it computes the same as "
        f"{resume.layout}"
    )
    return dict.fromkeys(axes, why)


def _stored(copy: Copy) -> Resume:
    return Resume("durable", copy.step, copy.generation, copy.layout, copy.layers, uri=copy.uri)


def _below(state: State, below: int | None) -> tuple[Resume | None, Copy | None]:
    """The newest in memory and in storage, of less than that step."""
    return from_memory(state, below), next(
        (c for c in state.durable if below is None or c.step < below), None
    )


def live(state: State) -> Resume:
    """From the running generation, at the boundary where it stops: every rank of it holds its
    boxes."""
    plan = state.plan
    assert plan is not None
    return Resume("live", state.step, plan.generation, plan.layout, plan.layers, plan.live)
