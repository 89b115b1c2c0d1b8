"""Commands that read runs and change nothing in them: ls, status, ledger, report, replay, logs,
doctor, dashboard."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from elastic import api
from elastic.api.diagnose import communicated, diagnosed
from elastic.cli.parser import RUN, drawn_on, number, opened, option, run_verb, show, verb, whole
from elastic.errors import LINE_MOST, ElasticError, SpecError
from elastic.observe import find_runs, logs, run_tables
from elastic.observe.metrics.step_rows import columns_of, rows_of, text_of
from elastic.observe.reporting.run_seen import seen_of_run
from elastic.observe.reporting.run_standing import standing_of_run
from elastic.text import n_of, one_line, printable, program_output


def add(verbs: Any) -> None:
    listed = verb(verbs, "ls", _ls, about="list the runs")
    option(listed, "URI", "the same as --storage URI", nargs="?")
    for name, handler, about in (
        ("status", _status, "status of a run"),
        ("ledger", _ledger, "time and cost of a run by category"),
        (
            "report",
            _report,
            "write report.html, pictures and report.json of a run, and print the report",
        ),
        ("replay", _replay, "replay all decisions of a run from its journal and compare"),
    ):
        run_verb(verbs, name, handler, about=about, optional=name == "report")
    option(verbs.choices["status"], "-q --quiet", "one line: phase, step, loss, goodput, dollars")
    option(
        verbs.choices["report"],
        "--csv FILE",
        "write a line of numbers for each step into FILE instead, as CSV; without FILE: print them",
        nargs="?",
        const="",
    )
    option(
        verbs.choices["report"],
        "--html FILE",
        "where the page goes (default: report.html in the run's folder)",
    )
    option(
        verbs.choices["report"],
        "--target-loss LOSS",
        "say what reaching this loss has cost",
        type=number("a number, as in 2.5", isfinite),
    )
    made = run_verb(
        verbs,
        "logs",
        _logs,
        about="what the workers of a run have printed: the end of each one's file",
    )
    option(made, "--last N", "lines of each (default: 20; 0 = all)", type=whole(0), default=20)
    option(made, "--worker NAME", "only files whose name begins so, as in spot-1", default="")
    made = verb(
        verbs, "doctor", _doctor, about="check this machine; with RUN, what went wrong in that run"
    )
    option(made, "RUN", RUN, nargs="?")
    _add_dashboard(verbs)


def _ls(given: argparse.Namespace) -> int:
    storage = given.uri or given.storage
    rows = []
    for name, run in find_runs.all_runs(storage):
        try:
            view, holder = find_runs.now(run), api.holder(run.storage, patient=False)
            rows.append(run_tables.Row(view, holder, run.age_s(), name))
        except (ElasticError, OSError) as error:  # the others are listed all the same
            said = one_line(f"run '{name}' is left out: {error}", LINE_MOST)
            print(f"elastic: {said}", file=sys.stderr)
    show(
        given,
        [row.plain() for row in rows],
        run_tables.ls(rows) if rows else [f"no runs in {find_runs.storage_uri(storage)}"],
    )
    return 0


def _status(given: argparse.Namespace) -> int:
    run = opened(given)
    seen = standing_of_run(run)
    view, goodput = seen.view, seen.account.totals.goodput
    holder = api.holder(run.storage, patient=not view.ended)
    if given.quiet and not given.json:
        print(printable(run_tables.brief(view, holder, goodput)))
        return 0
    found = diagnosed(seen.evidence, run.storage)
    again = "" if given.json or holder else find_runs.resuming(run, view.job)
    resumed = f"to resume it: {again}" if again and view.phase != "succeeded" else ""
    if not given.json and (console := drawn_on()) is not None:
        from elastic.observe.picture_parts import Printable
        from elastic.observe.status_picture import StatusPicture

        console.print(Printable(StatusPicture(seen, holder, found)))
        if resumed:
            print(printable(resumed))
        return 0
    plain = run_tables.status_plain(view, holder, goodput=goodput)
    plain |= {"verdicts": [one.plain() for one in found]}
    bound = found[0].line if found else ""
    lines = run_tables.status(view, holder, bound, goodput=goodput)
    show(given, plain, [*lines, *(["", resumed] if resumed else [])])
    return 0


def _ledger(given: argparse.Namespace) -> int:
    from elastic.observe.reporting import report

    show(given, *report.ledger(find_runs.lines_of(opened(given))))
    return 0


def _report(given: argparse.Namespace) -> int:
    from elastic.observe.reporting import report

    if given.csv is not None and (given.json or given.html):
        raise SpecError("--csv and --json or --html are two ways at once; give one of them")
    if given.run is None and given.csv and not given.csv.endswith(".csv"):
        given.run, given.csv = given.csv, ""  # `report --csv RUN`
    if given.run is None:
        raise SpecError("of which run? elastic report RUN [--csv FILE]; elastic ls has their names")
    if given.csv is not None:
        return _table(given)
    asked = report.Asked(Path(given.html) if given.html else None, given.target_loss)
    run = opened(given)
    diagnosis = partial(diagnosed, storage=run.storage)
    sent = partial(communicated, storage=run.storage)
    data, lines = report.write(run, None, diagnosis, communication=sent, asked=asked)
    show(given, data, lines)
    return 0


def _table(given: argparse.Namespace) -> int:
    """A row for each step that counts."""
    rows = rows_of(find_runs.view_begun(opened(given)))
    text = text_of(rows, columns_of(rows))
    if not given.csv:
        print(printable(text), end="")
        return 0
    try:
        Path(given.csv).write_text(text)
    except OSError as error:
        raise SpecError(f"--csv {given.csv}: {error.strerror or error}") from error
    print(f"steps: {given.csv} ({n_of(len(rows), 'row')})")
    return 0


def _replay(given: argparse.Namespace) -> int:
    from elastic.sim.replay import replay

    found = replay(find_runs.lines_of(opened(given)))
    data: dict[str, Any] = {
        "decisions": found.n_decisions,
        "identical": found.identical,
        "reworded": found.n_reworded,
    }
    lines = [
        f"{n_of(found.n_decisions, 'decision')} replayed: "
        f"{'all identical' if found.identical else 'NOT identical'}"
    ]
    if found.n_reworded:
        lines.append(
            f"{found.n_reworded} sentences are worded differently; their actions and wake-up "
            "times are the same"
        )
    if found.first_difference is not None:
        first = found.first_difference
        data["first_difference"] = {
            "at_s": first.at_s,
            "recorded": first.recorded.reason,
            "again": first.again.reason,
        }
        lines += [
            f"first difference at {first.at_s:.3f} s:",
            f"  recorded: {first.recorded}",
            f"  again:    {first.again}",
        ]
    show(given, data, lines)
    return 0 if found.identical else 1


def _logs(given: argparse.Namespace) -> int:
    found = logs.logs(opened(given), given.last, given.worker)
    console = drawn_on()
    colored = console is not None and console.color_system is not None and not console.no_color
    safe = partial(program_output, colored=colored)
    show(given, [log.plain() for log in found], logs.shown(found), safe=safe)
    return 0


def _doctor(given: argparse.Namespace) -> int:
    from elastic.observe.diagnosis import doctor

    if given.run:
        run = opened(given)
        seen = seen_of_run(run)
        checks = [
            *doctor.run_troubles(seen.view),
            *doctor.bounds(diagnosed(seen.evidence, run.storage)),
        ]
    else:
        checks = doctor.machine(find_runs.storage_uri(given.storage))
    rows = [
        (check.verdict, check.name, check.found + (f"  ({check.hint})" if check.hint else ""))
        for check in checks
    ]
    show(given, [check.plain() for check in checks], run_tables.columns(rows))
    return 1 if any(check.verdict == "bad" for check in checks) else 0


def _add_dashboard(verbs: Any) -> None:
    made = verb(verbs, "dashboard", _dashboard, about="show runs in a browser, live")
    made.add_argument(
        "runs", metavar="RUN", nargs="*", help=f"{RUN}; several are compared; default: all runs"
    )
    option(
        made,
        "--host ADDRESS",
        "address to listen at (default: this machine alone; another one: its URL has a token)",
        default="127.0.0.1",
    )
    option(made, "--port N", "port (default: 8270, or a free one; 0 = free)", type=whole(0))
    # what `elastic run --dashboard` starts
    option(made, "--beside-driver", argparse.SUPPRESS)


def _dashboard(given: argparse.Namespace) -> int:
    options = api.DashboardOptions(
        host=given.host, port=given.port, storage=given.storage, beside_driver=given.beside_driver
    )

    def say(url: str) -> None:
        text = f"dashboard: {url}" if given.beside_driver else f"{url}  (Ctrl-C ends it)"
        print(json.dumps({"url": url}) if given.json else text, flush=True)

    api.dashboard(given.runs, options, say)
    return 0
