"""scored(): predictions against the published measurements of a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic import catalog
from elastic.errors import SpecError
from elastic.planner.published.measurements import COLUMNS
from elastic.planner.published.score import Score, score

MEASURED = "tokens_per_s_per_gpu"


def scored(file: str | Path) -> Score:
    """Raises SpecError with the file, the row and the column."""
    rows = _rows(Path(file), str(file))
    for row in rows:
        if row["gpu"]:
            _check_gpu(row, str(file))
    if not any(all(row.get(column) for column in (*COLUMNS, MEASURED)) for row in rows):
        raise SpecError(
            f"{file}: no row has all of {', '.join((*COLUMNS, MEASURED))}, so that there is "
            "nothing to compare"
        )
    try:
        return score(rows)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None


def _rows(path: Path, shown: str) -> Sequence[Mapping[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SpecError(
            f"{shown}: cannot be read: {why}; give a CSV file of measurements"
        ) from error
    missing = [column for column in (*COLUMNS, MEASURED) if column not in columns]
    if missing:
        raise SpecError(
            f"{shown}: column '{missing[0]}' is missing; it needs {', '.join((*COLUMNS, MEASURED))}"
        )
    for line, row in rows:
        if None in row or None in row.values():
            raise SpecError(
                f"{shown}: row {row.get('id') or f'in line {line}'}: it has not as many cells as "
                "the header"
            )
    return [{**row, "id": row.get("id") or f"in line {line}"} for line, row in rows]


def _check_gpu(row: Mapping[str, str], shown: str) -> None:
    try:
        catalog.find_chip(row["gpu"])
    except SpecError as error:
        raise SpecError(f"{shown}: row {row['id']}: gpu: {error}") from None
