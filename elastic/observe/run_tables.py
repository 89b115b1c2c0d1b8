"""A view as plain text: what `elastic ls`, `status` and `why` print."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.observe import node_speeds
from elastic.observe.accounting.launch_times import sentence
from elastic.observe.plans.layout_drawing import draw, letters
from elastic.observe.run_view import View
from elastic.text import duration, n_of, size
from elastic.types import Pool
from elastic.types.typed_job import orphans_paid_s

ALL_OF_IT = 0.95  # of a budget


@dataclass(frozen=True)
class Row:
    """A run in `elastic ls`. `holder`: the driver that runs it now, '' = none; `folder`: what it is
    called where no line of its journal says that."""

    view: View
    holder: str = ""
    age_s: float = 0.0  # since the newest journal line
    folder: str = ""

    def plain(self) -> dict[str, Any]:
        view = self.view
        return {
            "run": view.state.run or self.folder,
            "phase": phase(view, bool(self.holder)),
            "step": view.step,
            "steps": view.steps,
            "train_loss": loss(view),
            "holder": self.holder,
            "age_s": round(self.age_s, 1),
        }


def columns(rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns; nothing is cut off. `right`: columns that are aligned to
    the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts)]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def checkpoint(item: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of `elastic checkpoint ls`."""
    age = "-" if item["age_s"] is None else duration(item["age_s"])
    committed = "yes" if item["committed"] else "no"
    ranks = str(item["world_size"]) if item["committed"] else "-"
    layout, loss = item["layout"] or "-", item["validation_loss"]
    return (
        str(item["step"]),
        str(item["generation"]),
        committed,
        layout,
        ranks,
        size(item["n_bytes"]),
        "-" if loss is None else f"{loss:.4f}{' best' if item['best'] else ''}",
        age,
        item["uri"],
    )


MACHINES = ("INSTANCE", "NODE", "NODE TYPE", "TYPE", "MARKET", "STATE", "ZONE", "SINCE (UTC)")
POOLS = (
    "POOL",
    "TYPE",
    "MARKET",
    "NODES",
    "GPUS",
    "USD/NODE-H",
    "USD/GPU-H",
    "WHERE",
    "PRICE FROM",
)


def pool(item: Pool, price_from: str) -> tuple[str, ...]:
    """A row of `elastic cluster check`, under POOLS."""
    known = price_from != "not known"
    kind = "processes" if item.accelerator_type == "CPU" else item.accelerator_type
    return (
        item.name,
        item.instance_type or "-",
        item.market_type,
        f"{item.min_nodes}-{item.max_nodes}",
        f"{item.gpus_per_node} {kind}",
        f"{item.usd_per_node_h:.2f}" if known else "-",
        f"{item.usd_per_gpu_h:.3f}" if known else "-",
        item.zone or item.region or "-",
        price_from,
    )


def dollars(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:.4f}"


def phase(view: View, live: bool) -> str:
    """A run whose journal does not say that it ended, but that nobody drives, was interrupted."""
    return view.phase if live or view.ended else "interrupted"


def loss(view: View) -> float | None:
    curve = view.curve()
    return curve[-1].train_loss if curve else None


def ls(rows: Sequence[Row]) -> list[str]:
    head = ("RUN", "PHASE", "STEP", "TRAIN_LOSS", "LAST NEWS")
    body = []
    for row in sorted(rows, key=lambda row: row.age_s):
        data = row.plain()
        shown = "-" if data["train_loss"] is None else f"{data['train_loss']:.4f}"
        body.append(
            (
                data["run"],
                data["phase"],
                row.view.progress.replace(" of ", "/"),
                shown,
                f"{duration(row.age_s)} ago",
            )
        )
    return columns([head, *body], right=(2, 3))


def paid_until_s(view: View, driven: bool) -> float | None:
    """Until when nodes that nobody drives may be paid for; None = none are. Those of an embedded
    cluster end with its driver, those of another one when their lease is over."""
    state = view.state
    machines = any(seen.starting or seen.leaving for seen in state.instances.values())
    nodes = any(
        not node.shared_cores and (pool := state.pool(node.pool)) is not None and pool.paid
        for node in state.alive
    )
    if driven or view.ended or not (machines or nodes):
        return None
    until_s = view.at_s + orphans_paid_s(state.job.orphan_lease_s)
    return until_s if time.time() < until_s else None


