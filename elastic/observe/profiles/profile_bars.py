"""Where the time of traced steps went, as stacked bars of letters (color only helps) and a table
beside what was planned; and tokens/s by the number of workers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.observe.reporting.pictures import OTHER, blank, letters, ordered, saved, stacked
from elastic.observe.run_tables import columns

# part -> letter, color, what it is
PARTS = {
    "compute": ("C", "#1f618d", "forward and backward passes"),
    "optimizer": ("O", "#808b96", "optimizer update"),
    "fsdp": ("f", "#229954", "waiting for shards that are gathered or scattered"),
    "dp_replicate": ("r", "#52be80", "waiting for sums over replicas"),
    "tp": ("t", "#af7ac5", "waiting for tensor-parallel sums"),
    "cp": ("c", "#7d3c98", "waiting for keys and values of other ranks"),
    "ep": ("e", "#5499c7", "waiting for tokens on their way to experts"),
    "pp": ("p", "#e59866", "sending between pipeline stages"),
    "bubble": ("b", "#cb4335", "waiting for another pipeline stage"),
    "commit": ("k", "#34495e", "the step's last all-reduce, and whom it waits for"),
    "other ranks": ("o", "#5b2c6f", "collectives of no axis that is known"),
    "data": ("d", "#d4ac0d", "waiting for the batch"),
    "copies": ("y", "#6e2c00", "waiting for copies of the state"),
    "idle": (".", "#abb2b9", "no operation: Python, and waits that have no name"),
}
# what the planner says beyond these -> the part that it is in a trace
PLANNED = {
    "products": "compute", "attention": "compute", "moved": "compute", "recomputed": "compute",
    "accumulate": "compute", "replicas": "dp_replicate",
}  # fmt: skip


def planned_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """The planner's parts of a step by their names in a trace."""
    found: dict[str, float] = {}
    for name, seconds in parts.items():
        if seconds > 0:
            part = PLANNED.get(name, name)
            found[part] = found.get(part, 0.0) + seconds
    return found


def profile_lines(data: Mapping[str, Any], width: int = 100) -> list[str]:
    """A bar for each rank, one for all, and a line for each part."""
    ranks, total = data["ranks"], data["total"]
    steps = ranks[0]["steps"]
    lines = [
        f"run {data['run']}, profile {data['profile_id']}: steps {steps[0]} to {steps[-1]}, "
        f"{data['layout']}, {milliseconds(total['step_s'])} a step while it was traced",
        "",
    ]
    names = [f"rank {one['rank']} {one['at']}".rstrip() for one in ranks] + ["all"]
    room = max(10, width - max(map(len, names)) - 1)
    longest = max(one["step_s"] for one in (*ranks, total))
    for name, one in zip(names, (*ranks, total), strict=True):
        lines.append(f"{name:<{max(map(len, names))}} {bar(one['parts'], longest, room)}")
    planned = data["planned"]
    rows = [("", "PART", "A STEP", "SHARE", "PLANNED", "")]
    for part in ordered([*total["parts"], *(planned["parts"] if planned else ())], PARTS):
        letter, _, about = PARTS.get(part, OTHER)
        seconds = total["parts"].get(part, 0.0)
        wanted = milliseconds(planned["parts"].get(part, 0.0) if planned else None)
        share = f"{seconds / total['step_s']:.1%}"
        rows.append((letter, part, milliseconds(seconds), share, wanted, about))
    wanted = milliseconds(planned["step_s"] if planned else None)
    rows.append(("", "step", milliseconds(total["step_s"]), "", wanted, ""))
    lines += ["", *columns(rows, right=(2, 3, 4)), ""]
    if planned and not planned["hardware_known"]:
        lines.append(
            "planned: on default hardware, as nobody has measured this; elastic profile JOB does"
        )
    return [*lines, f"traces for Perfetto (https://ui.perfetto.dev): {data['folder']}"]


def bar(parts: Mapping[str, float], whole: float, room: int) -> str:
    """`[CCCCffftt..]`, as long as its share of `whole`."""
    text = "".join(drawn for drawn, _ in letters(parts, PARTS, whole, room=room - 2))
    return f"[{text}]"


def milliseconds(seconds: float | None) -> str:
    """`-`: not known."""
    if seconds is None:
        return "-"
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


# --------------------------------------------------------------------------------------- scaling


def scaling_lines(data: Mapping[str, Any], width: int = 100) -> list[str]:
    """A row and a bar for each number of workers."""
    rows = [("WORKERS", "LAYOUT", "STEP", "TOKENS/S", "LINEAR", "EFFICIENCY", "PLANNED")]
    for one in data["scale"]:
        planned = one["planned_tokens_per_s"]
        rows.append(
            (
                str(one["workers"]), one["layout"], milliseconds(one["step_s"]),
                f"{one['tokens_per_s']:,.0f}", f"{one['linear_tokens_per_s']:,.0f}",
                f"{one['efficiency']:.0%}", f"{planned:,.0f}" if planned else "-",
            )
        )  # fmt: skip
    lines = [f"job {data['job']}", *columns(rows, right=(0, 2, 3, 4, 5, 6)), ""]
    for one in data["scale"]:
        if one["parts"]:
            whole = sum(one["parts"].values())
            lines.append(f"{one['workers']:>4} {bar(one['parts'], whole, width - 5)}")
    used = ordered([name for one in data["scale"] for name in one["parts"]], PARTS)
    lines += [f"  {PARTS.get(p, OTHER)[0]} {p}: {PARTS.get(p, OTHER)[2]}" for p in used]
    if not all(one["hardware_known"] for one in data["scale"]):
        lines.append(
            "planned: '-' where nobody has measured the hardware; elastic profile JOB does"
        )
    return lines


def save_scaling(data: Mapping[str, Any], path: str | Path) -> Path:
    """Tokens/s by workers beside linear and planned, and the shares of a step. Returns the file."""
    rows = data["scale"]
    figure, (left, right) = blank(12, 4.8, columns=2)
    n = [one["workers"] for one in rows]
    left.plot(n, [one["tokens_per_s"] for one in rows], "o-", color="#1f618d", label="measured")
    left.plot(
        n, [one["linear_tokens_per_s"] for one in rows], "--", color="#808b96", label="linear"
    )
    if all(one["planned_tokens_per_s"] for one in rows):
        planned = [one["planned_tokens_per_s"] for one in rows]
        left.plot(n, planned, "s:", color="#229954", label="planned")
    left.set(xlabel="workers", ylabel="tokens/s", xticks=n, ylim=(0, None))
    shares = [
        {part: s / (sum(one["parts"].values()) or 1) for part, s in one["parts"].items()}
        for one in rows
    ]
    stacked(right.bar, shares, PARTS, start="bottom", at=[str(each) for each in n])
    right.set(xlabel="workers", ylabel="share of a step")
    left.legend(frameon=False)
    right.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(f"{data['job']}: scaling", fontsize=11)
    return saved(figure, path)
