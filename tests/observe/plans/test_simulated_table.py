"""The table of a simulation, and its line in a plan."""

from __future__ import annotations

from typing import Any

from elastic.observe.plans.simulated import one_line, table


def of(usd: float) -> dict[str, float]:
    return {"median": usd, "p5": usd, "p95": usd}


def policy(usd: float | None, missed: int = 0, spent: int = 0) -> dict[str, Any]:
    return {
        "cost_usd": None if usd is None else of(usd), "cost_vs_bound": None,
        "cost_vs_on_demand": None if usd is None else of(usd / 4), "wall_h": of(0.5),
        "goodput": of(0.9), "deadline_misses": missed, "budget_ends": spent,
    }  # fmt: skip


def data(**policies: dict[str, Any]) -> dict[str, Any]:
    return {
        "traces": {}, "deadline_h": None, "budget_usd": 20.0, "job": "tiny", "steps": 3,
        "ideal_h": 0.5, "nodes": 2, "starts": 12, "fit": None, "notes": [], "policies": policies,
    }  # fmt: skip


def test_what_is_not_known_is_a_dash() -> None:
    """Many nodes have no bound."""
    lines = table(data(elastic=policy(1.0), bound=policy(None)))
    own, bound = (next(line for line in lines if line.startswith(n)) for n in ("elastic", "bound"))
    assert "$1.00" in own and "25%" in own
    assert bound.split() == ["bound", "-", "-", "-", "-", "-", "-"]


def test_a_line_says_what_ends_the_starts_that_are_not_done() -> None:
    def said(missed: int, spent: int, deadline_h: float | None, usd: float | None = 4.0) -> str:
        plain = data(elastic=policy(1.0, missed, spent), **{"on-demand": policy(usd)})
        return one_line(plain | {"deadline_h": deadline_h}).partition(", on demand ")[2]

    at_budget = "12 of 12 starts end at the budget of $20.00 before the job is done"
    assert said(0, 0, None) == "$4.00" and said(0, 0, None, None) == "-"
    assert said(12, 12, None) == f"$4.00, {at_budget}"
    assert said(3, 0, 5.0) == "$4.00, 3 of 12 starts miss the deadline"
    assert said(3, 0, None) == "$4.00, 3 of 12 starts are given up before the job is done"
    assert said(12, 1, 5.0).endswith("is done, 11 of 12 starts miss the deadline")
