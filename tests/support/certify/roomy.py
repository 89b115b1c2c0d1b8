"""What is wrong with a check of a real run, on a machine that may be slow or stall for ten
seconds."""

from __future__ import annotations

from dataclasses import replace

from elastic.scenarios.check import Check

# times the bound; 0 stays 0
ROOM = {"freed_s": 15.0, "pause_vs_start": 15.0, "pause_vs_cold_start": 15.0, "steps_lost": 4.0}


def wrong(check: Check) -> str:
    """'' = it has passed, or failed for nothing but figures of time within ROOM: the breaks that
    these are for take a minute (the group's own timeout) or lose every step."""
    if check.verdict == "pass":
        return ""
    if check.verdict != "fail" or not check.bounds:
        return f"{check.name}: {check.verdict}: {check.why}"
    wide = [
        replace(b, most=b.most * ROOM.get(b.figure, 1.0)) if b.most is not None else b
        for b in check.bounds
    ]
    broken = [text for text in (bound.broken_by(check.figures) for bound in wide) if text]
    return f"{check.name}: {'; '.join(broken)}: {check.why}" if broken else ""
