"""The table of a simulation."""

from __future__ import annotations

from math import nan
from typing import Any

from elastic.observe.plans.simulated import table


def test_what_is_not_known_is_a_dash() -> None:
    """A run that is shorter than a tick of its trace has no bound."""

    def of(usd: float) -> dict[str, float]:
        return {"median": usd, "p5": usd, "p95": usd}

    def policy(usd: float) -> dict[str, Any]:
        return {
            "cost_usd": of(usd), "cost_vs_on_demand": of(usd / 4), "cost_vs_bound": None,
            "wall_h": of(0.5), "goodput": of(0.9), "deadline_misses": 0,
        }  # fmt: skip

    data = {
        "traces": {}, "deadline_h": None, "job": "tiny", "steps": 3, "ideal_h": 0.5, "nodes": 2,
        "starts": 4, "fit": None, "notes": [],
        "policies": {"elastic": policy(1.0), "bound": policy(nan)},
    }  # fmt: skip
    lines = table(data)
    own, bound = (next(line for line in lines if line.startswith(n)) for n in ("elastic", "bound"))
    assert "$1.00" in own and "25%" in own
    assert bound.split() == ["bound", "-", "-", "-", "-", "-", "-"]