def spending(view: View, driven: bool = True) -> str:
    """`$3.12 of $20.00, $7.20 an hour`; of a run that nobody drives without the hour."""
    state, budget = view.state, view.job.budget_usd
    of = f" of ${budget:,.2f}" if budget is not None else ""
    rate = f", ${state.usd_per_h:,.2f} an hour" if driven and not view.ended else ""
    if (until_s := paid_until_s(view, driven)) is not None:
        rate = f", nodes may be paid until {clock(until_s)}"
    return f"${state.usd_at(view.at_s):,.2f}{of}{rate}"


def clock(at_s: float) -> str:
    """`14:05`, of the minute that is over by then, where this is looked at."""
    return time.strftime("%H:%M", time.localtime(at_s + 59.0))


MORE_BUDGET = "raise budget_usd, and run it again"


def spent_early(view: View) -> str:
    """Of a run that its budget has ended: what would have done. '' = it is none."""
    state, most, steps = view.state, view.job.budget_usd, view.steps
    spent = view.phase == "stopped" and most and state.usd >= ALL_OF_IT * most
    if not spent or not 0 < view.step < steps:
        return ""
    whole_usd = state.usd * state.work_between(0, steps) / state.work_between(0, view.step)
    return (
        f"${most:,.2f} was enough for {view.step:,} of {steps:,} steps; at this pace all of them "
        f"cost about ${whole_usd:,.0f}"
    )


def paid(view: View) -> bool:
    """Are there dollars to be told of?"""
    return bool(view.state.usd or view.state.usd_per_h)


def standing(view: View) -> Iterator[tuple[str, str]]:
    """Rows of a status, plain or drawn, about what goes on beside the steps."""
    yield "checkpoint", _durable(view)
    if away := _away(view):
        yield "storage", away
    if view.cut_off and not view.ended:
        since_s = view.at_s - view.cut_off.since_s
        yield "network", f"no other host has answered the driver's for {duration(since_s)}"
    for name, why in view.unusable.items():
        yield f"no {name}", why
    for text in view.state.model.notes if view.state.model else ():
        yield "note", text
    if said := sentence(view.launches.medians()):
        yield "first step", f"{said} after its node was asked for"
    yield "reason", view.reason or "-"


def brief(view: View, holder: str, goodput: float) -> str:
    """In one line."""
    now = loss(view)
    return "  ".join(
        (
            f"{view.state.run}  {phase(view, bool(holder))}",
            f"step {view.progress}",
            *([f"train_loss {now:.4f}"] if now is not None else []),
            f"goodput {100 * goodput:.0f} %",
            *([spending(view, bool(holder))] if paid(view) else []),
        )
    )


def status(
    view: View, holder: str = "", bound: str = "", *, goodput: float | None = None
) -> list[str]:
    """Where a run stands. `bound`: by what, in one line; `goodput`: None = not told."""
    now, speed = loss(view), view.tokens_per_s()
    driven = bool(holder) and not view.ended
    rows = [
        ("run", f"{view.state.run} (job {view.job.name or '-'}, epoch {view.state.epoch})"),
        ("phase", phase(view, bool(holder)) + (f", driven by {holder}" if holder else "")),
        ("step", view.place + (f", ETA {duration(view.eta_s())}" if view.steps and driven else "")),
        ("train_loss", "-" if now is None else f"{now:.4f}"),
        *(
            (name, f"{value:.4f} at step {step}")
            for step, found in list(view.evaluations.items())[-1:]
            for name, value in found.items()
        ),
        *([("speed", f"{speed:,.0f} {view.unit}/s")] if speed else []),
        *([("goodput", f"{100 * goodput:.0f} %")] if goodput is not None else []),
        *([("dollars", spending(view, bool(holder)))] if paid(view) else []),
        *standing(view),
        *([("bound by", bound)] if bound else []),
    ]
    lines = columns(rows)
    if view.plan is not None and not view.ended:
        lines += [
            "",
            f"generation {view.plan.generation}: {view.plan.layout} on "
            f"{n_of(len(view.plan.ranks), 'worker')}",
        ]
        lines += [f"  {line}" for line in draw(view.plan, letters(list(view.nodes)))]
    if view.nodes:
        lines += ["", *nodes(view)]
    return lines


