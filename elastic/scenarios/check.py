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


# ------------------------------------------------------------- what several checks are held against

# float32, absolute: sums in another order, over a whole run of AdamW that was resized
TOLERANCE = 5e-4
LOSS = Bound(
    "worst_loss_difference",
    "of any step, from that of one process in plain torch (absolute, float32), over a whole run of "
    "AdamW that was resized",
    most=TOLERANCE,
)
NONE_LOST = Bound("steps_lost", "a change that is known beforehand costs no step", most=0)
KEPT = Bound(
    "steps_before_acknowledged_copy",
    "a loss costs at most the steps since the last acknowledged peer replica",
    most=0,
)
CONTENT = Bound(
    "content_equal", "position-keyed digests of all tensors before and after the move", least=1
)
FROM_MEMORY = Bound(
    "from_memory", "the state comes from the memory of those that hold it, not from disk", least=1
)
FASTER = Bound(
    "pause_vs_start",
    "a change must take less than starting the run did, launch to first step, in the same run",
    most=1.0,
)
FOUND = Bound(
    "wrongly_found",
    "what was done is found out, of the workers that it was done to and of no others",
    most=0,
)
MEASURED = Bound(
    "not_measured", "a node is measured before it takes part, one that joins with its link", most=0
)
NOT_STARTED = Bound(
    "workers_started_again",
    "workers that were not hit keep their processes, whatever happens to others and to the driver",
    most=0,
)
ENDED = Bound("ended_otherwise", "it ends as it was asked to", most=0)
ORDERS = Bound(
    "orders_wrong",
    "each order has a reason, generations only rise and are entered once, no plan has a node that "
    "is known as lost, nothing is ordered after the end",
    most=0,
)
SAMPLES = Bound(
    "wrong_samples",
    "each step counts once, on the samples that seed and step give, whatever the nodes",
    most=0,
)
CONTENTS = Bound(
    "contents_that_differ",
    "position-keyed digests of all tensors before and after each transition",
    most=0,
)
REPLAY = Bound(
    "decisions_that_differ", "every decision of the run taken again from its journal alone", most=0
)
BILL = Bound(
    "bill_wrong",
    "the ledger's sum is what the policy counted, no part is below zero, nothing is paid later",
    most=0,
)
LEFT = Bound("processes_left", "nothing that the run started may outlive it", most=0)
