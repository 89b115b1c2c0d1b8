"""`elastic certify JOB`: which layouts compute what the job's own program does in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from elastic.errors import SpecError
from elastic.scenarios.check import Check


def certify_job(folder: str, as_json: bool) -> int:
    """Prints a row for each axis. Returns the exit code: 1 where the job names a layout that does
    not compute the same.

    Raises SpecError, and ProgramError for what the program itself raises."""
    from elastic.api.running.entry import loaded
    from elastic.api.running.layout_question import AXES, LayoutCheck, asked_of, axes_of_loop
    from elastic.types.grid import axes_of

    spec, program = loaded(folder)
    pools = tuple(pool.pool() for pool in spec.pools)
    asked = asked_of(spec.model_copy(update={"layout": "auto"}), pools, program)
    if asked is None:
        raise SpecError(f"{folder}: there is nothing to compare: its pools give one worker")
    axes = axes_of_loop(program) if spec.script else AXES
    check = LayoutCheck(
        {**asked, "axes": axes, "tps": (2, 4)}, sys.stderr if as_json else sys.stdout
    )
    try:
        found = check.result()
    finally:
        check.close()
    assert found is not None
    named = {axis for layout in spec.least_layouts() for axis in axes_of(layout)}
    rows = [_row(axis, found.plain(), axis in named, loop=bool(spec.script)) for axis in axes]
    # most programs have no experts
    rows = [row for row in rows if row.name != "ep" or row.verdict != "not run" or row.why]
    if as_json:
        rows_plain = [
            {"axis": row.name, "verdict": row.verdict, "seconds": row.seconds, "why": row.why}
            for row in rows
        ]
        print(
            json.dumps(
                {"job": spec.name, "axes": rows_plain, "notes": list(found.structure.notes)}
            ),
            flush=True,
        )
    else:
        lines = [line for row in rows for line in row.lines()] + [
            f"note: {note}" for note in found.structure.notes
        ]
        print("\n".join(lines), flush=True)
    return int(any(row.verdict == "fail" for row in rows))


def _row(axis: str, found: Mapping[str, Any], named: bool, *, loop: bool = False) -> Check:
    """An axis that is closed to the program fails only where the job's layout has it."""
    from elastic.api.running.layout_question import OF_A_BODY

    equal, why = (found["equal"] or {}).get(axis), found["structure"][f"no_{axis}"]
    if equal is not None:
        return Check(
            axis,
            "pass",
            seconds=equal,
            why=OF_A_BODY
            if loop and axis == "dp"
            else "loss and gradients of a small copy match those of one process",
        )
    if why:
        return Check(axis, "fail" if named else "not run", why=f"closed: {why}")
    plan = (
        "there is no Program.tp"
        if axis == "tp"
        else "there are no blocks to cut between"
        if axis == "pp"
        else ""
    )
    begins = "whether the body of its loop" if loop and axis == "dp" else f"{axis} was "
    noted = next((note for note in found["structure"]["notes"] if note.startswith(begins)), "")
    return Check(axis, "not run", why=found["skipped"] or noted or plan)