def nodes(view: View) -> list[str]:
    """`SPEED`: relative to the faster ones of the pool; below the table why a node is slow, or was
    quarantined. Of many that are gone the newest."""
    head = ("", "NODE", "POOL", "MARKET", "WORKERS", "SPEED", "SAMPLES", "STATUS")
    names = letters(list(view.nodes))
    speeds, rows = view.node_speeds.by_node(view.nodes), []
    whys, samples = view.node_speeds.whys(speeds), node_speeds.samples_by_node(view.plan)
    listed, n_more = view.listed()
    for node in listed:
        name, status = node.node_id, view.status(node)
        market = view.pools[node.pool].market_type if node.pool in view.pools else "-"
        speed, n = node_speeds.shown(speeds[name]), samples[name]
        rows.append((names[name], name, node.pool, market, node.gpus, speed, n or "-", status))
    return [
        *columns([head, *rows]),
        *([f"and {n_more:,} more that were lost or released"] if n_more else []),
        *(
            f"{names[node.node_id]} {node.node_id}: {whys[node.node_id]}"
            for node in listed
            if node.node_id in whys
        ),
    ]


def status_plain(view: View, holder: str = "", *, goodput: float | None = None) -> dict[str, Any]:
    """The same as data."""
    away, cut, driven = view.state.away, view.cut_off, bool(holder) and not view.ended
    speeds, samples = view.node_speeds.by_node(view.nodes), node_speeds.samples_by_node(view.plan)
    whys, (listed, n_more) = view.node_speeds.whys(speeds), view.listed()
    return {
        "run": view.state.run,
        "phase": phase(view, bool(holder)),
        "holder": holder,
        "epoch": view.state.epoch,
        "step": view.step,
        "steps": view.steps,
        "job_phase": view.job_phase,
        "train_loss": loss(view),
        "evaluations": {str(step): metrics for step, metrics in view.evaluations.items()},
        "durable_step": view.saved_step,
        "copies_failed": view.copies_failed,
        "copies_skipped": view.copies_skipped,
        "storage_away_s": round(view.at_s - away.since_s, 1) if away else None,
        "driver_cut_off_s": round(view.at_s - cut.since_s, 1) if cut else None,
        "launch_to_first_step_s_by_pool": view.launches.medians(),
        "eta_s": view.eta_s() if driven else None,
        "tokens_per_s": view.tokens_per_s(),
        "unit": view.unit,
        "goodput": goodput,
        "usd": view.state.usd_at(view.at_s),
        "usd_per_h": view.state.usd_per_h if driven else 0.0,
        "paid_until_s": paid_until_s(view, bool(holder)),
        "budget_usd": view.job.budget_usd,
        "generation": view.plan.generation if view.plan else 0,
        "layout": str(view.plan.layout) if view.plan else None,
        "nodes": [
            {
                "node_id": n.node_id, "pool": n.pool, "workers": n.gpus, "status": view.status(n),
                "deadline_s": n.deadline_s, "speeds": speeds[n.node_id],
                "samples": samples[n.node_id], "why": whys.get(n.node_id, ""),
            }
            for n in listed
        ],
        "more_gone": n_more,
        "reason": view.reason,
        "unusable": view.unusable,
    }  # fmt: skip


def _away(view: View) -> str:
    """'' = storage answers."""
    seen = view.state.away
    return (
        f"does not answer since {duration(view.at_s - seen.since_s)} ({seen.what})"
        if seen and not view.ended
        else ""
    )


def _durable(view: View) -> str:
    """`step 40; 1 failed: no checkpoint of step 60: ...`."""
    if view.job.restarted:
        return "the script's own affair: it is restarted, not changed live"
    newest = "none" if view.saved_step is None else f"step {view.saved_step}"
    failed = [note.text for note in view.notes if note.kind in ("CopyFailed", "CopyDamaged")]
    return newest + (f"; {len(failed)} failed, the last: {failed[-1]}" if failed else "")
