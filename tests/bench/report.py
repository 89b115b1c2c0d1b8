"""What every bench does at its beginning and its end: its command line, one line of JSON, and a
verdict as exit code."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import verdict
from trial import Clock, Failed

BASELINES = Path(__file__).resolve().parent / "baselines.json"


def baselines(bench: str) -> dict[str, dict[str, Any]]:
    """None for a bench whose figures are not compared."""
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(BASELINES.read_text())
    return found.get(bench, {})


def parser(about: str | None) -> argparse.ArgumentParser:
    """What all benches know; SIGTERM now ends one like Ctrl-C."""
    # what was started ends too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended by a signal"))
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="only the line of JSON")
    made.add_argument(
        "--smoke",
        action="store_true",
        help="once through everything in seconds: promises are held, ratios are noise",
    )
    return made


def options(
    about: str | None,
    most_s: float,
    repeats: int = 2,
    parts: Sequence[str] = (),
    smoke_parts: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    values: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """Of a bench's command line. `parts`: what may be measured by itself; `smoke_parts`: those of
    `--smoke` where none is named (default: all); `flags`: more words that only this bench knows,
    and what they do; `values`: words that take a value, and its default."""
    made = parser(about)
    for name, default in (values or {}).items():
        made.add_argument(f"--{name}", default=default, help=f"(default: {default or 'none'})")
    for name, what in (flags or {}).items():
        made.add_argument(f"--{name}", action="store_true", help=what)
    made.add_argument(
        "--repeats",
        type=int,
        help=f"how often each thing is measured (default {repeats}, with --smoke 1)",
    )
    made.add_argument(
        "--most-s",
        type=float,
        default=most_s,
        help=f"bound of the whole bench (default {most_s:.0f})",
    )
    if parts:
        few = f", with --smoke {' '.join(smoke_parts)}" if smoke_parts else ""
        made.add_argument(
            "--parts", nargs="+", choices=parts, help=f"only these (default: all{few})"
        )
    given = made.parse_args()
    if given.repeats is None:
        given.repeats = 1 if given.smoke else repeats
    if parts and given.parts is None:
        given.parts = list(smoke_parts if given.smoke and smoke_parts else parts)
    return given


def finish(
    bench: str, given: argparse.Namespace, measure: Callable[[Clock], Mapping[str, Any]]
) -> int:
    """Measures, prints and judges. 0 = as good as stored, 1 = much worse or not measured."""
    clock = Clock(given.most_s)
    try:
        found = {**measure(clock), **clock.plain()}
    except Failed as error:
        print(f"{bench}: {error}", file=sys.stderr)
        return 1
    return tell(bench, given, found)


def tell(bench: str, given: argparse.Namespace, figures: Mapping[str, Any]) -> int:
    """Prints and judges what was measured: only the parts that were asked for decide."""
    stored = verdict.counted(baselines(bench), getattr(given, "parts", None) or (), given.smoke)
    found = {**figures, "worse": [*verdict.worse(figures, stored), *verdict.unsound(figures)]}
    if not given.json:
        for name, value in found.items():
            print(f"{name:26} {value}")
    print(
        json.dumps({"bench": bench, **({"smoke": True} if given.smoke else {}), "figures": found}),
        flush=True,
    )
    for sentence in found["worse"]:
        print(f"{bench}: {sentence}", file=sys.stderr)
    return 1 if found["worse"] else 0
