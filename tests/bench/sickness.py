"""What befalls a rank, and how soon the right one is named: it stalls while its process answers
(stall), its process is stopped (hang), it computes ten times slower (slow), it silently corrupts
its results (corrupt); on each of several ranks, rank 0 too.

Whole runs on the embedded cluster, four nodes of one worker, plainly sharded, results compared
every few steps. Seconds are from the drill to the first decision that names the node; after it the
run must continue, with or without the node.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from report import finish, options
from trial import Clock, Failed, Trial, running
from unequal import job

from elastic.ledger.journal import Line
from elastic.types import Abort, DrillAsked, Quarantine, SetShares

PARTS = ("stall", "hang", "slow", "corrupt")
MOST_S = 1500.0
OPTIONS: dict[str, dict[str, Any]] = {"slow": {"factor": 10.0, "unit_s": 0.005}}


@dataclass(frozen=True)
class Size:
    """`at_step`: when the drill comes; `after`: steps that must follow the decision; `check`: from
    one comparison of results to the next."""

    nodes: int
    ranks: tuple[int, ...]
    at_step: int
    after: int
    check: int


WHOLE, SMOKE = Size(4, (0, 1, 3), 24, 10, 8), Size(3, (1,), 10, 3, 4)
ORDERS = (Abort, Quarantine, SetShares)


def named(lines: Sequence[Line]) -> tuple[str, float, Line | None]:
    """The node that the drill has befallen, when, and the first decision since that names a node in
    an order or its reason."""
    for i, line in enumerate(lines):
        for at_s, event in line.events:
            if isinstance(event, DrillAsked) and (
                names := next((event.drill[k] for k in PARTS if k in event.drill), None)
            ):
                later = (
                    one
                    for one in lines[i:]
                    if one.decision and any(isinstance(a, ORDERS) for a in one.decision.actions)
                )
                return names[0], at_s, next(later, None)
    return "", 0.0, None


def one(clock: Clock, kind: str, rank: int, size: Size) -> dict[str, Any]:
    drill = [{"at_step": size.at_step, kind: f"rank:{rank}", **OPTIONS.get(kind, {})}]
    if kind == "slow":  # the others take a known time for their work too
        drill += [
            {"at_step": 1, kind: f"rank:{r}", "factor": 1.0, "unit_s": 0.005}
            for r in range(size.nodes)
        ]
    kept = {"peer_every": 4, "durable_every": size.check, "check_numbers_every": size.check}
    with running(
        job(size.nodes, 4 * size.nodes, drill, layout="auto", min_workers=2, **kept), clock
    ) as trial:

        def last() -> tuple[str, float, Line | None]:
            return _last(trial, size.at_step)

        trial.until(
            lambda: bool(trial.steps) and last()[2] is not None,
            f"{kind} of rank {rank}: a decision",
        )
        node, at_s, line = last()
        assert line is not None and line.decision is not None
        before = max(step for _, step, _ in trial.steps)
        trial.until(
            lambda: trial.steps[-1][1] >= before + size.after, f"{kind} of rank {rank}: more steps"
        )
        generation_s = next((s for _, _, s in trial.steps if s > line.at_s), line.at_s)
    if node not in line.decision.reason:
        raise Failed(
            f"{kind} of rank {rank} ({node}): the decision names another: {line.decision.reason}"
        )
    return {
        "named_s": round(line.at_s - at_s, 2),
        "next_step_s": round(generation_s - at_s, 2),
        "why": line.decision.reason,
    }


def _last(trial: Trial, at_step: int) -> tuple[str, float, Line | None]:
    lines = trial.lines()
    drills = [
        (i, event.drill)
        for i, line in enumerate(lines)
        for _, event in line.events
        if isinstance(event, DrillAsked)
    ]
    begins = [i for i, drill in drills if drill.get("at_step") == at_step]
    return named(lines[begins[-1] :]) if begins else ("", 0.0, None)


def measure(parts: Sequence[str], clock: Clock, size: Size) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in parts:
        each = {rank: one(clock, kind, rank, size) for rank in size.ranks}
        found[kind] = {str(rank): what for rank, what in each.items()}
        found[f"{kind}_named_s"] = round(median(what["named_s"] for what in each.values()), 2)
    return found


def main() -> int:
    given = options(__doc__, MOST_S, parts=PARTS, smoke_parts=("hang",))
    return finish(
        "sickness",
        given,
        lambda clock: measure(given.parts, clock, SMOKE if given.smoke else WHOLE),
    )


if __name__ == "__main__":
    sys.exit(main())
