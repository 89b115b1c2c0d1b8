"""Amounts and names in the words of a message."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

GIB, MIB = 2**30, 2**20
DAY_S = 86400.0
RANKS_SHOWN, PLACES_SHOWN = 4, 6
LOG_MARK = "--- elastic: "  # begins lines of a worker's log that stay there: they are not shown
# what commands a terminal: control characters but newline and tab, halves of characters, and what
# turns the order of letters around
_COMMANDS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
_LINE_END = re.compile(r"\r+(?=\n|\Z)")
# what moves or hides the cursor, or wipes out what stands behind it, as bars do
CURSOR = re.compile(r"\x1b\[\??[0-9;]*[A-HJKSTfhlsu]")
_COLORS = re.compile(r"(\x1b\[[0-9;]*m)")
RESET = "\x1b[0m"


def n_of(n: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def ranks_of(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1, 2, 4 and 12 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:RANKS_SHOWN]))}{more}"


def ranks_by_place(places: Mapping[int, str]) -> str:
    """`rank 0 stood at a.py, line 3, ranks 1, 2 at a.py, line 9`."""
    found: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        found.setdefault(place, []).append(rank)
    said = [f"{ranks_of(ranks)} at {place}" for place, ranks in found.items()]
    more = (
        f" and {n_of(len(said) - PLACES_SHOWN, 'more place')}" if len(said) > PLACES_SHOWN else ""
    )
    return ", ".join(said[:PLACES_SHOWN]).replace(" at ", " stood at ", 1) + more


def count(value: float) -> str:
    """`15 T`, `1.2 k`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"


def printable(text: str) -> str:
    """For a terminal: what would command it (`\\x1b`) is escaped; letters of all kinds, lines (also
    with `\\r\\n`) and tabs stay."""
    if text.isprintable():
        return text
    text = _LINE_END.sub("", text)
    return _COMMANDS.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def uncolored(text: str) -> str:
    """What a program has printed, without colors and what moves the cursor."""
    return _COLORS.sub("", CURSOR.sub("", text))


def program_output(text: str, *, colored: bool) -> str:
    """The same of what a program has printed, where bars and colors are usual: what moves the
    cursor is left out; colors end with their line, or are left out, too."""
    return "\n".join(_output_line(line, colored) for line in CURSOR.sub("", text).split("\n"))


def _output_line(line: str, colored: bool) -> str:
    parts = _COLORS.split(line)  # a text, a color, a text, ...
    if len(parts) == 1 or not colored:
        return printable("".join(parts[::2]))
    shown = "".join(part if k % 2 else printable(part) for k, part in enumerate(parts))
    return shown if shown.endswith(RESET) else shown + RESET


def one_line(text: str, most: int) -> str:
    """The same as one line, of at most that many characters and how many there were."""
    line = " ".join(text.split())
    if len(line) > most:
        line = f"{line[:most]}... ({len(line)} characters)"
    return printable(line)


# -------------------------------------------------------------------------------------------- bytes


def size(n_bytes: float) -> str:
    """Of files and messages: `1234567` -> `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def memory_size(n_bytes: float) -> str:
    """Of memory, roughly: `61.2 GiB`, `512 MiB`."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= 0.95 * GIB else f"{n_bytes / MIB:.0f} MiB"


def gib(n_bytes: float) -> str:
    """Of memory, where little is missing: `61.23 GiB`."""
    return f"{n_bytes / GIB:.2f} GiB"


# --------------------------------------------------------------------------------------------- time


def seconds(value: float) -> str:
    """`12 ms`, `3.45 s`, `2.5 h`."""
    if value >= 600:
        return hours(value / 3600)
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def hours(value: float | None) -> str:
    """`12 s`, `30 min`, `2.5 h`, `12.3 days`; `-` for nothing."""
    if not value:
        return "-"
    if value < 1:
        return f"{value * 60:.0f} min" if value * 60 >= 1 else f"{value * 3600:.0f} s"
    if value < 48:
        return f"{value:.1f} h"
    return f"{value / 24:.1f} days" if value < 24 * 730 else f"{value / 24 / 365:.1f} years"


def duration(value_s: float | None) -> str:
    """As a clock shows it: `75` -> `1:15`."""
    if value_s is None:
        return "-"
    minutes, rest = divmod(max(0, round(value_s)), 60)
    whole_h, minutes = divmod(minutes, 60)
    return f"{whole_h}:{minutes:02d}:{rest:02d}" if whole_h else f"{minutes}:{rest:02d}"


def span(value_s: float) -> str:
    """`4.6 s`, `1:52:25`, `20.7 days`."""
    if value_s < 60:
        return f"{value_s:.1f} s"
    return f"{value_s / DAY_S:.1f} days" if value_s >= 2 * DAY_S else duration(value_s)


# ------------------------------------------------------------------------------------------ dollars


def usd_number(value: float | None) -> str:
    """Dollars without their sign, as many digits as tell something; `-` for nothing."""
    if not value:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


def usd(value: float) -> str:
    return f"${value / 1e6:.3g} M" if value >= 1e6 else f"${usd_number(value) if value else 0}"
