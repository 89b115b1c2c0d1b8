"""`elastic why`: what changed a run and why, on one screen; or all that is noted of it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from elastic import api
from elastic.api.diagnose import diagnosed
from elastic.cli.parser import opened, option, run_verb, show, whole
from elastic.observe import find_runs, why_lines
from elastic.observe.reporting.run_seen import seen_of_run
from elastic.observe.run_view import View
from elastic.observe.terminal import STYLES
from elastic.observe.why_lines import HEAD, KINDS, REST, Wanted, WhyRow
from elastic.text import printable

SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
AGO = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d|w)")
EPILOG = """examples:
  elastic why RUN                          # what changed it; what repeats is one line
  elastic why RUN --all --since 2h         # each note and decision of the last two hours of it
  elastic why RUN --node spot-3            # all that is said of a node
  elastic why RUN --kind notice            # of a kind: """


def add(verbs: Any) -> None:
    made = run_verb(verbs, "why", _why, about="what changed a run, and the reason of each decision")
    made.epilog = EPILOG + ", ".join(KINDS)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    option(made, "--all", "every note and decision, as with a filter (--json: so)")
    option(made, "--node NAME", "only what is said of this node", default="")
    option(made, "--kind KIND", "only notes of this kind (below)", default="")
    option(made, "--since TIME", "from so long before the newest line on: 2h, 3d", type=_ago)
    option(made, "--until TIME", "until so long before the newest line", type=_ago)
    option(made, "--last N", "only the last N lines", type=whole(0), default=0)


def _ago(text: str) -> float:
    found = AGO.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' must be a time, as in 90s, 30m, 2h or 3d")
    return float(found[1]) * SECONDS[found[2]]


def _why(given: argparse.Namespace) -> int:
    run = opened(given)
    if given.json or given.all or given.node or given.kind:
        return _listed(given, find_runs.view_begun(run))
    seen = seen_of_run(run)
    view = seen.view
    notes = why_lines.notes_of(view, _wanted(given))
    rows = why_lines.short(
        view,
        why_lines.story(view, notes),
        len(notes),
        driven=bool(api.holder(run.storage, patient=not view.ended)),
        summed=why_lines.summary(seen, diagnosed(seen.evidence, run.storage)),
    )
    _print(rows[-given.last :])
    return 0


def _wanted(given: argparse.Namespace) -> Wanted:
    return Wanted(given.node, given.kind, given.since, given.until)


def _listed(given: argparse.Namespace, view: View) -> int:
    notes = why_lines.notes_of(view, _wanted(given))
    if given.json:
        show(given, why_lines.plain(view, notes[-given.last :]), [])
        return 0
    rows = why_lines.every(view, notes) or [WhyRow("nothing of that is noted")]
    _print(rows[-given.last :])
    return 0


def _print(rows: Sequence[WhyRow]) -> None:
    """On a terminal colored, and cut to its width; `--all | less -R`, or a file, has all of it."""
    if not sys.stdout.isatty():
        print(printable("\n".join(row.text for row in rows)))
        return
    console = Console(highlight=False)
    for row in rows:
        style = {HEAD: "bold", REST: "dim"}.get(row.kind, STYLES.get(row.kind, ""))
        text = Text(printable(row.text), style=style)
        console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
