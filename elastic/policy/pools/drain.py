"""Late drain: how long nodes that will be preempted train on, and which of them a plan may still
use.

A transition must have ended when the first node goes, so it begins `lead` before that. What a node
could still do is weighed in GPU-seconds against what one more pause costs all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastic.policy.state.state import State
from elastic.reshard.rank_boxes import owned_bytes
from elastic.types import DTYPE_BYTES, HardwareProfile, Node, Plan
from elastic.types.replacing import follows_from

PRIOR_PAUSE_S = 5.0  # before the run has seen a live transition
PAUSE_LEAST_S = 1.0
SAFETY = 2.0  # times the predicted pause
STEPS_BEFORE = 2  # the order may just miss the word of a step
COPY_MOST_S = 5.0  # how long a generation that stops waits for a peer replica in flight
NEAR = 3.0  # leads before a deadline from which on the coming move itself is predicted
MARGIN_S = 3.0  # for notices and orders on their way
# a script that is restarted is told so long before a deadline: all of the notice that a cloud
# gives, since nobody knows what its saving takes
SCRIPT_NOTICE_S = 120.0
# a second transition must gain this many times the pause that it costs: first steps are slow, and
# each is a risk
WORTH = 2.0


@dataclass(frozen=True)
class Lead:
    """How long before a deadline the transition must begin, and what that is made of."""

    pause_s: float
    steps_s: float
    copy_s: float
    measured: int
    # of the process groups, where they are made in the pause and the pauses known are without it
    setup_s: float = 0.0

    @property
    def seconds(self) -> float:
        return SAFETY * self.pause_s + self.steps_s + self.copy_s + self.setup_s + MARGIN_S

    def __str__(self) -> str:
        known = f"median of {self.measured}" if self.measured else "none measured yet"
        parts = [
            f"{SAFETY:.0f} x {self.pause_s:.1f} s for a transition ({known})",
            f"{self.steps_s:.1f} s for two steps",
        ]
        parts += [f"{self.copy_s:.1f} s for a peer replica"] if self.copy_s >= 0.05 else []
        parts += [f"{self.setup_s:.1f} s for process groups"] if self.setup_s >= 0.05 else []
        return f"{', '.join(parts)}, {MARGIN_S:.0f} s of margin"


@follows_from(
    "plans", "generation", "pauses_s", "step_time_s", "forming", "setup_s", "model", "hardware",
    "move_pace",
)  # fmt: skip
def lead_of(state: State, moved_s: float = 0.0) -> Lead:
    """From the running plan and what the run has measured. `moved_s`: what the coming move is
    predicted to take; without it that of the last one counts, or of what a node holds over its
    link, whichever is more."""
    plan = state.plans.get(state.generation)
    moved_s = moved_s or max(
        plan.move.seconds if plan and plan.move else 0.0, _moved_s(state, plan)
    )
    known_s = max(PAUSE_LEAST_S, median(state.pauses_s)) if state.pauses_s else PRIOR_PAUSE_S
    step_s = state.step_time_s or (plan.predicted_step_time_s if plan else 0.0)
    setup_s = 0.0 if state.forming is not None and state.forming.there else state.setup_s
    return Lead(
        max(known_s, moved_s),
        STEPS_BEFORE * step_s,
        _copy_s(state, plan),
        len(state.pauses_s),
        setup_s,
    )


def _rank_bytes(state: State, plan: Plan) -> float:
    """Of the training state, on one rank."""
    return _state_bytes(state) * plan.layout.dp_replicate / plan.layout.world_size


@follows_from("model")
def _state_bytes(state: State) -> int:
    model = state.model
    if model is None:
        return 0
    n_bytes = 0
    for spec in model.specs:
        if spec.reread:
            continue
        size = DTYPE_BYTES[spec.dtype]
        for n in spec.shape:
            size *= n
        n_bytes += size * (1 + len(model.kept_of(spec).entries)) + owned_bytes(model, spec)
    return n_bytes


def _moved_s(state: State, plan: Plan | None) -> float:
    """A node that leaves sends what its ranks hold over its link."""
    if plan is None:
        return 0.0
    gpus = max(plan.workers_per_node.values(), default=1)
    link = min(
        (profile.link_bytes_per_s for profile in state.hardware),
        default=HardwareProfile().link_bytes_per_s,
    )
    return state.move_pace * gpus * _rank_bytes(state, plan) / link


def _copy_s(state: State, plan: Plan | None) -> float:
    if plan is None or not plan.peer_every or not plan.copies_to or not plan.copy_bytes_per_s:
        return 0.0
    return min(COPY_MOST_S, _rank_bytes(state, plan) / plan.copy_bytes_per_s)


def act_at_s(state: State, nodes: Sequence[Node], now_s: float) -> float:
    """When the transition that leaves the first of these nodes must begin."""
    deadlines = [now_s if node.deadline_s is None else node.deadline_s for node in nodes]
    lead_s = SCRIPT_NOTICE_S if state.job.restarted else lead_of(state).seconds
    return min(deadlines) - lead_s


def price_gpu_s(state: State, gpus: int) -> float:
    """GPU-seconds that a transition must gain to be worth its pause."""
    return WORTH * lead_of(state).pause_s * gpus


def kept(state: State, now_s: float) -> tuple[Node, ...]:
    """Nodes with notice that a plan made now should still use: leaving them later costs one more
    pause, which is less than what they do until then. If that is so for one node, all with later
    deadlines stay with it: they share its pause."""
    noticed = [node for node in state.draining if node.deadline_s is not None]
    if not noticed:
        return ()
    not_fit = state.releasing | state.given_up | state.faulty_nodes
    fit = [n for n in noticed if n.node_id in state.prepared and n.node_id not in not_fit]
    fit.sort(key=lambda node: (node.deadline_s, node.node_id))
    gpus = sum(node.gpus for node in state.available)
    for i, node in enumerate(fit):
        later = sum(n.gpus for n in fit[i:])
        if later * (act_at_s(state, [node], now_s) - now_s) > price_gpu_s(state, gpus + later):
            return tuple(fit[i:])
    return ()


def usable(state: State, now_s: float) -> tuple[Node, ...]:
    """Nodes for a plan made now."""
    return (*state.available, *kept(state, now_s))


def given_up(state: State) -> tuple[Node, ...]:
    """Nodes that were to be left for others, and are still there."""
    names = state.given_up & state.prepared - state.releasing - state.faulty_nodes
    nodes = (state.nodes[name] for name in sorted(names) if name in state.nodes)
    return tuple(node for node in nodes if node.status == "draining")
