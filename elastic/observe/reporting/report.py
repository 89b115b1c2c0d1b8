"""The end of a run on paper: transitions, where time and money went, losses, a sample. Also writes
report.html, report.json, loss.png, capacity.png and metrics.csv."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.errors import SpecError
from elastic.ledger.journal import Line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.accounting.accounts import Account, Books
from elastic.observe.accounting.launch_times import Launches, sentence
from elastic.observe.accounting.transitions import Transition
from elastic.observe.diagnosis import axis_rows
from elastic.observe.diagnosis.axis_rows import AxisRow
from elastic.observe.diagnosis.evidence import Evidence
from elastic.observe.diagnosis.step_verdicts import verdicts
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.find_runs import exporting
from elastic.observe.metrics.metrics_csv import CSV
from elastic.observe.metrics.step_rows import columns_of, rows_of, text_of
from elastic.observe.noise_advice import NoiseScale, advice, estimate
from elastic.observe.reporting.capacity_plot import save_capacity
from elastic.observe.reporting.loss_plot import save_loss
from elastic.observe.reporting.report_page import page
from elastic.observe.reporting.run_seen import RunSeen, seen_of_run
from elastic.observe.reporting.savings import against_on_demand, against_restarts, to_target
from elastic.observe.run_tables import MORE_BUDGET, columns, spent_early
from elastic.observe.run_view import View
from elastic.observe.step_times import GenerationTimes, shown
from elastic.policy.state.fold import changes
from elastic.storage import LocalStorage
from elastic.text import duration, n_of, size

FILE, PLOT, CAPACITY, PAGE = "report.json", "loss.png", "capacity.png", "report.html"
Diagnosis = Callable[[Evidence], Sequence[RunVerdict]]
Communication = Callable[[Evidence], Sequence[AxisRow]]
# known to the driver only: kept when a report is written again
EXTRAS = ("launch_to_first_step_s", "samples_exact", "sample")
NO_STEPS = "rank 0 printed no line with a step and a loss (docs/script.md)"
# of the steps' time in which they wait, or of tokens that one rank has more: worth a line
MUCH = 0.1


@dataclass(frozen=True)
class Asked:
    """`html`: where the page goes besides the run's folder. `target_loss`: what reaching it has
    cost is said too."""

    html: Path | None = None
    target_loss: float | None = None


def write(
    run: RunFolder,
    extras: Mapping[str, Any] | None = None,
    diagnosis: Diagnosis = verdicts,
    *,
    communication: Communication = lambda seen: (),
    asked: Asked = Asked(),
) -> tuple[dict[str, Any], list[str]]:
    """Write the report's files of a run; returns the data and the lines to print. `extras`: see
    EXTRAS. Raises SpecError where the journal says nothing, or the page cannot be written where it
    was asked for."""
    seen = seen_of_run(run)
    view, books, found = seen.view, seen.account, diagnosis(seen.evidence)
    axes = communication(seen.evidence)
    data = (
        summary(view, books)
        | {"communication": [one.plain() for one in axes]}
        | worth(seen, found, asked.target_loss)
        | {name: value for name, value in (extras or _kept(run)).items() if name in EXTRAS}
    )
    run.folder.mkdir(parents=True, exist_ok=True)
    save_loss(view, run.folder / PLOT)
    save_capacity(view, seen.history, run.folder / CAPACITY)
    html = page(seen, found, asked.target_loss, axes=axes)
    (run.folder / PAGE).write_text(html, encoding="utf-8")
    for name in (PLOT, CAPACITY, PAGE):
        run.keep(name)
    if asked.html is not None:
        try:
            asked.html.write_text(html, encoding="utf-8")
        except OSError as error:
            what = f"--html {asked.html}: cannot be written ({error.strerror})"
            right = "give a file in a folder that is there, as in report.html"
            raise SpecError(f"{what}; {right}") from error
    if view.ended and (rows := rows_of(view)):  # else a driver continues it
        LocalStorage(run.folder).put(CSV, text_of(rows, columns_of(rows)).encode())
        run.keep(CSV)
    run.storage.put(FILE, json.dumps(data | {"ledger": _plain(books)}, indent=1).encode())
    sent = axis_rows.shown(axes)
    return data, [
        *text(view, books, data),
        *(["", "COMMUNICATION", *sent] if sent else []),
        "",
        f"page:  {asked.html or run.folder / PAGE}",
        f"curve: {run.folder / PLOT}",
        f"steps: {run.folder / CSV}",
        f"data:  {run.storage.uri_of(FILE)}",
        *([f"model: {exporting(run, view.state.job)}"] if view.state.durable else []),
    ]


def worth(
    seen: RunSeen, found: Sequence[RunVerdict], target_loss: float | None = None
) -> dict[str, Any]:
    """What the run was worth, and what it is bound by: see savings.py and verdicts.py."""
    view, books, totals = seen.view, seen.account, seen.account.totals
    on_demand = against_on_demand(books, seen.history)
    compared = {"not_compared": on_demand} if isinstance(on_demand, str) else asdict(on_demand)
    data = {
        "usd_per_million": round(1e6 * totals.usd / totals.tokens, 6) if totals.tokens else None,
        "on_demand": compared,
        "restarts": [asdict(one) for one in against_restarts(view, books, seen.history)],
        "verdicts": [verdict.plain() for verdict in found],
    }
    if target_loss is not None:
        data["target_loss"] = asdict(to_target(view, seen.history, target_loss))
    return data


def summary(view: View, books: Account) -> dict[str, Any]:
    """What `elastic run --json` ends with; `samples_exact` is None where nobody has counted."""
    totals = books.totals
    # share of the steps' time in which some rank waited for data
    data_s, productive_s = books.gpu_seconds["data_loading"], books.gpu_seconds["productive"]
    return {
        "run": view.state.run,
        "outcome": view.phase,
        "reason": view.reason,
        "steps": totals.steps,
        "final_loss": totals.final_loss,
        "validation_loss": view.validation_loss,
        "copies_failed": view.copies_failed,
        "copies_skipped": view.copies_skipped,
        "unusable": view.unusable,
        "drill_left": view.drill_left if view.ended else [],
        "notes": list(view.state.model.notes) if view.state.model else [],
        **_noise(view),
        "tokens": totals.tokens,
        "unit": view.unit,
        "wall_s": round(totals.wall_s, 3),
        "not_running_s": round(books.seconds["not_running"], 3),
        "tokens_per_s": round(totals.tokens_per_s, 1),
        "goodput": round(totals.goodput, 4),
        "usd": round(totals.usd, 6),
        "launch_to_first_step_s": totals.launch_to_first_step_s,
        "storage_away_s": round(totals.storage_away_s, 3),
        "launch_to_first_step_s_by_pool": view.launches.medians(),
        "samples_exact": None,
        "data_wait": round(data_s / (data_s + productive_s), 4) if data_s else 0.0,
        "token_imbalance": _mean(view, "imbalance"),
        "pad_share": _mean(view, "pad_share"),
        "expert_load": _mean(view, "expert_load"),
        "transitions": [_transition(t) for t in books.transitions],
    }


def text(view: View, books: Account, data: Mapping[str, Any]) -> list[str]:
    """The report for a person."""
    lines = _head(data, view)
    # what to change: the two causes that would win most
    if bound := [
        (one["bound"], percent(one["share"]), f"{one['number']}; next: {one['advice']}")
        for one in data.get("verdicts", [])[:2]
    ]:
        lines += ["", "BOUND BY", *columns(bound)]
    if early := spent_early(view):
        lines += ["", f"budget: {early}; next: {MORE_BUDGET}"]
    lines += ["", "TRANSITIONS", *transitions(books.transitions)]
    lines += ["", "TIME AND COST BY CATEGORY", *spent(books)]
    if data.get("sample"):
        lines += ["", "SAMPLE", *(f"  {line}" for line in str(data["sample"]).splitlines())]
    return lines


def ledger(lines: Iterable[Line]) -> tuple[dict[str, Any], list[str]]:
    """As data, and as lines to print."""
    money, launches, steps = Books(), Launches(), GenerationTimes()
    for change in changes(lines):
        for reader in (money, launches, steps):
            reader.take(change)
    books, by_pool, times = money.closed(), launches.medians(), steps.rows()
    text = [*spent(books), "", *transitions(books.transitions)]
    if said := sentence(by_pool):
        text += ["", f"from a node's request to its first step: {said} (medians)"]
    if rows := shown(times):
        text += ["", *rows]
    return _plain(books) | {"launch_to_first_step_s_by_pool": by_pool, "step_times": times}, text


def transitions(found: Sequence[Transition]) -> list[str]:
    """A row per generation, and where the pause of each went."""
    head = (
        "GEN", "CAUSE", "AT STEP", "LOST", "PAUSE", "FROM", "TO", "SOURCE", "MOVED", "CONTENT",
        "LOSS", "PHASES",
    )  # fmt: skip
    equal = {True: "equal", None: "-"}
    rows = [
        (
            t.generation, t.cause, t.at_step, t.steps_lost, f"{t.pause_s:.2f} s",
            t.from_layout or "-", t.to_layout, t.source, size(t.bytes_moved),
            equal.get(t.digest_ok, "DIFFERS"), equal.get(t.loss_equal, "differs"),
            " ".join(f"{name} {s:.2f}" for name, s in t.phases_s.items() if s >= 0.005),
        )
        for t in found
    ]  # fmt: skip
    return columns([head, *rows], right=(0, 2, 3, 4, 8)) if rows else ["none"]


def spent(books: Account) -> list[str]:
    """A row per category that took anything."""

    total_s, seconds, dollars = sum(books.gpu_seconds.values()), books.seconds, books.usd
    priced = any(dollars.values())

    def row(name: str, share: str, *, gpu_s: float, wall_s: float, usd: float) -> tuple[str, ...]:
        shown = f"{usd:.4f}" if priced else "-"
        return name, f"{gpu_s:.1f}", share, f"{wall_s:.1f} s", shown

    rows: list[tuple[str, ...]] = [("CATEGORY", "GPU-SECONDS", "SHARE", "WALL", "USD")]
    for name, gpu_s in books.gpu_seconds.items():
        if gpu_s >= 0.05 or seconds[name] >= 0.05 or dollars[name] >= 0.00005:
            share = f"{100 * gpu_s / total_s:.1f} %" if total_s else "-"
            wall_s, usd = seconds[name], dollars[name]
            rows.append(row(name, share, gpu_s=gpu_s, wall_s=wall_s, usd=usd))
    wall_s, usd = sum(seconds.values()), sum(dollars.values())
    rows.append(row("sum", "", gpu_s=total_s, wall_s=wall_s, usd=usd))
    away_s = books.totals.storage_away_s
    told = [f"storage accepted no write of the driver for {away_s:.0f} s"] if away_s else []
    return columns(rows, right=(1, 2, 3, 4)) + told


def _steps(data: Mapping[str, Any], view: View) -> str:
    """How many, and how fast; of a script that is restarted as far as it has said so."""
    unit, idle_s = data["unit"], data["not_running_s"]
    idle = f" (and {duration(idle_s)} in which nothing ran)" if idle_s >= 1 else ""
    took = f"in {data['wall_s'] - idle_s:.1f} s"
    if view.job.restarted and not data["steps"]:
        return f"not known, {took}{idle}: {NO_STEPS}"
    if view.job.restarted:
        return f"{data['steps']} {took}{idle}"
    rate = f"{data['tokens_per_s']:,.0f} {unit}/s"
    return f"{data['steps']}, {data['tokens']:,} {unit} {took}: {rate}{idle}"


def _head(data: Mapping[str, Any], view: View) -> list[str]:
    def shown(name: str) -> str:
        return "-" if data[name] is None else f"{data[name]:.4f}"

    cost = f"${data['usd']:.4f} by the pools' prices" if data["usd"] else "its pools have no price"
    rows = [
        ("run", f"{data['run']}: {data['outcome']} ({data['reason']})"),
        ("steps", _steps(data, view)),
        ("train_loss", f"{shown('final_loss')}   validation {shown('validation_loss')}"),
        ("goodput", f"{100 * data['goodput']:.1f} % of paid GPU-seconds were productive; {cost}"),
    ]
    if data["samples_exact"] is not None:
        exact = data["samples_exact"]
        right, wrong = (
            "every step trained on exactly its own samples",
            "DIFFER from the order of the job",
        )
        rows.append(("samples", right if exact else wrong))
    if data.get("noise_scale"):
        rows.append(("noise scale", data["noise_scale"]["advice"]))
    if data["drill_left"]:
        left = ", ".join(data["drill_left"])
        rows.append(("drill", f"never carried out: {left}; the last step was {view.reached}"))
    if data["copies_skipped"]:
        more = "the one before was still being written; a larger checkpoint_every leaves time"
        rows.append(("copies", f"{n_of(data['copies_skipped'], 'checkpoint')} skipped: {more}"))
    if data["copies_failed"]:
        failed = f"{n_of(data['copies_failed'], 'checkpoint')} not made or not readable"
        rows.append(("copies", f"{failed}: elastic why {data['run']}"))
    rows += [(f"no {name}", why) for name, why in data["unusable"].items()]
    rows += [("note", text) for text in data["notes"]]
    if data["data_wait"] > MUCH:
        more = "more data.loader_workers, or more data.prefetch_steps (docs/data.md)"
        waited = percent(data["data_wait"])
        rows.append(("data", f"steps waited {waited} of their time for data: {more}"))
    if data["token_imbalance"] is not None and data["token_imbalance"] > 1 + MUCH:
        more = f"{percent(data['token_imbalance'] - 1)} more tokens per sample than the mean"
        rest = "the others wait for it; pack evens it out (docs/data.md)"
        rows.append(("tokens", f"the fullest rank of a step has {more}: {rest}"))
    if data["expert_load"] is not None:
        times = f"{data['expert_load']:.2f} times as many tokens as the mean"
        rows.append(("experts", f"those of the fullest rank get {times} (docs/layouts.md)"))
    if data["pad_share"] is not None:
        pad = f"{100 * data['pad_share']:.1f} %"
        rows.append(("filling", f"{pad} of the places of the micro-batches held no token"))
    if data["launch_to_first_step_s"] is not None:
        before = "what Python imports, and a script up to its loop, came before that"
        first = f"{data['launch_to_first_step_s']:.1f} s after the driver began; {before}"
        rows.append(("first step", first))
    if by_pool := sentence(data["launch_to_first_step_s_by_pool"]):
        rows.append(("of a node", f"{by_pool} from its request to its first step (medians)"))
    return columns(rows)


def _mean(view: View, name: str) -> float | None:
    """Of a field of the points of the curve, over those where it is known."""
    found = [value for point in view.curve() if (value := getattr(point, name))]
    return round(sum(found) / len(found), 4) if found else None


def _noise(view: View) -> dict[str, Any]:
    """The gradient noise scale, where the job has it measured."""
    if not view.job.noise_scale:
        return {}
    found = estimate(view.noise)
    if found is None:
        text = (
            f"measured in {len(view.noise)} steps only (the layouts that ran may give no two "
            "batch sizes): too few to say"
        )
        nothing = asdict(NoiseScale(None, None, None, len(view.noise)))
        return {"noise_scale": {**nothing, "advice": text}}
    return {"noise_scale": {**asdict(found), "advice": advice(found, view.job.global_batch)}}


def _transition(found: Transition) -> dict[str, Any]:
    return {name: value for name, value in asdict(found).items() if name != "at_s"}


def _plain(books: Account) -> dict[str, Any]:
    return {
        "categories": {
            name: {
                "seconds": books.seconds[name],
                "gpu_seconds": books.gpu_seconds[name],
                "usd": books.usd[name],
            }
            for name in books.gpu_seconds
        },
        "transitions": [_transition(t) for t in books.transitions],
        "totals": asdict(books.totals),
    }


def _kept(run: RunFolder) -> dict[str, Any]:
    """The extras of the report that is there."""
    try:
        found = json.loads(run.storage.get(FILE))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
