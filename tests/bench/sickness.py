"""What befalls a rank, and how soon the right one is named: it stands still while its process answers (stall), its process is
stopped (hang), it computes ten times slower (slow), it computes wrong numbers (corrupt); on each of several ranks, rank 0 too.

Whole runs on the embedded cluster, four nodes of one worker, plainly sharded, results compared every CHECK steps. Seconds are
from the drill to the first decision that names the node; after it the run must go on, with or without the node.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from report import finish, options
from trial import Clock, Failed, Trial
from unequal import job

from elastic.ledger.journal import Line
from elastic.types import Abort, DrillAsked, Quarantine, SetShares

PARTS = ("stall", "hang", "slow", "corrupt")
RANKS = (0, 1, 3)
MOST_S = 1500.0
AT_STEP, AFTER, CHECK = 24, 10, 8  # steps
OPTIONS: dict[str, dict[str, Any]] = {"slow": {"factor": 10.0, "unit_s": 0.005}}
ORDERS = (Abort, Quarantine, SetShares)


def named(lines: Sequence[Line]) -> tuple[str, float, Line | None]:
    """The node that the drill has befallen, when, and the first decision since that names a node in an order or its reason."""
    for i, line in enumerate(lines):
        for at_s, event in line.events:
            if isinstance(event, DrillAsked) and (names := next((event.drill[k] for k in PARTS if k in event.drill), None)):
                later = (one for one in lines[i:] if one.decision and any(isinstance(a, ORDERS) for a in one.decision.actions))
                return names[0], at_s, next(later, None)
    return "", 0.0, None


def one(clock: Clock, kind: str, rank: int) -> dict[str, Any]:
    drill = [{"at_step": AT_STEP, kind: f"rank:{rank}", **OPTIONS.get(kind, {})}]
    if kind == "slow":  # the others take a known time for their work too
        drill += [{"at_step": 1, kind: f"rank:{r}", "factor": 1.0, "unit_s": 0.005} for r in range(4)]
    what = job(4, 16, drill, check_numbers_every=CHECK, peer_every=4, durable_every=CHECK, layout="auto", min_workers=2)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), what, clock)
        trial.start()
        try:
            trial.until(lambda: bool(trial.steps) and _last(trial)[2] is not None, f"{kind} of rank {rank}: a decision")
            node, at_s, line = _last(trial)
            assert line is not None and line.decision is not None
            before = max(step for _, step, _ in trial.steps)
            trial.until(lambda: trial.steps[-1][1] >= before + AFTER, f"{kind} of rank {rank}: more steps")
            generation_s = next((s for _, _, s in trial.steps if s > line.at_s), line.at_s)
        finally:
            trial.end()
    if node not in line.decision.reason:
        raise Failed(f"{kind} of rank {rank} ({node}): the decision names another: {line.decision.reason}")
    return {"named_s": round(line.at_s - at_s, 2), "next_step_s": round(generation_s - at_s, 2), "why": line.decision.reason}


def _last(trial: Trial) -> tuple[str, float, Line | None]:
    lines = trial.lines()
    drills = [(i, event.drill) for i, line in enumerate(lines) for _, event in line.events if isinstance(event, DrillAsked)]
    begins = [i for i, drill in drills if drill.get("at_step") == AT_STEP]
    return named(lines[begins[-1] :]) if begins else ("", 0.0, None)


def measure(parts: Sequence[str], clock: Clock) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in parts:
        each = {rank: one(clock, kind, rank) for rank in RANKS}
        found[kind] = {str(rank): what for rank, what in each.items()}
        found[f"{kind}_named_s"] = round(median(what["named_s"] for what in each.values()), 2)
    return found


def main() -> int:
    given = options(__doc__, MOST_S, parts=PARTS)
    return finish("sickness", given, lambda clock: measure(given.parts, clock))


if __name__ == "__main__":
    sys.exit(main())
