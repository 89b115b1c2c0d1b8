"""What every bench does at its end: one line of JSON, and a verdict as exit code."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import figures
from trial import Clock, Failed

BASELINES = Path(__file__).resolve().parent / "baselines.json"


def baselines(bench: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(BASELINES.read_text())[bench]
    return found


def options(about: str | None, most_s: float, repeats: int = 2, parts: Sequence[str] = ()) -> argparse.Namespace:
    """Of a bench's command line; SIGTERM now ends it like Ctrl-C. `parts`: what may be measured by itself."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("ended by a signal"))  # what was started ends too
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", action="store_true", help="only the line of JSON")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"how often each thing is measured (default {repeats})")
    parser.add_argument("--most-s", type=float, default=most_s, help=f"bound of the whole bench (default {most_s:.0f})")
    if parts:
        parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts), help="only these (default: all)")
    return parser.parse_args()


def finish(bench: str, given: argparse.Namespace, measure: Callable[[Clock], Mapping[str, Any]]) -> int:
    """Measures, prints and judges. 0 = as good as stored, 1 = much worse or not measured."""
    clock = Clock(given.most_s)
    try:
        found = {**measure(clock), **clock.plain()}
    except Failed as error:
        print(f"{bench}: {error}", file=sys.stderr)
        return 1
    found["worse"] = figures.worse(found, baselines(bench))
    if not given.json:
        for name, value in found.items():
            print(f"{name:26} {value}")
    print(json.dumps({"bench": bench, "figures": found}))
    for sentence in found["worse"]:
        print(f"{bench}: {sentence}", file=sys.stderr)
    return 1 if found["worse"] else 0
