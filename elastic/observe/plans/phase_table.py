"""The table of a job's phases that `elastic plan` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.observe.run_tables import columns
from elastic.text import count, hours, seconds, usd


def phase_table(data: Mapping[str, Any]) -> list[str]:
    """[] where the job has none."""
    if not data.get("phases"):
        return []
    unit = data["model"]["unit"]
    head = ("PHASE", "FROM STEP", "STEPS", "BATCH", "SAMPLE", "LAYOUT", "STEP", "TIME", "USD")
    rows = [
        (
            str(row["phase"]), f"{row['from_step']:,}", f"{row['steps']:,}",
            f"{row['global_batch']:,}", f"{row['sample_tokens']:,}", row["layout"],
            seconds(row["step_s"]), hours(row["hours"]), usd(row["usd"]) if row["usd"] else "-",
        )
        for row in data["phases"]
    ]  # fmt: skip
    whole = data["all_phases"]
    told = f"all phases: {whole['steps']:,} steps, {count(whole['tokens'])} {unit}, "
    told += hours(whole["hours"]) + (f" and {usd(whole['usd'])}" if whole["usd"] else "")
    return ["", *columns([head, *rows], right=(0, 1, 2, 3, 4, 6, 7, 8)), told]
