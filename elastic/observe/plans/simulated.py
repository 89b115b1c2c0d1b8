"""What a simulation found: a table for a person, one line for a plan, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.observe.reporting.pictures import blank, saved
from elastic.observe.run_tables import columns
from elastic.text import hours, n_of, usd

COLUMNS = ("policy", "dollars", "vs on demand", "vs bound", "days", "misses", "goodput")
BOUND = "bound"  # the least that was possible: no policy, and it takes no time of its own


def table(data: Mapping[str, Any]) -> list[str]:
    """Medians, and from the 5th to the 95th percentile behind dollars and days."""
    traces = ", ".join(
        f"{pool}: {one['name']}, {one['share']:.0%} there on average, {one['days']:.1f} days"
        for pool, one in data["traces"].items()
    )
    until = f", deadline {data['deadline_h']:g} h" if data["deadline_h"] else ""
    lines = [
        f"{data['job']}: {data['steps']:,} steps, {hours(data['ideal_h'])} on "
        f"{n_of(data['nodes'], 'node')}{until}",
        f"{n_of(data['starts'], 'start')} over {traces}",
        "",
    ]
    rows = [COLUMNS, *(_row(name, one) for name, one in data["policies"].items())]
    lines += columns(rows, right=range(1, len(COLUMNS)))
    if data["fit"]:
        fit = data["fit"]
        lines += [
            "",
            f"fit: {fit['share_made']:.0%} there on average, of the trace {fit['share']:.0%}; "
            f"{fit['changes_per_day_made']:.1f} changes a day, of the trace "
            f"{fit['changes_per_day']:.1f}",
        ]
    return [*lines, "", *data["notes"]]


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    days = "-" if name == BOUND else _between(one["wall_h"], hours)
    paid, bound = one["cost_vs_on_demand"], one["cost_vs_bound"]
    return (
        name, _between(one["cost_usd"], usd), f"{paid['median']:.0%}" if paid else "-",
        f"{bound['median']:.2f}x" if bound else "-", days,
        "-" if name == BOUND else str(one["deadline_misses"]),
        "-" if name == BOUND else f"{one['goodput']['median']:.2f}",
    )  # fmt: skip


def _between(spread: Mapping[str, float] | None, shown: Any) -> str:
    """`-`: not known, as the bound of many nodes."""
    if spread is None:
        return "-"
    return f"{shown(spread['median'])} ({shown(spread['p5'])} to {shown(spread['p95'])})"


def one_line(data: Mapping[str, Any]) -> str:
    """For a plan."""
    own, paid = data["policies"]["elastic"], data["policies"]["on-demand"]["cost_usd"]
    wall_h, cost = own["wall_h"], own["cost_usd"]
    return (
        f"on these traces: {hours(wall_h['median'])} (p95 {hours(wall_h['p95'])}), "
        f"{usd(cost['median'])} (p95 {usd(cost['p95'])}), on demand "
        f"{usd(paid['median']) if paid else '-'}{''.join(_not_done(data, own))}"
    )


def _not_done(data: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Which starts do not end with the job done, by what ends them."""
    spent, of = own["budget_ends"], f"of {data['starts']} starts"
    if spent:
        budget = usd(data["budget_usd"])
        yield f", {spent} {of} end at the budget of {budget} before the job is done"
    if late := own["deadline_misses"] - spent:
        why = "miss the deadline" if data["deadline_h"] else "are given up before the job is done"
        yield f", {late} {of} {why}"


def save(history: Sequence[Any], data: Mapping[str, Any], path: str | Path) -> Path:
    """One run: nodes by pool that are paid for, those that train, progress. `history`: Moments of
    sim.markets.market_run. Returns the file."""
    figure, (nodes, progress) = blank(11, 6.5, 2, sharex=True, height_ratios=(2, 1))
    at_h = [moment.at_s / 3600 for moment in history]
    pools = list(dict.fromkeys(pool for moment in history for pool in moment.nodes))
    rows = [[moment.nodes.get(pool, 0) for moment in history] for pool in pools]
    if rows:
        nodes.stackplot(at_h, rows, labels=pools, step="post", alpha=0.55)
    used = [moment.used for moment in history]
    look = {"color": "#1c2833", "linewidth": 1.2, "label": "GPUs that train"}
    nodes.step(at_h, used, where="post", **look)
    nodes.set_ylabel("nodes paid for, GPUs that train")
    nodes.legend(loc="upper right", fontsize=8)
    progress.plot(at_h, [moment.step for moment in history], color="#2471a3")
    if data["deadline_h"]:
        progress.axvline(data["deadline_h"], color="#c0392b", linewidth=1, label="deadline")
        progress.legend(loc="upper left", fontsize=8)
    progress.set_ylabel("optimizer steps")
    progress.set_xlabel("hours")
    figure.suptitle(f"{data['job']}, one simulated run", x=0.01, ha="left", fontsize=11)
    return saved(figure, path)
