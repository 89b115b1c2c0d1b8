"""From figures to a verdict: what is much worse than what is stored, and what cannot be a figure at
all. No clock, no process.

A baseline is {"value", "times"} (a ratio that may grow by that factor), {"most"} or {"least"} (a
promise). "parts": it counts where one of these was measured. "exact": no noise touches it, so that
it is held in the smoke size too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from math import inf, isfinite
from typing import Any

Baselines = Mapping[str, Mapping[str, Any]]
# differences of two measurements and how one grows with another, which may come out below zero:
# everything else is counted or timed
SIGNED = (
    "*excess_*", "*pause_over_bare_*", "bare_shrink_s", "bare_grow_s", "spread.bare_*",
    "phases_s.*.rest", "phases_s.*.ordinary_step", "sizes.*.intercept_s", "sizes.*.slope_s_per_gb",
    "*between_steps", "*.watchers_cpu_*", "*_exponent",
)  # fmt: skip


def counted(baselines: Baselines, parts: Collection[str] = (), smoke: bool = False) -> Baselines:
    """Those of the parts that were asked for. In the smoke size ratios are noise: those figures
    must be there, and no more."""
    own = {
        name: stored
        for name, stored in baselines.items()
        if not parts or {*stored.get("parts", parts)} & {*parts}
    }
    return {
        name: _there(name, stored) if smoke and not stored.get("exact") else stored
        for name, stored in own.items()
    }


def _there(name: str, stored: Mapping[str, Any]) -> dict[str, float]:
    if _signed(name):
        return {"least": -inf}
    return {"above": 0} if "least" in stored else {"least": 0}


def worse(figures: Mapping[str, Any], baselines: Baselines) -> list[str]:
    """What is much worse than the baselines, a sentence each; a figure that is missing is worse
    too."""
    found = []
    for name, stored in baselines.items():
        value = figures.get(name)
        if value is None:
            found.append(f"{name} was not measured")
        elif "above" in stored:
            if not value > stored["above"]:
                found.append(f"{name} is {value}, not above {stored['above']:g}")
        elif "least" in stored:
            if not value >= stored["least"]:
                found.append(f"{name} is {value}, less than {stored['least']:g} (promised)")
        else:
            most = stored["most"] if "most" in stored else stored["value"] * stored["times"]
            if not value <= most:
                why = (
                    "promised"
                    if "most" in stored
                    else f"stored is {stored['value']}, allowed {stored['times']} times that"
                )
                found.append(f"{name} is {value}, more than {most:g} ({why})")
    return found


def unsound(figures: Mapping[str, Any]) -> list[str]:
    """Numbers that nobody can have measured, a sentence each: not finite, or below zero though
    counted or timed."""
    found = []
    for path, value in numbers(figures):
        if not isfinite(value):
            found.append(f"{path} is {value}")
        elif value < 0 and not _signed(path):
            found.append(f"{path} is {value}, below 0")
    return found


def numbers(figures: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers with where they stand, such as `spread.pause_loss_s.min`; those of a list by
    their place in it."""
    if isinstance(figures, Mapping | list | tuple):
        pairs = figures.items() if isinstance(figures, Mapping) else enumerate(figures)
        for name, value in pairs:
            yield from numbers(value, f"{path}.{name}" if path else str(name))
    elif isinstance(figures, int | float) and not isinstance(figures, bool):
        yield path, figures


def _signed(path: str) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in SIGNED)
