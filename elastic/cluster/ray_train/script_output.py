"""What the output of a script tells: its steps and losses, and how it failed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.config.numbers.logged_names import NAME, STEP_NAMES, checked_names, number_of
from elastic.errors import ProgramError
from elastic.text import CURSOR, uncolored

# of a bar that is named so the steps done, not how many per cent they are
STEP = re.compile(
    r"\b(?:step|iter(?:ation)?)\b[\s:=#]*(?:\d+%\|.*\|\s*)?(\d+)(?![\d.]*%)", re.IGNORECASE
)
LOSS = re.compile(r"\bloss\b[\s:=]*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.IGNORECASE)
# its steps are none of the training
VALIDATES = re.compile(
    r"\b(?:val|valid|validation|eval|evaluation)\b.*?\b(?:step|iter(?:ation)?)\b", re.IGNORECASE
)
EPOCH = re.compile(r"\bepoch\b[\s:=#\[]*(\d+)", re.IGNORECASE)
# transformers.Trainer logs a dict of its losses without the step, and draws its bar anew after it
HF_LOSS = re.compile(r"^\s*\{.*'loss': '?([-+]?[\d.]+(?:[eE][-+]?\d+)?)'?[,}].*'epoch':")
HF_EVAL = re.compile(r"\{.*'eval_loss': '?([-+]?[\d.]+(?:[eE][-+]?\d+)?)'?[,}].*'epoch':")
BAR = re.compile(r"\d+%\|.*\|\s*(\d+)/(\d+)\s*\[")  # of tqdm: steps done, of how many
OF_RANK = re.compile(r"^\[rank \d+\] ?")  # put before a line for a person
BAR_EVERY_S = 10.0  # a person is shown a bar so often
LOGGED = "elastic.log "  # what a line of elastic.log begins with
# of ray.train.report: its number, counted over the run where that is known, and what it tells
REPORT_LINE = "ray.train.report{n}: {told}"
REPORT = re.compile(r"ray\.train\.report(?: (\d+))?: (\{.*\})$")
TRACEBACK = "Traceback (most recent call last):"
AGAIN = (
    "note: step numbers begin again at each epoch: step {step} after step {newest} counts as step "
    "{counted} of the run, and so do metrics and drills; number them over the whole run to have "
    "one number everywhere"
)


def step_in(line: str) -> tuple[int, float] | None:
    """The step and the loss that a line of output names, as in `step 40: loss 2.31`; None where one
    of them is missing."""
    step, loss = STEP.search(line), LOSS.search(line)
    return (int(step[1]), float(loss[1])) if step and loss else None


@dataclass
class StepReader:
    """Reads steps out of one group's lines, in their order. `_loss`, `_evaluated`: logged by a
    Trainer of transformers, whose next bar says at which step. `evaluations`: step -> loss of the
    validation set, until somebody takes them. `_total`: of the bar of the training; others are
    drawn too, of an evaluation, of files that are written.

    A number that falls, or is that of the epoch before, is of a new epoch. `before`: the steps
    before each one; with those of the group before, `first_most` says the most that the first step
    of this one is. `note`: that it is so, said of the first one, until somebody takes it."""

    before: list[int] = field(default_factory=lambda: [0])
    first_most: int = 0
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    note: str = ""
    _loss: float | None = None
    _evaluated: float | None = None
    _total: str = ""
    _bar_s: float = -math.inf
    _logged: dict[str, float] = field(default_factory=dict)  # since the step before
    _newest: int | None = None  # as it was printed
    _epoch: str = ""  # likewise, of that one; '' = its line names none
    _by_report: bool = False  # its steps are reports, since it prints none

    def read(self, line: str) -> tuple[int, float] | None:
        """The step that is known with this line, and its loss."""
        line = uncolored(line)
        if line.startswith(LOGGED):
            self._logged |= logged_in(line)
            return None
        if reported := REPORT.search(line):
            return self._reported(float(reported[1] or math.nan), reported[2])
        if found := step_in(line):
            self._by_report = False
            return None if self._is_other(found[0], line) else self._counted(*found, line)
        if logged := HF_LOSS.search(line):
            self._loss = float(logged[1])
            return None
        if evaluated := HF_EVAL.search(line):
            self._evaluated = float(evaluated[1])
            return None
        bar = BAR.search(line)
        if bar is not None and self._evaluated is not None and self._total in ("", bar[2]):
            self.evaluations.append((self.before[-1] + int(bar[1]), self._evaluated))
            self._evaluated = None
        if bar is None or self._loss is None:
            return None
        loss, self._loss, self._total = self._loss, None, bar[2]
        self._by_report = False
        return self._counted(int(bar[1]), loss, "")

    def _reported(self, n: float, text: str) -> tuple[int, float] | None:
        """The n-th report of the run is a step where it tells a loss: the one that it names, else,
        of a script that prints none, the n-th."""
        told = numbers_in(text)
        own = self._newest is not None and not self._by_report
        step = told.get("step", math.nan if own else n)
        name = "loss" if "loss" in told else "train_loss"
        if known := math.isfinite(step) and math.isfinite(told.get(name, math.nan)):
            self._by_report = "step" not in told
            found = self._counted(int(step), told.pop(name), "")
        self._logged |= {one: told[one] for one in told if one not in STEP_NAMES}
        return found if known else None

    def _is_other(self, step: int, line: str) -> bool:
        """Does the line begin no epoch, but tell of a validation in one?"""
        return self._newest is not None and step < self._newest and bool(VALIDATES.search(line))

    def _counted(self, step: int, loss: float, line: str) -> tuple[int, float]:
        """The step as one of the run, and its loss."""
        named = EPOCH.search(line)
        epoch = named[1] if named and not VALIDATES.search(line) else ""
        if self._newest is None:
            while len(self.before) > 1 and self.before[-1] + step > self.first_most:
                self.before.pop()
        elif step < self._newest or (step == self._newest and epoch and epoch != self._epoch != ""):
            self.before.append(self.before[-1] + self._newest)
            if len(self.before) == 2:
                counted = self.before[-1] + step
                self.note = AGAIN.format(step=step, newest=self._newest, counted=counted)
        self._newest, self._epoch = step, epoch or self._epoch
        return self.before[-1] + step, loss

    def taken(self) -> dict[str, float]:
        """What elastic.log has told since it was asked last."""
        found, self._logged = self._logged, {}
        return found

    def shown(self, lines: Sequence[str], now_s: float) -> list[str]:
        """Those for a person: a bar is drawn many times a second, and wiped out with spaces. The
        log has all of them."""
        found = []
        for line in lines:
            if line.startswith(LOGGED):
                continue
            if BAR.search(line):
                if now_s - self._bar_s < BAR_EVERY_S:
                    continue
                self._bar_s = now_s
            text = CURSOR.sub("", line)
            if OF_RANK.sub("", text).strip():
                found.append(text)
        return found


def logged_in(line: str) -> dict[str, float]:
    """The numbers of a line of elastic.log; none where something else has printed such a line."""
    try:
        found = json.loads(line.removeprefix(LOGGED))
        return {
            name: number_of(value, name, "") for name, value in checked_names(found, "").items()
        }
    except (ValueError, ProgramError):
        return {}


def numbers_in(text: str) -> dict[str, float]:
    """Those of a report; what else may stand there is left out."""
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return {
        name: float(value)
        for name, value in told.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and NAME.fullmatch(name)
    }


def error_part(tail: str) -> str:
    """Of the end of a rank's output its last traceback; all of it where it has none."""
    lines = tail.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line.strip() == TRACEBACK]
    if not starts:
        return tail
    body = lines[starts[-1] + 1 :]
    end = next((i for i, line in enumerate(body) if line and not line[0].isspace()), len(body))
    return "\n".join([TRACEBACK, *body[: end + 1]])
