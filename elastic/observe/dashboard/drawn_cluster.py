"""The cluster as a page draws it: nodes, the rank of each GPU with its place on every axis, shares
of the batch, and who holds which copy."""

from __future__ import annotations

from typing import Any

from elastic.observe.metrics.node_loads import over_nodes
from elastic.observe.run_view import View
from elastic.types import AXES, Node, NodeLoadSeen, Plan
from elastic.types.grid import stages_at

MOST_COPIES = 20


def cluster(view: View) -> dict[str, Any]:
    """As it is now. `gone`: nodes that were lost or released and are not drawn."""
    plan, state = view.state.plan, view.state
    listed, n_more = view.listed()
    if view.ended:
        plan = view.plan
    return {
        "nodes": _nodes(view, plan, sorted(listed, key=lambda node: node.status == "lost")),
        "gone": n_more,
        "wanted": view.wanted,
        "starting": {name: seen.starting for name, seen in state.instances.items()},
        "plan": _plan(plan) if plan is not None else None,
        "entering": str(state.target.layout) if state.target is not None else None,
        "copies": _copies(view),
        "load": {
            name: float(f"{value:.3g}")
            for name, value in over_nodes(view.loads.of(view.loads.newest)).items()
        },
    }


def _nodes(view: View, plan: Plan | None, nodes: list[Node]) -> list[dict[str, Any]]:
    ranks: dict[str, dict[int, int]] = {}
    for rank, worker in enumerate(plan.ranks if plan is not None else ()):
        ranks.setdefault(worker.node_id, {})[worker.local_rank] = rank
    speeds = view.node_speeds.by_node(view.nodes)
    whys, pools, now_s = view.node_speeds.whys(speeds), view.pools, view.at_s
    found = []
    for node in nodes:
        pool, mine = pools.get(node.pool), ranks.get(node.node_id, {})
        found.append(
            {
                "id": node.node_id,
                "pool": node.pool,
                "market": pool.market_type if pool is not None else "",
                "status": view.status(node),
                "ranks": [mine.get(k, -1) for k in range(node.gpus)],
                "leaves_in_s": (
                    round(max(0.0, node.deadline_s - now_s), 1)
                    if node.deadline_s is not None and node.status == "draining"
                    else None
                ),
                "speeds": speeds[node.node_id],
                "why": whys.get(node.node_id, ""),
                "load": _load(*view.loads.newest[node.node_id], now_s)
                if node.node_id in view.loads.newest
                else None,
            }
        )
    return found


def _load(told_at_s: float, seen: NodeLoadSeen, now_s: float) -> dict[str, Any]:
    """As the node told it last; of GPUs what is known."""
    gpus = {
        "gpus": seen.n_gpus,
        "gpu": seen.gpu_share,
        "gpu_memory": seen.gpu_memory_bytes,
        "gpu_memory_of": seen.gpu_memory_size_bytes,
        "gpu_w": seen.gpu_power_w,
        "gpu_celsius": seen.gpu_celsius,
    }
    return {
        "cpu": round(seen.cpu_share, 3),
        "memory": seen.memory_size_bytes - seen.memory_free_bytes,
        "memory_of": seen.memory_size_bytes,
        "worker": seen.worker_bytes,
        "ago_s": round(max(0.0, now_s - told_at_s)),
        **(gpus if seen.n_gpus else {}),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    """`coordinates`: by axis with more than one rank, of each rank in order. `copies_to`: of each
    rank, those that keep a replica of its shard. `stages`: blocks by place on the pp axis."""
    layout = plan.layout
    return {
        "generation": plan.generation,
        "layout": str(layout),
        "axes": {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1},
        "coordinates": _coordinates(plan),
        "dp": layout.dp,
        "samples": list(plan.samples),
        "n_microbatches": plan.n_microbatches,
        "copies_to": [list(holders) for holders in plan.copies_to],
        "replica_every": plan.peer_every,
        "checkpoint_every": plan.durable_every,
        "stages": [
            [[sum(plan.layers[:s]), plan.layers[s]] for s in stages_at(layout, p)
             if s < len(plan.layers)]
            for p in range(layout.pp)
        ],
    }  # fmt: skip


def _coordinates(plan: Plan) -> dict[str, list[int]]:
    """tp varies fastest, pp slowest (elastic/types/grid.py)."""
    layout, found, inner = plan.layout, dict[str, list[int]](), 1
    for axis in reversed(AXES):
        size = getattr(layout, axis)
        if size > 1:
            found[axis] = [rank // inner % size for rank in range(len(plan.ranks))]
        inner *= size
    return found


def _copies(view: View) -> dict[str, Any]:
    state = view.state
    return {
        "replica": (
            {"step": state.peer.step, "generation": state.peer.generation}
            if state.peer is not None
            else None
        ),
        "checkpoints": [
            {
                "step": copy.step,
                "generation": copy.generation,
                "layout": str(copy.layout),
                "n_bytes": copy.n_bytes,
                "uri": copy.uri,
                "verified": copy.uri in state.verified,
            }
            for copy in state.durable[:MOST_COPIES]
        ],
        "damaged": [{"uri": uri, "reason": why} for uri, why in state.damaged.items()],
        "failed": view.copies_failed,
        "skipped": view.copies_skipped,
    }
