"""Which rank the others wait for, by how many collectives each has begun in its groups. Pure:
numbers in, names out.

Ranks do the same collectives of a group in the same order. One that does not come any more has
begun fewer than the others in some group, and nowhere more: the others come as far as they can
without it. Whoever waits for one of those has begun more than another in that group. Only stages of
a pipeline, which send messages to each other, may be behind in one group while they wait in another
whose numbers say nothing (see Groups.arrived): they are told apart by what they do. Where all have
come to all collectives, a GPU may hang: it stands in work of its own, and those that wait for it in
what they do with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic.types import WorkerId
from elastic.worker.process.doing import DEVICE, PATIENT, Doing

Arrived = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class RankSite:
    """Where a rank stands."""

    arrived: Arrived = ()
    doing: Doing = ""
    where: str = ""


def absent_ranks(ranks: Mapping[WorkerId, RankSite], staged: bool) -> dict[WorkerId, str]:
    """The ranks that all others wait for, each with why; {} = that cannot be told. `staged`: they
    are stages of a pipeline."""
    groups: dict[tuple[str, int], dict[WorkerId, int]] = {}
    for worker, at in ranks.items():
        for axis, first, n in at.arrived:
            groups.setdefault((axis, first), {})[worker] = n
    behind: dict[WorkerId, str] = {}
    waiting: set[WorkerId] = set()
    for (axis, _), counts in groups.items():
        if axis.startswith(DEVICE):
            continue
        least = min(counts.values())
        there = [worker for worker, n in counts.items() if n > least]
        waiting.update(there)
        for worker, n in counts.items():
            if there and n == least:
                behind.setdefault(
                    worker,
                    f"has not come to collective {least + 1} of {axis}; {len(there)} other "
                    f"rank{'s wait' if len(there) > 1 else ' waits'} there",
                )
    found = {worker: why for worker, why in behind.items() if worker not in waiting}
    if staged:
        found = {worker: why for worker, why in found.items() if ranks[worker].doing != "others"}
        if not found and all(at.doing for at in ranks.values()):
            others = [worker for worker, at in ranks.items() if at.doing in ("others", "device")]
            wait = (
                f"{len(others)} other rank{'s wait' if len(others) > 1 else ' waits'} for a "
                "message or a collective"
            )
            odd = [worker for worker in ranks if others and worker not in others]
            found = dict.fromkeys(odd, f"is in no collective; {wait}")
    found = found or _hangs(ranks)
    many = 2 * len(found) > len(ranks) or (
        len(found) > 1 and all(ranks[worker].doing in PATIENT for worker in found)
    )
    return {} if many else {worker: why + _at(ranks[worker]) for worker, why in found.items()}


def _hangs(ranks: Mapping[WorkerId, RankSite]) -> dict[WorkerId, str]:
    """The one whose GPU stands in work of its own, where those of all others wait. Of two nobody
    knows; with tp or cp a block's own work has collectives too, so there it must also have done
    less than those that compute the same samples with it."""
    parts = {
        worker: (axis, first, n)
        for worker, at in ranks.items()
        for axis, first, n in at.arrived
        if axis.startswith(DEVICE)
    }
    own = [worker for worker, (axis, _, _) in parts.items() if axis == DEVICE + "own"]
    waiting = [
        worker
        for worker, at in ranks.items()
        if worker not in own and _waits(at, parts[worker][0] if worker in parts else "")
    ]
    if not own or len(waiting) + 1 < len(ranks):
        return {}
    (worker,) = own
    _, first, n = parts[worker]
    if any(of == first and done <= n for other, (_, of, done) in parts.items() if other != worker):
        return {}
    others = (
        "that of the other rank waits"
        if len(waiting) == 1
        else f"those of the {len(waiting)} other ranks wait"
    )
    return {
        worker: f"has a GPU that stands in part {n + 1} of its work, which is its own; {others}"
    }


def _waits(at: RankSite, axis: str) -> bool:
    """Does its GPU, which stands at `axis` ('' = nowhere), wait for others, or has done all that
    its host has given it, while that waits for other hosts?"""
    return axis == DEVICE + "others" or (axis == DEVICE + "done" and at.doing == "others")


def _at(at: RankSite) -> str:
    where = f" ({at.where})" if at.where else ""
    if at.doing in PATIENT:
        return f"; it {PATIENT[at.doing]}{where}"
    return f"; it stands at {at.where}" if at.where else ""
