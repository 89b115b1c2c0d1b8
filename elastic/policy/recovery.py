"""Where the next generation takes its state from: the newest step whose every box has a living holder, else storage."""

from __future__ import annotations

from elastic.errors import StateLost
from elastic.mesh import replica_key
from elastic.policy.known import State
from elastic.types import Holding, Plan, Resume

REDO_S = 600.0  # work up to this long is done again from the start when nothing was ever stored


def from_memory(state: State) -> Resume | None:
    """The newest step of which every replica group of its generation has a living holder; None when there is none."""
    found: dict[tuple[int, int], list[Holding]] = {}
    for worker, held in state.holdings.items():
        for holding in held if state.lives(worker) else ():
            below = state.below_step is None or holding.step < state.below_step
            if holding.generation in state.plans and holding.generation not in state.distrusted and below:
                found.setdefault((holding.step, holding.generation), []).append(holding)
    for (step, generation), held_there in sorted(found.items(), reverse=True):
        plan = state.plans[generation]
        if covered(plan, held_there):
            chosen = _chosen(state, plan, held_there)
            return Resume("peer", step, generation, plan.layout, plan.layers, chosen)
    return None


def covered(plan: Plan, holdings: list[Holding]) -> bool:
    """Does every group of ranks with equal boxes have a holder?"""
    held = {replica_key(plan.layout, h.rank) for h in holdings if 0 <= h.rank < plan.layout.world_size}
    return held == {replica_key(plan.layout, rank) for rank in range(plan.layout.world_size)}


def _chosen(state: State, plan: Plan, holdings: list[Holding]) -> tuple[Holding, ...]:
    """One holding per worker and rank (live before peer); workers of draining nodes only where no other would do."""
    by_place: dict[tuple[int, str], Holding] = {}
    for holding in sorted(holdings, key=lambda h: (h.rank, str(h.worker), h.kind != "live")):
        by_place.setdefault((holding.rank, str(holding.worker)), holding)
    every = list(by_place.values())
    staying = [h for h in every if state.nodes[h.worker.node_id].status != "draining"]
    return tuple(staying if covered(plan, staying) else every)


def newest(state: State) -> Resume:
    """The newest state that can be had: memory before storage at the same step. Raises StateLost when there is none.

    A run that has stored nothing yet starts again at step 0 when no more than REDO_S of steps are lost by that.
    """
    memory = from_memory(state)
    durable = next((c for c in state.durable if state.below_step is None or c.step < state.below_step), None)
    if memory and (durable is None or memory.step >= durable.step):
        return memory
    if durable:
        return Resume("durable", durable.step, durable.generation, durable.layout, durable.layers, uri=durable.uri)
    lost_s = state.best_step * state.step_time_s
    if lost_s <= REDO_S or not state.best_step:
        return Resume("fresh")
    raise StateLost(
        f"no copy of the training state is left: step {state.best_step} was reached ({lost_s:.0f} s of steps), no durable copy "
        f"was ever stored, and the workers that still live hold no whole copy; set durable_every and start again"
    )


def live(state: State) -> Resume:
    """From the running generation, at the boundary where it stops: every rank of it holds its boxes."""
    plan = state.plan
    assert plan is not None
    holdings = tuple(Holding(worker, plan.generation, rank, -1, "live") for rank, worker in enumerate(plan.ranks))
    return Resume("live", state.step, plan.generation, plan.layout, plan.layers, holdings)
