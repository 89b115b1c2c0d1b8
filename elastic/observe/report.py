"""The end of a run on paper: transitions, where time and money went, losses, a sample. Also writes report.json and loss.png."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastic.ledger.accounts import Account, Transition, account
from elastic.ledger.journal import Line
from elastic.observe.plot import save_loss
from elastic.observe.runs import lines_of
from elastic.observe.sentences import size
from elastic.observe.tables import columns
from elastic.observe.view import View, view_of
from elastic.storage import Storage

FILE, PLOT = "report.json", "loss.png"
EXTRAS = ("launch_to_first_step_s", "samples_exact", "sample")  # known to the driver only: kept when a report is written again


def write(run: Storage, extras: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """Write report.json and loss.png of a run; returns the data and the lines to print. `extras`: see EXTRAS."""
    lines = lines_of(run)
    view, books = view_of(lines), account(lines)
    data = summary(view, books) | {name: value for name, value in (extras or _kept(run)).items() if name in EXTRAS}
    save_loss(view, run.root / PLOT)
    run.put(FILE, json.dumps(data | {"ledger": _plain(books)}, indent=1).encode())
    return data, text(view, books, data) + ["", f"curve: {run.root / PLOT}", f"data:  {run.root / FILE}"]


def summary(view: View, books: Account) -> dict[str, Any]:
    """What `elastic run --json` ends with; `samples_exact` is None where nobody has counted."""
    totals = books.totals
    return {
        "run": view.run,
        "outcome": view.phase,
        "reason": view.reason,
        "steps": totals.steps,
        "final_loss": totals.final_loss,
        "validation_loss": _validation_loss(view),
        "tokens": totals.tokens,
        "wall_s": round(totals.wall_s, 3),
        "tokens_per_s": round(totals.tokens_per_s, 1),
        "goodput": round(totals.goodput, 4),
        "usd": round(totals.usd, 6),
        "launch_to_first_step_s": totals.launch_to_first_step_s,
        "samples_exact": None,
        "transitions": [_transition(t) for t in books.transitions],
    }


def text(view: View, books: Account, data: Mapping[str, Any]) -> list[str]:
    """The report for a person."""
    lines = [*_head(data), "", "TRANSITIONS", *transitions(books.transitions), "", "WHERE THE TIME WENT", *spent(books)]
    if data.get("sample"):
        lines += ["", "SAMPLE", *(f"  {line}" for line in str(data["sample"]).splitlines())]
    return lines


def ledger(lines: Sequence[Line]) -> list[str]:
    books = account(lines)
    return [*spent(books), "", *transitions(books.transitions)]


def ledger_plain(lines: Sequence[Line]) -> dict[str, Any]:
    return _plain(account(lines))


def transitions(found: Sequence[Transition]) -> list[str]:
    """A row per generation, and where the pause of each went."""
    head = ("GEN", "CAUSE", "AT STEP", "LOST", "PAUSE", "FROM", "TO", "SOURCE", "MOVED", "CONTENT", "PHASES")
    rows = [
        (
            t.generation, t.cause, t.at_step, t.steps_lost, f"{t.pause_s:.2f} s", t.from_layout or "-", t.to_layout, t.source,
            size(t.bytes_moved), {True: "equal", False: "DIFFERS", None: "-"}[t.digest_ok],
            " ".join(f"{name} {seconds:.2f}" for name, seconds in t.phases_s.items() if seconds >= 0.005),
        )
        for t in found
    ]  # fmt: skip
    return columns([head, *rows], right=(0, 2, 3, 4, 8)) if rows else ["none"]


def spent(books: Account) -> list[str]:
    """A row per category that took anything."""
    total_s = sum(books.gpu_seconds.values())
    rows = [("CATEGORY", "GPU-SECONDS", "SHARE", "WALL", "USD")]
    for name, gpu_s in books.gpu_seconds.items():
        if gpu_s >= 0.05 or books.seconds[name] >= 0.05:
            share = f"{100 * gpu_s / total_s:.1f} %" if total_s else "-"
            rows.append((name, f"{gpu_s:.1f}", share, f"{books.seconds[name]:.1f} s", f"{books.usd[name]:.4f}"))
    rows.append(("sum", f"{total_s:.1f}", "", f"{sum(books.seconds.values()):.1f} s", f"{sum(books.usd.values()):.4f}"))
    return columns(rows, right=(1, 2, 3, 4))


def _head(data: Mapping[str, Any]) -> list[str]:
    def shown(name: str) -> str:
        return "-" if data[name] is None else f"{data[name]:.4f}"

    rows = [
        ("run", f"{data['run']}: {data['outcome']} ({data['reason']})"),
        (
            "steps",
            f"{data['steps']}, {data['tokens']:,} tokens in {data['wall_s']:.1f} s: {data['tokens_per_s']:,.0f} tokens/s",
        ),
        ("train_loss", f"{shown('final_loss')}   validation {shown('validation_loss')}"),
        (
            "goodput",
            f"{100 * data['goodput']:.1f} % of paid GPU-seconds were productive; ${data['usd']:.4f} by the pools' prices",
        ),
    ]
    if data["samples_exact"] is not None:
        words = {True: "every step trained on exactly its own samples", False: "DIFFER from the order of the job"}
        rows.append(("samples", words[data["samples_exact"]]))
    if data["launch_to_first_step_s"] is not None:
        rows.append(("first step", f"{data['launch_to_first_step_s']:.1f} s after the launch"))
    return columns(rows)


def _validation_loss(view: View) -> float | None:
    return view.evaluations[max(view.evaluations)].get("validation_loss") if view.evaluations else None


def _transition(found: Transition) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name != "at_s"}


def _plain(books: Account) -> dict[str, Any]:
    return {
        "categories": {
            name: {"seconds": books.seconds[name], "gpu_seconds": books.gpu_seconds[name], "usd": books.usd[name]}
            for name in books.gpu_seconds
        },
        "transitions": [_transition(t) for t in books.transitions],
        "totals": asdict(books.totals),
    }


def _kept(run: Storage) -> dict[str, Any]:
    """The extras of the report that is there."""
    try:
        found = json.loads(run.get(FILE))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
