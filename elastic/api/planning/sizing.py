"""capacity(): how many nodes of each kind train so many tokens in so much time, and what that
costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from elastic.api.planning.plan_nodes import MachineGroup
from elastic.api.planning.query import MOST_GPUS, Query, notes_of, row_of
from elastic.errors import SpecError
from elastic.text import count, hours

MOST_NEAR = 6  # round numbers of nodes that are tried below the one that was found


def capacity(query: Query, kinds: Sequence[MachineGroup]) -> dict[str, Any]:
    """The fewest nodes of each kind that make it. Raises SpecError where no kind does."""
    rows = [fewest_nodes(query, machines) for machines in kinds]
    made = [row for row in rows if row["makes_it"]]
    if not made:
        raise SpecError(_impossible(query, rows))
    priced = [row for row in made if row["usd"]]
    cheapest = min(priced, key=lambda row: row["usd"], default=None)
    for row in rows:
        row["cheapest"] = row is cheapest
    notes = [note for machines in kinds for note in notes_of(query.subject, [machines])]
    pools = [machines.with_nodes(1).plain() for machines in kinds]
    notes = list(dict.fromkeys(notes))
    return {**query.plain_of_all(), "kinds": rows, "pools": pools, "notes": notes}


def fewest_nodes(query: Query, machines: MachineGroup) -> dict[str, Any]:
    """Doubled until it is fast enough, then bisected; then the numbers just below that: some divide
    better than others."""
    per_node, most = machines.group.gpus_per_node, max(1, MOST_GPUS // machines.group.gpus_per_node)
    alone = replace(query, aim=replace(query.aim, purpose="fastest", n_best=1))
    name = machines.group.hardware.accelerator_type
    tried: dict[int, dict[str, Any]] = {}

    def row(n: int) -> dict[str, Any]:
        if n not in tried:
            tried[n] = row_of(name, [machines.with_nodes(n)], alone)
        return tried[n]

    def enough(n: int) -> bool:
        return row(n)["layout"] is not None and row(n)["in_time"]

    n = first = _start(query, machines, most)
    while n < most and not enough(n) and not _flat(tried, n):
        n = min(most, 2 * n)
    if enough(n):
        n = _fewest(first // 2 if n == first else n // 2, n, enough)
        n = next(
            (fewer for fewer in _near(n, row(n)["hours"] / query.aim.deadline_h) if enough(fewer)),
            n,
        )
    else:
        n = min(tried, key=lambda n: tried[n]["hours"] or float("inf"))
    kind = {
        "kind": name,
        "instance_type": machines.instance_type,
        "n_nodes": n,
        "market_type": machines.group.market_type,
    }
    return {
        **kind,
        "usd_per_gpu_h": machines.group.usd_per_node_h / per_node,
        "makes_it": enough(n),
        **row(n),
    }


def _near(n: int, share: float) -> list[int]:
    """The roundest numbers of nodes below `n` that could still do, the fewest first; `share`: of
    the time that `n` takes."""
    could = range(max(1, ceil(n * share * 0.97)), n)
    return sorted(sorted(could, key=lambda m: (-(m & -m), m))[:MOST_NEAR])


def _start(query: Query, machines: MachineGroup, most: int) -> int:
    """Nodes below which even the peak would not do."""
    gpu, sample = machines.group.hardware, query.subject.model.sample
    flop = (sample.flop if sample else 0.0) / query.subject.sample_tokens * query.aim.tokens
    peak = gpu.peak(query.subject.job.precision) * machines.group.gpus_per_node
    return min(most, max(1, int(flop / peak / (query.aim.deadline_h * 3600))))


def _flat(tried: dict[int, dict[str, Any]], n: int) -> bool:
    """Twice as many nodes have not made it any faster: the batch gives them nothing to do."""
    now, before = tried[n], tried.get(n // 2)
    return bool(
        before and before["hours"] and now["hours"] and now["hours"] > 0.98 * before["hours"]
    )


def _fewest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """`high` is enough, `low` is not."""
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _impossible(query: Query, rows: Sequence[dict[str, Any]]) -> str:
    told = [
        f"{row['n_gpus']:,} x {row['kind']} take {hours(row['hours'])}"
        if row["hours"]
        else f"{row['kind']}: {row['why_not']}"
        for row in rows
    ]
    return (
        f"{count(query.all_tokens)} tokens within "
        f"{hours(query.aim.deadline_h)} exclude each other at a step of "
        f"{query.subject.step_tokens:,} tokens: {'; '.join(told)}; take more time, fewer tokens "
        "or a larger --batch"
    )
