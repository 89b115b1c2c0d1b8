"""What each axis of the layout sends in a step and how long the step waits for it, as planned and
as measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.observe.diagnosis.step_verdicts import SENDS
from elastic.observe.profiles.profile_bars import milliseconds
from elastic.observe.run_tables import columns
from elastic.text import size

# part of a step, as the cost model has it -> its axis
AXES = {name: axis for name, (axis, _) in SENDS.items() if name != "jitter"}
NAMES = {"all axes": "end of step"}  # beside the others it would be read as their sum
HEADS = ("AXIS", "SENDS A STEP", "PLANNED", "MEASURED", "IN COLLECTIVES")


@dataclass(frozen=True)
class AxisRow:
    """`n_bytes`: that a rank sends in a step, as planned; `planned_s`, `measured_s`: that a step
    waits for it, by the cost model and by the newest profile of the generation; `busy_s`: in its
    collectives, those that computation hides included, by that profile. None = not known."""

    axis: str
    n_bytes: float | None = None
    planned_s: float | None = None
    measured_s: float | None = None
    busy_s: float | None = None

    def plain(self) -> dict[str, Any]:
        values = asdict(self)
        return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in values.items()}


def axis_rows(
    n_bytes: Mapping[str, float],
    planned: Mapping[str, float],
    *,
    measured: Mapping[str, float],
    busy: Mapping[str, float],
) -> tuple[AxisRow, ...]:
    """Each by the names of the cost model's parts, {} = nothing of it is known. Axes that nothing
    is known of, and that send nothing, are left out."""
    known: Sequence[Mapping[str, float]] = (n_bytes, planned, measured, busy)
    return tuple(
        AxisRow(axis, *(found.get(name, 0.0) if found else None for found in known))
        for name, axis in AXES.items()
        if any(found.get(name, 0.0) > 0 for found in known)
    )


def shown(rows: Iterable[AxisRow]) -> list[str]:
    """A table; [] = there is nothing to show: no axis, or no time of it that anybody planned or
    measured (the bytes stand in report.json all the same)."""
    rows = list(rows)
    if all(one.planned_s is one.measured_s is one.busy_s is None for one in rows):
        return []
    found = [
        (
            NAMES.get(one.axis, one.axis),
            "-" if one.n_bytes is None else size(one.n_bytes),
            *map(milliseconds, (one.planned_s, one.measured_s, one.busy_s)),
        )
        for one in rows
    ]
    return columns([HEADS, *found], right=(1, 2, 3, 4)) if found else []
