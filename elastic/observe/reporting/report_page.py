"""report.html: a run in one file, for somebody who has never used elastic. It loads nothing from
anywhere, and all that comes from the run is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from elastic.observe.accounting.accounts import Account
from elastic.observe.accounting.transitions import Transition
from elastic.observe.diagnosis.axis_rows import AxisRow
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.profiles.profile_bars import milliseconds
from elastic.observe.reporting import page_words, savings
from elastic.observe.reporting.charts import capacity_chart, loss_chart
from elastic.observe.reporting.run_seen import RunSeen
from elastic.observe.reporting.story import MARKS, gpu_word, story
from elastic.observe.run_tables import MORE_BUDGET, spent_early
from elastic.text import duration, size, span
from elastic.version import __version__

TEMPLATE = "report_page.html"
SHORT_S = 600.0  # of a run, whose shares tell little
ROWS_MOST = 200  # of the table of changes
OUTCOMES = {"succeeded": "✓", "failed": "✕", "stopped": "■"}
RUNNING = "▶"


@dataclass(frozen=True)
class Amount:
    """`exact`: as the ledger has it; `text`: rounded so that the column adds up."""

    exact: float
    text: str
    share: float = 0.0


def page(
    seen: RunSeen,
    found: Sequence[RunVerdict],
    target_loss: float | None = None,
    *,
    axes: Sequence[AxisRow] = (),
) -> str:
    """The whole HTML document."""
    from jinja2 import Environment, StrictUndefined

    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        content(seen, found, target_loss) | {"traffic": traffic(seen, axes)}
    )


def content(
    seen: RunSeen, found: Sequence[RunVerdict], target_loss: float | None = None
) -> dict[str, Any]:
    """What the template shows."""
    view, books = seen.view, seen.account
    totals, word = books.totals, gpu_word(view)
    numbers = {one.generation: str(k) for k, one in enumerate(books.transitions)}
    rows = [_row(view.started_at_s, k, one) for k, one in enumerate(books.transitions[:ROWS_MOST])]
    restarts = savings.against_restarts(view, books, seen.history)
    on_demand = savings.against_on_demand(books, seen.history)
    target = savings.to_target(view, seen.history, target_loss) if target_loss is not None else None
    return {
        "run": view.state.run, "job": view.job.name, "outcome": view.phase,
        "sign": OUTCOMES.get(view.phase, RUNNING), "reason": view.reason, "word": word,
        "version": __version__, "summary": _summary(seen, word), "cards": _cards(seen, on_demand),
        "story": story(view, books, seen.incidents), "signs": MARKS,
        "loss": loss_chart(view, numbers), "capacity": capacity_chart(view, seen.history, word),
        "categories": categories(books), "sums": _sums(books), "priced": totals.usd > 0,
        "hours": _in_hours(books), "on_demand": on_demand,
        "on_demand_known": isinstance(on_demand, savings.OnDemand), "restarts": restarts,
        "verdicts": found, "bounds": page_words.BOUNDS, "changes": rows,
        "budget": spent_early(view), "more_budget": MORE_BUDGET, "short": totals.wall_s < SHORT_S,
        "n_changes": len(books.transitions), "phases": page_words.PHASES, "target": target,
        "glossary": page_words.GLOSSARY, "unit": view.unit,
        "usd": usd, "span": span, "percent": percent,
    }  # fmt: skip


def traffic(seen: RunSeen, axes: Sequence[AxisRow]) -> dict[str, Any] | None:
    """What GPUs sent each other in the steps of the generation that trained longest."""
    main = seen.evidence.main
    if main is None or not axes:
        return None
    rows = [
        {
            "axis": one.axis, "about": page_words.AXES.get(one.axis, ""),
            "sent": "-" if one.n_bytes is None else size(one.n_bytes),
            "in_all": "-" if one.n_bytes is None else size(one.n_bytes * main.n_seen),
            "planned": milliseconds(one.planned_s), "measured": milliseconds(one.measured_s),
            "busy": milliseconds(one.busy_s),
        }
        for one in axes
    ]  # fmt: skip
    return {
        "rows": rows, "layout": str(main.plan.layout), "steps": main.n_seen,
        "profiled": bool(main.profile), "planned": any(one.planned_s for one in axes),
    }  # fmt: skip


def usd(value: float | None) -> str:
    """Cents where there are dollars, else as many digits as tell something."""
    if value is None:
        return "-"
    sign = "-" if value < 0 else ""
    return f"{sign}${abs(value):,.{_decimals(abs(value))}f}"


def _decimals(value: float) -> int:
    return 2 if value >= 10 or value == 0 else 3 if value >= 1 else 4


def rounded(values: Sequence[float], decimals: int) -> list[float]:
    """Each up or down, so that they add up to their rounded sum: those with the largest rest go
    up."""
    unit = 10.0**-decimals
    down = [int(value / unit + 1e-9) for value in values]
    missing = round(sum(values) / unit) - sum(down)
    by_rest = sorted(range(len(values)), key=lambda k: down[k] - values[k] / unit)
    for k in by_rest[: max(0, missing)]:
        down[k] += 1
    return [n * unit for n in down]


def categories(books: Account) -> list[dict[str, Any]]:
    """Those that took anything, the dearest first."""
    names = [
        name
        for name in books.gpu_seconds
        if books.gpu_seconds[name] > 0 or books.usd[name] > 0 or books.seconds[name] > 0
    ]
    names.sort(key=lambda name: (-books.gpu_seconds[name], -books.seconds[name]))
    per, digits = (3600.0, 2) if _in_hours(books) else (1.0, 1)
    worked = rounded([books.gpu_seconds[name] / per for name in names], digits)
    decimals = _decimals(sum(books.usd.values()))
    money = rounded([books.usd[name] for name in names], decimals)
    whole = sum(books.gpu_seconds.values())
    return [
        {
            "name": name, "title": page_words.CATEGORIES[name][0],
            "about": page_words.CATEGORIES[name][1],
            "gpu": Amount(books.gpu_seconds[name], f"{gpu:,.{digits}f}",
            books.gpu_seconds[name] / whole if whole else 0.0),
            "usd": Amount(books.usd[name], f"${paid:,.{decimals}f}"),
            "wall": span(books.seconds[name]),
        }
        for name, gpu, paid in zip(names, worked, money, strict=True)
    ]  # fmt: skip


def _in_hours(books: Account) -> bool:
    return books.totals.gpu_seconds >= 3600


def _sums(books: Account) -> dict[str, Any]:
    gpu_s, paid = sum(books.gpu_seconds.values()), sum(books.usd.values())
    hours = _in_hours(books)
    return {
        "gpu": Amount(gpu_s, f"{gpu_s / 3600:,.2f}" if hours else f"{gpu_s:,.1f}"),
        "usd": Amount(paid, f"${paid:,.{_decimals(paid)}f}"),
        "wall": span(sum(books.seconds.values())),
    }


def _summary(seen: RunSeen, word: str) -> str:
    view, totals = seen.view, seen.account.totals
    most = max((sum(m.gpus.values()) for m in seen.history.moments), default=0)
    steps = f"{totals.steps:,} of {view.steps:,} steps" if view.steps else f"{totals.steps:,} steps"
    read = f", {totals.tokens:,} {view.unit}" if totals.tokens else ""
    names = [pool.name for pool in view.state.pools]
    of = f" of pool{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""
    return f"{steps}{read}, in {span(totals.wall_s)} on up to {most} {word}s{of}"


def _cards(seen: RunSeen, on_demand: savings.OnDemand | str) -> list[dict[str, str]]:
    view, books = seen.view, seen.account
    totals, priced = books.totals, books.totals.usd > 0
    cards: list[dict[str, str]] = []

    def add(title: str, value: str, about: str) -> None:
        cards.append({"title": title, "value": value, "about": about})

    if priced:
        add("Cost", usd(totals.usd), "by the pools' prices; disks and traffic are not in it")
    else:
        add("Cost", "no price", "the machines of this run have no price")
    if isinstance(on_demand, savings.OnDemand):
        better = on_demand.saved_usd >= 0
        share = f"{percent(abs(on_demand.saved_share))} {'less' if better else 'more'}"
        about = f"{share} than the same training on on-demand machines"
        add("Saved" if better else "More than on-demand", usd(abs(on_demand.saved_usd)), about)
    if priced and totals.tokens:
        about = f"{totals.tokens_per_s:,.0f} {view.unit} a second, pauses included"
        add(f"Per million {view.unit}", usd(1e6 * totals.usd / totals.tokens), about)
    about = "of the paid GPU time was training that counts"
    add("Goodput", f"{100 * totals.goodput:.1f} %", about)
    entered = [one for one in books.transitions if one.cause != "start"]
    paused, again = sum(t.pause_s for t in entered), sum(one.steps_lost for one in entered)
    about = f"paused for {span(paused)} in all; {again} steps trained again"
    add("Changes of capacity", str(len(entered)), about)
    if totals.final_loss is not None:
        about = "not tested on other samples"
        if (validation := view.validation_loss) is not None:
            about = f"{validation:.4f} on samples that were not trained on"
        add("Loss at the end", f"{totals.final_loss:.4f}", about)
    return cards


def _row(started_at_s: float, k: int, one: Transition) -> Mapping[str, Any]:
    """Of the table of changes. `bars`: phase -> percent of all phases."""
    whole_s = sum(one.phases_s.values())
    checks = {True: "equal", False: "DIFFERS", None: "-"}
    return {
        "number": k, "when": duration(max(0.0, one.at_s - started_at_s)),
        "cause": one.cause, "why": page_words.CAUSES.get(one.cause, one.cause),
        "step": one.at_step, "lost": one.steps_lost, "pause": f"{one.pause_s:.2f} s",
        "before": one.from_layout or "-", "after": one.to_layout,
        "source": page_words.SOURCES.get(one.source, one.source), "moved": size(one.bytes_moved),
        "content": checks[one.digest_ok], "loss": checks[one.loss_equal],
        "phases": [
            (name, f"{seconds:.2f}", round(100 * seconds / whole_s, 2))
            for name, seconds in one.phases_s.items()
            if whole_s and seconds >= 0.005
        ],
    }  # fmt: skip
