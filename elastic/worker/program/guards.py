"""Guards: functions of what all ranks have seen in a commit, so that all of them, and a rank that
rolls forward, agree.

What they remember (the last losses and norms) is a box of the training state: it is rolled back,
resized and stored with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

import torch

from elastic.errors import SpecError
from elastic.program import Program
from elastic.types import BlockNormRule, GradNormRule, GuardRule, GuardRules, Job, LossSpikeRule
from elastic.worker.program.commit import Commit

MEMORY = "guards"  # name of the memory among the extra state
# median absolute deviation of a normal distribution -> its standard deviation
MAD_TO_SIGMA = 1.4826
SPREAD_LEAST = 0.01  # of a logarithm: below that a loss is as good as constant


@dataclass(frozen=True)
class Trip:
    """A guard has tripped at `step`: what is done, and why, in a sentence."""

    guard: str
    step: int
    do: Literal["skip", "rollback", "stop"]
    reason: str
    more: str = ""  # why not what the guard does at first


# ------------------------------------------------------------------------------------------- memory


@dataclass
class RecentValues:
    """The last `size` values, oldest first."""

    size: int
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values = [*self.values, value][-self.size :]

    def as_tensor(self) -> torch.Tensor:
        """float64 [size]; NaN where there is no value yet."""
        return torch.tensor(
            [math.nan] * (self.size - len(self.values)) + self.values, dtype=torch.float64
        )

    def take(self, tensor: torch.Tensor) -> None:
        self.values = [value for value in tensor.tolist() if not math.isnan(value)][-self.size :]


class GuardMemory:
    """What the guards of a job remember between steps; extra state of the program."""

    def __init__(self, rules: GuardRules) -> None:
        self.losses, self.norms = (
            RecentValues(rule.window if rule else 1) for rule in (rules.loss_spike, rules.grad_norm)
        )
        self.in_a_row = 0  # steps that were skipped, one after another

    def state_dict(self) -> dict[str, Any]:
        row = torch.tensor([self.in_a_row], dtype=torch.int64)
        return {"losses": self.losses.as_tensor(), "norms": self.norms.as_tensor(), "in_a_row": row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses.take(state["losses"])
        self.norms.take(state["norms"])
        self.in_a_row = int(state["in_a_row"][0])

    def applied(self, commit: Commit) -> None:
        """The step's numbers are good ones."""
        self.in_a_row = 0
        for window, value in ((self.losses, commit.train_loss), (self.norms, commit.grad_norm)):
            if value > 0:
                window.add(math.log(value))

    def skipped(self) -> None:
        self.in_a_row += 1


def needs_memory(rules: GuardRules) -> bool:
    """Does any guard skip steps, or compare with steps before?"""
    return any(
        getattr(rule, "z", None)
        or rule.do == "skip"
        or (rule.do, rule.again) == ("rollback", "skip")
        for rule in rules.watched
    )


def with_memory(program: Program, job: Job) -> Program:
    """The program with the guards' memory as extra state, where they need one. Raises SpecError
    where its name is taken."""
    rules = job.guards
    if not needs_memory(rules) or isinstance(program.extra_state.get(MEMORY), GuardMemory):
        return program
    if MEMORY in program.extra_state:
        raise SpecError(
            f"extra_state['{MEMORY}']: the name is taken by the job's guards; choose another"
        )
    return replace(program, extra_state={**program.extra_state, MEMORY: GuardMemory(rules)})


# ----------------------------------------------------------------------------------------- judgment


def deviations(values: Sequence[float], value: float) -> tuple[float, float]:
    """How many robust standard deviations `value` lies above the median of `values`; and the
    median."""
    middle = median(values)
    spread = MAD_TO_SIGMA * median([abs(other - middle) for other in values])
    return (value - middle) / max(spread, SPREAD_LEAST), middle


def judge(
    rules: GuardRules, memory: GuardMemory | None, commit: Commit, *, blocks: Mapping[str, float]
) -> tuple[str, str] | None:
    """The first guard that trips, and why; None = the step is good. `blocks`: norm of the gradient
    of each block, where it was asked for in this step."""
    if not commit.finite or commit.overflowed:
        return (
            "not_finite",
            f"train_loss {commit.train_loss:.6g}, gradient norm {commit.grad_norm:.6g}",
        )
    losses, norms = (memory.losses, memory.norms) if memory else (None, None)
    if found := _spike("train_loss", commit.train_loss, rules.loss_spike, window=losses):
        return "loss_spike", found
    rule, norm, what = rules.grad_norm, commit.grad_norm, "gradient norm"
    if rule and (found := _bounds(what, norm, rule) or _spike(what, norm, rule, window=norms)):
        return "grad_norm", found
    for name, value in blocks.items():
        if rules.block_norm and (found := _bounds(f"{what} of {name}", value, rules.block_norm)):
            return "block_norm", found
    return None


def _spike(
    what: str,
    value: float,
    rule: LossSpikeRule | GradNormRule | None,
    *,
    window: RecentValues | None,
) -> str:
    if rule is None or not rule.z or window is None:
        return ""
    if value <= 0 or len(window.values) < rule.after:
        return ""
    z, middle = deviations(window.values, math.log(value))
    if z <= rule.z:
        return ""
    return (
        f"{what} {value:.6g} is {z:.1f} robust deviations above the median {math.exp(middle):.6g} "
        f"of the last {len(window.values)} steps (at most {rule.z:g})"
    )


def _bounds(what: str, value: float, rule: GradNormRule | BlockNormRule) -> str:
    if rule.most is not None and value > rule.most:
        return f"{what} {value:.6g} explodes (at most {rule.most:g})"
    if rule.least is not None and value < rule.least:
        return f"{what} {value:.6g} vanishes (at least {rule.least:g})"
    return ""


def trip_of(
    found: tuple[str, str],
    rule: GuardRule,
    step: int,
    *,
    before: Sequence[tuple[str, int]],
    in_a_row: int,
) -> Trip:
    """What is done about it. `before`: guards and steps that the run was rolled back for;
    `in_a_row`: steps just skipped."""
    guard, reason = found
    do, more = rule.do, ""
    steps = [s for name, s in before if name == guard]
    if do == "rollback" and (step in steps or len(steps) >= rule.rollbacks):
        do = rule.again
        times = "one roll-back" if len(steps) == 1 else f"{len(steps)} roll-backs"
        look = "look at these samples and at the learning rate"
        more = f"again, after {times}: {'the step is skipped' if do == 'skip' else look}"
    if do == "skip" and in_a_row >= rule.in_a_row:
        do = "stop"
        more = f"{in_a_row} steps in a row were skipped before it: this is no single bad batch"
    return Trip(guard, step, do, f"step {step}: {reason}", more)
