"""The small run on nodes that have prices; and a long one, a change a day for a month."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.observe.small_run import lines, plan, tick

from elastic.ledger.journal import Line
from elastic.types import (
    DriverStarted,
    EnterPlan,
    Layout,
    Node,
    NodeLost,
    NodeReady,
    PlanEntered,
    Pool,
    Resume,
    StepDone,
)

PAID = (
    Pool("spot", gpus_per_node=2, market_type="spot", max_nodes=2, usd_per_node_h=36.0),
    Pool("on-demand", gpus_per_node=2, market_type="on-demand", usd_per_node_h=72.0),
)


def priced(found: list[Line] | None = None, pools: tuple[Pool, ...] = PAID) -> list[Line]:
    """The small run, on nodes that cost something."""
    return changed(found or lines(), lambda e: replace(e, pools=pools)
                   if isinstance(e, DriverStarted) else e)  # fmt: skip


def changed(found: list[Line], change: Any) -> list[Line]:
    return [
        replace(one, events=tuple((at_s, change(event)) for at_s, event in one.events))
        for one in found
    ]


def long_run() -> list[Line]:
    """Thirty growths and losses in thirty days of made-up time."""

    found, at_s = priced()[:5], 10.0
    for k in range(2, 32):
        at_s, cause = 86400.0 * (k - 1), "loss" if k % 2 else "growth"
        event = NodeLost("b", "gone") if k % 2 else NodeReady(Node("b", "spot", 2))
        names = ("a", "c") if k % 2 else ("a", "b", "c")
        source = Resume("peer" if k % 2 else "live", k - 1)
        made = plan(k, names, Layout(dp_shard=2 * len(names)), cause=cause, resume=source)
        found += [
            tick(at_s, event, actions=(EnterPlan(made),), reason="so"),
            tick(at_s + 5, PlanEntered(k, k - 1)),
            tick(at_s + 6, StepDone(k, k, 4.0, 1024, 0.5)),
        ]
    return found
