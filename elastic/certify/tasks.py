"""The minutes, divided: each task gets its share of what is left, and what does not fit is said to
be not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from elastic.scenarios.check import Check, failed, not_run
from elastic.scenarios.limit import Failed as Failed
from elastic.scenarios.limit import Limit as Limit
from elastic.scenarios.limit import OutOfTime as OutOfTime

HERE = "this host"
MORE = 1.5  # times the time that was not enough: only then another try may help


class TaskRefused(Exception):
    """The machine does not offer what the task needs; the message says what it says."""


@dataclass(frozen=True)
class Task:
    """Checks that are made together. `work` yields them in the order of `names`; it is not begun
    with less than `least_s`; `weight`: its share of what is left, against those that come after it;
    `where`: what its checks are tried on."""

    names: tuple[str, ...]
    work: Callable[[Limit], Iterator[Check]]
    least_s: float
    weight: float
    where: str = HERE


@dataclass
class Tasks:
    """Carries tasks out, one after the other. `tell` gets each check as it is done."""

    tell: Callable[[Check], None]
    checks: list[Check] = field(default_factory=list)
    interrupted: bool = False

    def run(self, tasks: Sequence[Task], budget_s: float) -> None:
        """Returns also at Ctrl-C; what was not done by then is not run. What had too little time is
        tried once more at the end if others have left half as much again as it had."""
        limit = Limit.after(budget_s)
        # task, the time that was not enough, what was said
        short: list[tuple[Task, float, str]] = []
        for i, task in enumerate(tasks):
            share_s = limit.left_s * task.weight / sum(later.weight for later in tasks[i:])
            share_s = max(share_s, min(task.least_s, limit.left_s))
            why = self._tried(task, share_s)
            if why:
                short.append((task, max(task.least_s, MORE * share_s), why))
        for task, need_s, why in short:
            still = self._tried(task, limit.left_s) if limit.left_s >= need_s else why
            self._rest(task, still)

    def _tried(self, task: Task, share_s: float) -> str:
        """Why it needs more time; '' = it does not: all its checks have been noted."""
        if self.interrupted:
            self._rest(task, "interrupted before its turn")
        elif share_s < task.least_s:
            return (
                f"needs about {task.least_s:.0f} s, {max(0.0, share_s):.0f} s were left for it: "
                "give more --minutes"
            )
        else:
            try:
                return self._one(task, Limit.after(share_s))
            except KeyboardInterrupt:
                self.interrupted = True
                self._rest(task, "interrupted")
        return ""

    def _one(self, task: Task, limit: Limit) -> str:
        began = time.monotonic()
        try:
            for check in task.work(limit):
                if not self._has(check.name):  # a second try starts over
                    self.note(
                        replace(
                            check,
                            seconds=round(time.monotonic() - began, 2),
                            where=check.where or task.where,
                        )
                    )
                began = time.monotonic()
        except OutOfTime as reason:
            return str(reason)
        except TaskRefused as reason:
            self._rest(task, str(reason))
        except Exception as error:  # noqa: BLE001 - the boundary of a check: whatever is raised in it is its result
            name = next(
                (n for n in task.names if not self._has(n)), task.names[-1] + " (afterwards)"
            )
            self.note(
                replace(
                    failed(name, error),
                    seconds=round(time.monotonic() - began, 2),
                    where=task.where,
                )
            )
            self._rest(task, f"{name} failed before its turn")
        self._rest(task, "it gave no result")
        return ""

    def _has(self, name: str) -> bool:
        return any(check.name == name for check in self.checks)

    def _rest(self, task: Task, why: str) -> None:
        for name in task.names:
            if not self._has(name):
                self.note(not_run(name, why))

    def note(self, check: Check) -> None:
        self.checks.append(check)
        self.tell(check)
