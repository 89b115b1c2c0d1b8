"""When to copy to peers and when to durable storage."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

from elastic.policy.known import State
from elastic.types import Node

PEER_SHARE = 0.01  # of the step time
PEER_UNMEASURED, PEER_MOST = 5, 50
DURABLE_LEAST, DURABLE_UNMEASURED, DURABLE_ALONE, DURABLE_COPIES = 20, 20, 10, 4
LOSSES_PER_NODE_H = {"spot": 0.05, "on-demand": 0.002, "reserved": 0.002, "owned": 0.002}  # prior: one per 20 and 500 h
PRIOR_NODE_H = 20.0  # weight of the prior against what the run sees
STALL_UNMEASURED_S = 0.5


def peer_every(state: State, n_nodes: int) -> int:
    """Steps between peer copies: the smallest number that keeps them under 1 % of the step time; 0 on a single node."""
    wanted = state.job.get("peer_every", "auto")
    if n_nodes < 2:
        return 0
    if wanted != "auto":
        return int(wanted)
    if not state.copy_stall_s or not state.step_time_s:
        return PEER_UNMEASURED
    return min(PEER_MOST, max(1, ceil(state.copy_stall_s / (PEER_SHARE * state.step_time_s))))


def losses_per_h(state: State, nodes: Sequence[Node]) -> float:
    """Expected losses per hour of these nodes: a prior by market type, corrected by what this run has seen."""
    markets = {pool.name: pool.market_type for pool in state.pools}
    prior = sum(LOSSES_PER_NODE_H[markets.get(node.pool, "owned")] for node in nodes)
    seen_h = state.node_s / 3600
    per_node_prior = prior / max(1, len(nodes))
    return len(nodes) * (per_node_prior * PRIOR_NODE_H + state.n_losses) / (PRIOR_NODE_H + seen_h)


def durable_every(state: State, nodes: Sequence[Node]) -> int:
    """Steps between durable copies: sqrt(2 x stall x mean time between losses) (Young 1974, Daly 2006), at least 20 steps
    and at most a quarter of the job; at most 10 when there is no second node to hold peer copies."""
    wanted = state.job.get("durable_every", "auto")
    if wanted != "auto":
        return int(wanted)
    every = DURABLE_UNMEASURED
    if state.step_time_s:
        stall_s = state.durable_stall_s or STALL_UNMEASURED_S
        interval_s = sqrt(2 * stall_s * 3600 / max(1e-9, losses_per_h(state, nodes)))
        every = max(DURABLE_LEAST, min(round(interval_s / state.step_time_s), state.steps // DURABLE_COPIES))
    return min(every, DURABLE_ALONE) if len({node.node_id for node in nodes}) < 2 else every
