"""The numbers of a step as a row, and a table of them as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic.config.numbers.logged_names import STEP_NAMES
from elastic.observe.run_view import View

Row = dict[str, Any]

# `tokens`: of the run up to this step, `step_tokens`: of this step; `at_s`: since 1970. Behind them
# come the names of what the user's code has told and of what was evaluated.
COLUMNS = STEP_NAMES
NUMBERS = ("step", "generation", "workers", "tokens", "step_tokens")  # whole ones


def row(done: Any, *, at_s: float, workers: int, tokens: int) -> Row:
    """`done`: a StepDone, or a Point; `tokens`: of the run up to it."""
    rate = done.tokens / done.step_time_s if done.step_time_s > 0 else 0.0
    return {
        "step": done.step, "at_s": round(at_s, 3), "generation": done.generation,
        "workers": workers, "train_loss": done.train_loss, "tokens": tokens,
        "step_tokens": done.tokens, "step_time_s": round(done.step_time_s, 6),
        "tokens_per_s": round(rate, 1), "grad_norm": done.grad_norm, **done.logged,
    }  # fmt: skip


def rows_of(view: View) -> list[Row]:
    """One per step that counts."""
    found, tokens = [], 0
    for point in view.curve():
        tokens += point.tokens
        plan = view.planned.get(point.generation)
        workers = len(plan.ranks) if plan is not None else 0
        made = row(point, at_s=point.at_s, workers=workers, tokens=tokens)
        found.append(made | view.evaluations.get(point.step, {}))
    return found


def columns_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Those of every row, and behind them what was evaluated."""
    return list(dict.fromkeys([*COLUMNS, *(name for one in rows for name in one)]))


def text_of(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], head: bool = True) -> str:
    """As CSV; what a row has not is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def read_rows(text: str) -> list[Row]:
    """The rows of a table that `text_of` made; a torn last line is left out. Raises ValueError
    where it is none."""
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(io.StringIO(whole))
    if rows.fieldnames is None or tuple(rows.fieldnames[: len(COLUMNS)]) != COLUMNS:
        raise ValueError("it is no table of steps")
    return [
        {
            name: int(value) if name in NUMBERS else float(value)
            for name, value in one.items()
            if value
        }
        for one in rows
    ]
