"""Of nodes that do not reach each other the fewest are left out that end it, and the others
continue.

What such a node holds cannot be taken from there, though the driver hears of it: it would have to
meet those that it does not reach. So it counts as lost, and that is said: the others have it from
their peer replicas or from storage, or steps are done again. Where they could not train, none is
left out, and all are waited for (unreached.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastic.errors import ElasticError, InfeasiblePlan
from elastic.policy.copies import recovery
from elastic.policy.faults.unreached import Pair, apart, kept_out_s
from elastic.policy.plans import choice_of, from_where
from elastic.policy.pools import drain
from elastic.policy.state.state import Apart, State
from elastic.types import Action, Decision, Quarantine, ReleaseNode
from elastic.types.replacing import replace

EXACT_MOST = 10  # nodes left out at once; more are chosen one by one, who is in most pairs first


def left_out(state: State, now_s: float) -> Decision | None:
    """The nodes that are left out, why, and what that costs; None = none is."""
    found, aborting = apart(state), state.aborting
    if not found or state.phase != "waiting" or aborting is None or aborting.owing:
        return None
    if aborting.failure.cause != "infrastructure":
        return None
    names = _fewest(state, [one.nodes for one in found])
    stays = [node for node in drain.usable(state, now_s) if node.node_id not in names]
    try:
        choice_of(state, stays)
    except InfeasiblePlan:
        return None
    actions: list[Action] = []
    reasons = []
    for name in names:
        why = _why(name, [one for one in found if name in one.nodes])
        actions += [Quarantine(name, why), ReleaseNode(name)]
        reasons.append(f"node {name} is quarantined: {why}; {_back(state, name)}")
    return Decision(tuple(actions), "; ".join((*reasons, _cost(state, names))))


def newcomer(state: State, now_s: float) -> Decision | None:
    """A node that the running plan does not use, and that one of it has not reached when their
    groups were made ahead: it is left out before anybody waits for it."""
    plan = state.plan
    if not state.apart or plan is None or state.target is not None:
        return None
    for one in state.apart:
        used = [name for name in one.nodes if name in plan.workers_per_node]
        if len(used) != 1:
            continue
        (other,) = {*one.nodes} - {*used}
        node = state.nodes.get(other)
        if node is not None and node.status == "prepared":
            why = f"{node.node_id} and {used[0]}, which trains, do not reach each other"
            text = f"node {node.node_id} is quarantined: {why}; {_back(state, node.node_id)}"
            return Decision((Quarantine(node.node_id, why), ReleaseNode(node.node_id)), text)
    return None


def _back(state: State, name: str) -> str:
    return f"should it come back, it is not used before {kept_out_s(state, name):.0f} s from now"


def _why(name: str, found: Sequence[Apart]) -> str:
    others = sorted({other for one in found for other in one.nodes} - {name})
    numbers = sorted({number for one in found for number in one.generations})
    return (
        f"{name} and {', '.join(others)} do not reach each other, though all answer the driver "
        f"(generations {', '.join(map(str, numbers))} did not meet)"
    )


def _cost(state: State, names: Collection[str]) -> str:
    """Of what these nodes hold: it counts as lost."""
    gone = {name: replace(state.nodes[name], status="quarantined") for name in names}
    try:
        before = recovery.newest(state)
        after = recovery.newest(replace(state, nodes={**state.nodes, **gone}))
    except ElasticError as error:
        return str(error)
    if after.step == before.step:
        return f"all of step {after.step} can be had without"
    return f"only with it all of step {before.step} was held, which is lost: {from_where(after)}"


def _fewest(state: State, pairs: Sequence[Pair]) -> tuple[str, ...]:
    """The smallest set of nodes that has one of each pair; of several of that size the one that
    `_whom_first` names first."""
    names = sorted({name for pair in pairs for name in pair}, key=lambda n: _whom_first(state, n))
    place = {name: i for i, name in enumerate(names)}
    best = _one_by_one(pairs, place)
    if len(best) > EXACT_MOST:
        return tuple(sorted(best))

    def look(chosen: frozenset[str]) -> None:
        nonlocal best
        uncovered = next((pair for pair in pairs if chosen.isdisjoint(pair)), None)
        if uncovered is None:
            best = min(best, chosen, key=lambda names: (len(names), _places(names, place)))
        elif len(chosen) < len(best):
            for name in uncovered:
                look(chosen | {name})

    look(frozenset())
    return tuple(sorted(best))


def _places(names: Collection[str], place: Mapping[str, int]) -> list[int]:
    return sorted(place[name] for name in names)


def _one_by_one(pairs: Sequence[Pair], place: Mapping[str, int]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    while rest := [pair for pair in pairs if found.isdisjoint(pair)]:
        found |= {min(place, key=lambda n: (-sum(n in pair for pair in rest), place[n]))}
    return found


def _whom_first(state: State, name: str) -> tuple[int, bool, float, str]:
    """Who is in most pairs (also in such as were told of once), then spot, then the cheaper one."""
    n_pairs = sum(name in one.nodes for one in state.apart)
    pool = state.pool(state.nodes[name].pool)
    spot, usd = (pool.market_type == "spot", pool.usd_per_gpu_h) if pool else (False, 0.0)
    return -n_pairs, not spot, usd, name
