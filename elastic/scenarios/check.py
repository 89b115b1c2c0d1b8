"""What a check found, the bounds that it was held against, and the lines that show it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic.errors import InternalError

Verdict = Literal["pass", "fail", "not run"]
VERDICTS: tuple[Verdict, ...] = ("pass", "fail", "not run")
WIDTH = 128
ERROR_MOST = 600


@dataclass(frozen=True)
class Bound:
    """The figure may be at most (at least) so much. `source`: where the number comes from."""

    figure: str
    source: str
    most: float | None = None
    least: float | None = None

    def __str__(self) -> str:
        sign, value = ("<=", self.most) if self.most is not None else (">=", self.least)
        return f"{self.figure} {sign} {shown(value)}"

    def broken_by(self, figures: Mapping[str, Any]) -> str:
        """How it is broken; '' = it holds. A figure that is missing or no number breaks it."""
        value = figures.get(self.figure)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"{self.figure} is {value}, not a number to hold against {self}"
        if self.most is not None and value > self.most:
            return f"{self.figure} is {shown(value)}, more than {shown(self.most)}"
        if self.least is not None and value < self.least:
            return f"{self.figure} is {shown(value)}, less than {shown(self.least)}"
        return ""


@dataclass(frozen=True)
class Check:
    """One thing that was tried. `why`: the error, or the reason that it was not run; `where`: on
    what it was tried."""

    name: str
    verdict: Verdict
    figures: dict[str, Any] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()
    seconds: float = 0.0
    why: str = ""
    where: str = ""

    def line(self) -> str:
        """For a person: verdict, name, place, numbers, bounds, reason."""
        numbers = ", ".join(f"{name} {shown(value)}" for name, value in self.figures.items())
        held = "; ".join(map(str, self.bounds))
        parts = [
            f"({self.where})" if self.where else "",
            numbers,
            f"[{held}]" if held else "",
            self.why,
        ]
        text = f"{self.verdict:7}  {self.name:34} {self.seconds:6.1f} s  "
        return (text + "  ".join(part for part in parts if part)).rstrip()

    def lines(self) -> list[str]:
        """The same; what is too long continues in the next line, so that numbers and errors are
        whole."""
        out, line = [], self.line()
        while len(line) > WIDTH:
            cut = line.rfind(" ", 60, WIDTH)
            cut = cut if cut > 0 else WIDTH
            out.append(line[:cut].rstrip())
            line = " " * 12 + line[cut:].strip()
        return [*out, line]


def judge(name: str, figures: Mapping[str, Any], bounds: Sequence[Bound]) -> Check:
    """Pass where every bound holds. Raises InternalError for a check without a bound: it could not
    fail."""
    if not bounds or any((bound.most is None) == (bound.least is None) for bound in bounds):
        raise InternalError(
            f"check '{name}' has no bound, or one without a number, so that it could not fail"
        )
    broken = [text for text in (bound.broken_by(figures) for bound in bounds) if text]
    rounded = {
        key: float(f"{value:.6g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }
    return Check(name, "fail" if broken else "pass", rounded, tuple(bounds), why="; ".join(broken))


def failed(name: str, error: BaseException) -> Check:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return Check(
        name,
        "fail",
        why=text
        if len(text) <= ERROR_MOST
        else text[: ERROR_MOST // 2] + " ... " + text[-ERROR_MOST // 2 :],
    )


def not_run(name: str, why: str) -> Check:
    return Check(name, "not run", why=why)


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
