"""Which rank the others wait for, by how many collectives each has begun in its groups. Pure:
numbers in, names out.

Ranks do the same collectives of a group in the same order. One that does not come any more has
begun fewer than the others in some group, and nowhere more: the others come as far as they can
without it. Whoever waits for one of those has begun more than another in that group. Only stages of
a pipeline, which send messages to each other, may be behind in one group while they wait in another
whose numbers say nothing: they are told apart by what they do. Where all have
come to all collectives, a GPU may hang: it stands in work of its own, and those that wait for it in
what they do with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from elastic.text import n_of
from elastic.types import WorkerId
from elastic.user_frames import BACKWARD
from elastic.worker.process.doing import DEVICE, PATIENT, Doing, InCollective

Arrived = tuple[tuple[str, int, int], ...]
MESSAGES = "pp"  # between stages
SHARD_AXES = ("dp_shard", "dp_shard x cp", "cp", "tp")  # of one replica, within a stage


@dataclass(frozen=True)
class RankSite:
    """Where a rank stands."""

    arrived: Arrived = ()
    doing: Doing = ""
    where: str = ""
    collective: InCollective | None = None


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
        # a stage in the middle has more messages than the others
        if axis.startswith(DEVICE) or (axis == MESSAGES and len(counts) > 2):
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


def unlike_collectives(ranks: Sequence[RankSite], staged: bool) -> tuple[bool, str]:
    """Of ranks that all wait in collectives: whether these are surely not the same ones, and in
    which words; '' = they may be.

    Ranks that are in the same groups begin the collectives of all of them in one order, so that
    none can be ahead of another in one group and behind it in a second; and what is the fifth of a
    group for one is the fifth for all. That holds whatever a network loses. One that waits has come
    to what the others wait for, unless that is another collective; and where all have begun as many
    they are at one place: but for stages of a pipeline (`staged`), which are at places of their
    own, and send each other messages in orders of their own. Those of the shards of one stage have
    one order, since they have equally many microbatches (see each_microbatches)."""
    groups: dict[tuple[str, int], dict[int, int]] = {}
    messages: dict[int, int] = {}  # of stages
    for rank, at in enumerate(ranks):
        for axis, first, n in at.arrived:
            if axis == DEVICE + "own":
                return False, ""  # its GPU does work of its own, or hangs in it
            if staged and axis == MESSAGES:
                messages[rank] = n
            elif not axis.startswith(DEVICE):
                groups.setdefault((axis, first), {})[rank] = n
    if odd := _odd_kinds(groups, ranks):
        return True, odd
    in_step = [group for group in groups.items() if group[0][0] in SHARD_AXES]
    with_messages = [(group, ((MESSAGES, 0), messages)) for group in in_step]
    for ((axis, _), mine), ((other, _), theirs) in (
        *combinations(groups.items(), 2),
        *with_messages,
    ):
        if crossed := _crossed(mine, theirs):
            ahead, behind = crossed
            return True, (
                f"rank {ahead} has begun {n_of(mine[ahead], 'collective')} of {axis} and "
                f"{theirs[ahead]} of {other}, rank {behind} {mine[behind]} and {theirs[behind]}"
            )
    places = {at.where if ", line " in at.where or BACKWARD in at.where else "" for at in ranks}
    uneven = any(len(set(counts.values())) > 1 for counts in groups.values())
    if not staged and (len(places) > 1 or uneven):  # or a network may have lost something
        return False, "all ranks wait in collectives that are not the same ones"
    return False, ""


def _odd_kinds(
    groups: Mapping[tuple[str, int], Mapping[int, int]], ranks: Sequence[RankSite]
) -> str:
    """Two ranks of a group that have begun as many of its collectives, and wait in this last one,
    which is of one kind on the first and of another on the second; '' = there are none."""
    for (axis, first), counts in groups.items():
        seen: dict[int, tuple[int, str]] = {}
        for rank, n in counts.items():
            at = ranks[rank].collective
            if at is None or (at.axis, at.first) != (axis, first):
                continue
            one, kind = seen.setdefault(n, (rank, at.kind))
            if kind != at.kind:
                return (
                    f"collective {n} of {axis} is {kind} on rank {one} and {at.kind} on rank {rank}"
                )
    return ""


def _crossed(mine: Mapping[int, int], theirs: Mapping[int, int]) -> tuple[int, int] | None:
    """Two ranks of which the first is ahead in one group and behind in the other."""
    both = sorted((mine[rank], theirs[rank], rank) for rank in mine.keys() & theirs.keys())
    most = both[0] if both else (0, 0, 0)
    for one in both:
        if one[0] > most[0] and one[1] < most[1]:
            return one[2], most[2]
        most = max(most, one, key=lambda found: found[1])
    return None


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
