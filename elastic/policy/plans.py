"""The next generation's Plan: the planner's choice for the nodes there are, what the policy adds,
and the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any

from elastic.errors import InfeasiblePlan
from elastic.planner.choice import Choice
from elastic.planner.hetero import rank_placement
from elastic.planner.layout_choice import plan_layout
from elastic.planner.node_sets import LayoutLimits
from elastic.policy import restarts, transition_cost
from elastic.policy.copies import cadence, replica_placement
from elastic.policy.faults import refused_layouts
from elastic.policy.pools.gpu_memory import gpu_bytes
from elastic.policy.speed import measured_steps, speeds
from elastic.policy.state.state import State
from elastic.text import n_of
from elastic.types import (
    Action,
    Cause,
    Decision,
    EnterPlan,
    HardwareProfile,
    Node,
    Plan,
    Pool,
    Prepare,
    Rehearsal,
    Resume,
    WorkerId,
    worker_ids,
)  # fmt: skip
from elastic.types.replacing import follows_from, replace

KEPT_CHOICES = 64  # for other numbers of nodes
# pool and GPUs of nodes, in their order: how many of one kind follow each other
Kinds = tuple[tuple[tuple[str, int], int], ...]


@dataclass(frozen=True, eq=False)
class _Question:
    """What an answer of the planner depends on: equal questions have equal answers, and are
    searched once."""

    state: State
    nodes: tuple[Node, ...]

    def _parts(self) -> tuple[Any, ...]:
        s = self.state
        measured = (s.speeds, s.plan, s.timed_at_s, s.uneven_failed)
        asked = (s.generation, s.plans.get(s.generation), s.model, s.job, s.infeasible, s.unusable)
        known = (s.hardware, s.pool_hardware, s.infeasible_on)
        return (self.nodes, s.nodes, s.pools, known, asked, measured)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Question) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash((self.state.generation, self.state.timed_at_s, len(self.nodes)))


def choice_of(state: State, nodes: Sequence[Node]) -> Choice:
    """The planner's answer for these nodes; those of the newest plan come first, so that ranks stay
    where they are."""
    if state.job.restarted:
        return restarts.choice(state, nodes)
    found = _answered(_Question(state, tuple(nodes)))
    if isinstance(found, InfeasiblePlan):
        raise found.with_traceback(None)  # else each time adds its frames
    return found


def never(state: State, n_nodes: Mapping[tuple[str, int], int]) -> InfeasiblePlan | None:
    """Why there is no plan for so many nodes of each pool and number of GPUs; None = there is one.
    What they are called matters only where their speeds are known."""
    kinds = tuple((kind, n) for kind, n in sorted(n_nodes.items()) if n)
    try:
        if state.speeds or state.job.restarted:
            choice_of(state, _unnamed(kinds))
        elif isinstance(found := _alike(state, kinds), InfeasiblePlan):
            return found
    except InfeasiblePlan as error:
        return error
    return None


def _unnamed(kinds: Kinds) -> list[Node]:
    each = [kind for kind, n in kinds for _ in range(n)]
    return [Node(f"?{k}", pool, gpus) for k, (pool, gpus) in enumerate(each)]


@follows_from(
    "job", "pools", "model", "hardware", "pool_hardware", "infeasible", "infeasible_on", "unusable",
    "speeds", kept=KEPT_CHOICES,
)  # fmt: skip
def _alike(state: State, kinds: Kinds) -> Choice | InfeasiblePlan:
    """Of nodes that are told apart by their place, while nobody knows more of them than of which
    pool they are and how many GPUs they have."""
    nodes = _unnamed(kinds)
    usable = refused_layouts.usable_model(state)
    try:
        return plan_layout(usable, state.job, nodes, limits=_limits(state, nodes))
    except InfeasiblePlan as error:
        return error


@lru_cache(maxsize=8)
def _answered(question: _Question) -> Choice | InfeasiblePlan:
    try:
        return _searched(question.state, question.nodes)
    except InfeasiblePlan as error:
        return error


def _searched(state: State, nodes: Sequence[Node]) -> Choice:
    ordered = restarts.in_order(state, nodes)
    if state.speeds:
        usable = refused_layouts.usable_model(state)
        return plan_layout(usable, state.job, ordered, limits=_limits(state, nodes))
    alike = groupby(ordered, key=attrgetter("pool", "gpus"))
    found = _alike(state, tuple((kind, len(list(nodes))) for kind, nodes in alike))
    if isinstance(found, InfeasiblePlan):
        raise found
    nodes_there = tuple(node.node_id for node in ordered)
    names = dict(zip(found.nodes, nodes_there, strict=True))
    of_node = map(names.__getitem__, map(attrgetter("node_id"), found.ranks))
    ranks = tuple(worker_ids(of_node, map(attrgetter("local_rank"), found.ranks)))
    return replace(found, ranks=ranks, nodes=nodes_there)


def _limits(state: State, nodes: Sequence[Node]) -> LayoutLimits:
    pools = {pool.name: pool for pool in state.pools}
    of_node = {node.node_id: pools[node.pool] for node in nodes if node.pool in pools}
    room = {name: gpu_bytes(state, pool) for name, pool in pools.items()}
    zones = {name: zone_of(pool) for name, pool in pools.items()}
    memory = {name: room[pool.name] for name, pool in of_node.items()}
    return LayoutLimits(
        infeasible=state.infeasible,
        infeasible_on=state.infeasible_on,
        hardware=_hardware(state, nodes),
        rates=speeds.rates(state, nodes),
        zones={name: zones[pool.name] for name, pool in of_node.items()},
        memory=memory if len(memory) == len(nodes) and all(memory.values()) else None,
        unusable=refused_layouts.unusable_layouts(state),
        on_gpus=any(pool.accelerator_type != "CPU" for pool in of_node.values()),
        host_memory={name: pool.host_memory_bytes for name, pool in of_node.items()},
    )


def expected_parts(state: State, plan: Plan) -> Choice:
    """How the planner costs a step of this plan, part by part. Raises InfeasiblePlan."""
    nodes = [state.nodes[name] for name in plan.nodes if name in state.nodes]
    if state.model is None or len(nodes) < len(plan.nodes):
        raise InfeasiblePlan("its model or its nodes are not known any more")
    job = replace(state.job, layout=str(plan.layout))
    return plan_layout(state.model, job, nodes, limits=_limits(state, nodes).of_plan())


def not_planned(state: State, choice: Choice) -> str:
    """Why it is not what `elastic plan` offers first on its nodes, which knows nothing of what this
    run has found out; '' = it is."""
    if state.model is None or not choice.nodes:  # the planner was not asked
        return ""
    nodes = [state.nodes[name] for name in choice.nodes]
    limits = _limits(state, nodes)
    kinds = rank_placement.kinds_of(limits.rates or {})
    if not (limits.infeasible or state.unusable or any(kinds.values())):
        return ""
    try:
        planned = plan_layout(state.model, state.job, nodes, limits=limits.of_plan())
    except InfeasiblePlan:  # what was measured is better than what is expected
        return ""
    if planned.layout == choice.layout:
        return ""
    named = (why for why in choice.rejected if why.startswith(f"{planned.layout}: "))
    closed = (
        why
        for name, why in state.unusable.items()
        if name in refused_layouts.new_axes(planned.layout, None)
    )
    slower = "slower at the measured speeds"
    why = next(named, "").removeprefix(f"{planned.layout}: ") or next(closed, "") or slower
    return f"not as planned ({planned.layout}): {why}"


def zone_of(pool: Pool | None) -> str:
    """With its region; '' = not known."""
    return f"{pool.region}/{pool.zone}".strip("/") if pool is not None else ""


def _hardware(state: State, nodes: Sequence[Node]) -> dict[str, HardwareProfile]:
    """Of these nodes, as far as their pool or its kind is known."""
    kinds = {profile.accelerator_type: profile for profile in state.hardware}
    of_pool = {
        pool.name: kinds[pool.accelerator_type]
        for pool in state.pools
        if pool.accelerator_type in kinds
    } | dict(state.pool_hardware)
    return {node.node_id: of_pool[node.pool] for node in nodes if node.pool in of_pool}


def with_rehearsals(state: State, decision: Decision) -> Decision:
    """Nodes that are prepared rehearse what they may soon run: with all nodes that there are, and
    with one less. They must have the memory that one of the two needs."""
    wanted = [action for action in decision.actions if isinstance(action, Prepare)]
    if not wanted or state.job.restarted:
        return decision
    nodes = [node for node in state.nodes.values() if node.status in ("ready", "prepared")]
    choices = []
    for fewer in (0, 1):
        try:
            choice = choice_of(state, nodes[: len(nodes) - fewer])
        except InfeasiblePlan:  # nothing to rehearse
            continue
        choices.append((choice, dict(zip(choice.ranks, range(len(choice.ranks)), strict=True))))
    actions = tuple(
        _rehearsing(state, action, choices) if isinstance(action, Prepare) else action
        for action in decision.actions
    )
    return replace(decision, actions=actions)


def _rehearsing(
    state: State, action: Prepare, choices: Sequence[tuple[Choice, Mapping[WorkerId, int]]]
) -> Prepare:
    """`choices`: each with the ranks of its workers."""
    node = state.nodes[action.node_id]
    pool = state.pool(node.pool)
    on_gpu = pool is not None and pool.accelerator_type != "CPU"
    least = min((choice.memory_bytes for choice, _ in choices), default=0)
    rehearse = tuple(_rehearsal(choice, at, node) for choice, at in choices)
    return replace(
        action,
        rehearse=rehearse,
        gpu_bytes=least if on_gpu else 0,
        host_bytes=0 if on_gpu else least * node.gpus,
    )


def _rehearsal(choice: Choice, at: Mapping[WorkerId, int], node: Node) -> Rehearsal:
    ranks = tuple(at.get(WorkerId(node.node_id, k), -1) for k in range(node.gpus))
    return Rehearsal(
        choice.layout, choice.layers, choice.n_microbatches, max(choice.samples), ranks
    )


def enter(state: State, choice: Choice, resume: Resume, *, cause: Cause, why: str) -> Decision:
    if state.job.restarted:
        return restarts.entered(state, choice, resume, cause=cause, why=why)
    choice = transition_cost.placed(state, choice, resume)
    used = {worker.node_id for worker in choice.ranks}
    nodes = [node for node in state.nodes.values() if node.node_id in used]
    prices = {pool.name: pool.usd_per_node_h for pool in state.pools}
    copies = replica_placement.copies(state, choice, nodes)
    move = transition_cost.predicted(state, choice, resume)
    plan = Plan(
        generation=state.generation + 1,
        layout=choice.layout,
        ranks=choice.ranks,
        samples=choice.samples,
        layers=choice.layers,
        n_microbatches=choice.n_microbatches,
        resume=resume,
        cause=cause,
        peer_every=cadence.peer_every(state, nodes, copies),
        copies_to=copies.to,
        move=move,
        copy_buffers=copies.buffers,
        copy_bytes_per_s=copies.bytes_per_s,
        durable_every=cadence.durable_every(state, nodes, alone=copies.missing),
        predicted_step_time_s=_expected_step_s(state, choice),
        model_step_s=choice.model_step_s if choice.hardware_known else 0.0,
        memory_bytes=choice.memory_bytes + choice.activation_bytes,
        usd_per_h=sum(prices.get(node.pool, 0.0) for node in nodes),
        rolled_back=state.rolled_back,
        unusable=tuple(state.unusable.items()),
        probe=refused_layouts.probe_of(state, resume),
        phase=state.job.phase,
    )
    actions: tuple[Action, ...] = (EnterPlan(plan),)
    where = f"{n_of(len(choice.ranks), 'worker')} of {n_of(len(nodes), 'node')}"
    expected = (
        f", expected step time {plan.predicted_step_time_s:.3g} s"
        if plan.predicted_step_time_s
        else ""
    )
    price = f", ${plan.usd_per_h:.2f}/h" if plan.usd_per_h else ""
    text = (
        f"{why}; generation {plan.generation}: {choice.layout} on {where}{price}, "
        f"{_every('peer', plan.peer_every)}, "
        f"{_every('durable', plan.durable_every)}{expected}"
    ) + "".join(
        f"; {more}"
        for more in (
            not_planned(state, choice) or _instead(choice),
            transition_cost.transfer_message(move),
            copies.note,
        )
        if more
    )
    return Decision(actions, text)


def _instead(choice: Choice) -> str:
    """Why it is no simpler layout of as many workers: what was tried first."""
    first = choice.rejected[0] if choice.rejected else ""
    return first if first.startswith("no ") else f"not {first}" if first else ""


def _every(kind: str, steps: int) -> str:
    noun = {"peer": "peer replicas", "durable": "checkpoints"}[kind]
    return f"{noun} every {n_of(steps, 'step')}" if steps else f"no {noun} until the next plan"


def _expected_step_s(state: State, choice: Choice) -> float:
    """What was measured of such plans, or follows from what was. Where too little was, and for
    drivers that knew nothing else: the measured step time, scaled as the cost model says that the
    two layouts differ (where the hardware is not known: by the number of ranks). Before the first
    measurement what the cost model says, where the hardware is known; else 0."""
    if measured_s := measured_steps.expected_s(state, choice):
        return measured_s
    newest = state.plans.get(state.generation)
    if newest is None or not state.step_time_s:
        return choice.model_step_s if choice.hardware_known else 0.0
    if newest.phase != state.job.phase and not (newest.model_step_s and choice.hardware_known):
        return 0.0  # of other samples
    if newest.model_step_s and choice.hardware_known:
        return state.step_time_s * choice.model_step_s / newest.model_step_s
    return state.step_time_s * newest.layout.world_size / choice.layout.world_size


def from_where(resume: Resume) -> str:
    place = {
        "fresh": "from the beginning",
        "peer": "from peer memory",
        "live": "from live memory",
        "durable": "from the checkpoint",
    }
    return f"step {resume.step} {place[resume.source]}"
