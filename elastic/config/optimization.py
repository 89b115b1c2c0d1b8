"""Keys of job.yaml for the optimization: the optimizer and its learning rates, what guards watch
and what they do."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    Tag,
    model_validator,
)

from elastic.catalog.validation import shown_of
from elastic.config.strict_model import NODES_MOST, NORM_MOST, SAMPLES_MOST, STEPS_MOST, Strict
from elastic.types.typed_job import (
    STEP,
    BlockNormRule,
    Do,
    GradNormRule,
    GuardRule,
    LossSpikeRule,
    LrCurve,
    LrScaling,
    NoiseMeasure,
    NormWord,
    NotFiniteRule,
)

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Guard(Strict):
    """`do`: skip = the step counts, its samples are used up, the update is left out; rollback =
    back to the newest copy that is older than the step, the same samples again; stop. After
    `rollbacks` roll-backs of a run, and where a step trips again that was rolled back for, it does
    `again`. `in_a_row`: steps skipped one after another before the run stops all the same."""

    do: Do = GuardRule.do
    again: Literal["skip", "stop"] = GuardRule.again
    rollbacks: int = Field(GuardRule.rollbacks, ge=1, le=NODES_MOST)
    in_a_row: int = Field(GuardRule.in_a_row, ge=1, le=STEPS_MOST)

    @model_validator(mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return {"do": value} if isinstance(value, str) else value


class NotFinite(Guard):
    """The loss or the gradient is no number."""

    do: Do = NotFiniteRule.do


class LossSpike(Guard):
    """The train_loss is more than `z` robust deviations above the median of the last `window` steps
    that were applied, in logarithms; silent before `after` steps."""

    z: float = Field(LossSpikeRule.z, gt=0, le=NORM_MOST)
    window: int = Field(LossSpikeRule.window, ge=8, le=4096)
    after: int = Field(LossSpikeRule.after, ge=4, le=STEPS_MOST)


class GradNorm(Guard):
    """The gradient's norm is above `most` (exploding) or below `least` (vanishing), or `z` robust
    deviations above the median of the last `window` steps, in logarithms. Before clipping."""

    most: float | None = Field(None, gt=0, le=NORM_MOST)
    least: float | None = Field(None, gt=0, le=NORM_MOST)
    z: float | None = Field(None, gt=0, le=NORM_MOST)
    window: int = Field(GradNormRule.window, ge=8, le=4096)
    after: int = Field(GradNormRule.after, ge=4, le=STEPS_MOST)

    @model_validator(mode="after")
    def _some(self) -> GradNorm:
        if self.most is None and self.least is None and self.z is None:
            raise ValueError("give most, least or z: the guard has no bound")
        return self


class BlockNorm(Guard):
    """The norm of the gradient of one block (or of what stands before or after the blocks) is above
    `most` or below `least`; looked at every `every` steps."""

    most: float | None = Field(None, gt=0, le=NORM_MOST)
    least: float | None = Field(None, gt=0, le=NORM_MOST)
    every: int = Field(BlockNormRule.every, ge=1, le=STEPS_MOST)

    @model_validator(mode="after")
    def _some(self) -> BlockNorm:
        if self.most is None and self.least is None:
            raise ValueError("give most or least: the guard has no bound")
        return self


class Guards(Strict):
    """None = not watched."""

    not_finite: NotFinite = NotFinite()
    loss_spike: LossSpike | None = None
    grad_norm: GradNorm | None = None
    block_norm: BlockNorm | None = None


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    value = float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"{value} is no number that a class of optimizers takes; give a finite one"
        )
    return value


class OptimizerKeys(Strict):
    """`path`: import path of the class; `no_decay`: patterns of parameter names that get
    weight_decay 0; the other keys are those of the class. Under a name, among several:
    `parameters`, patterns of the names of its own, or `matrices`; without it: the rest. A text
    alone is the path; `muon+adamw` is Muon for the matrices and AdamW for the rest."""

    model_config = ConfigDict(extra="allow")

    path: str = Field(pattern=r"^([A-Za-z_][\w.]*\.[A-Za-z_]\w*|muon\+adamw)$")
    no_decay: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, data: Any) -> Any:
        """To YAML `3e-4` without a point is a text; here it is the number that everybody means."""
        if isinstance(data, str):
            return {"path": data}
        if not isinstance(data, Mapping):
            return data
        return {
            key: value if key in ("path", "no_decay", "parameters") else _number(value)
            for key, value in data.items()
        }


class NamedOptimizerKeys(OptimizerKeys):
    """One of several."""

    parameters: list[str] | Literal["matrices"] | None = None


class SeveralOptimizers(
    RootModel[dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], NamedOptimizerKeys]]
):
    """Name -> optimizer."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="after")
    def _one_has_the_rest(self) -> SeveralOptimizers:
        rest = [name for name, keys in self.root.items() if keys.parameters is None]
        if len(rest) > 1:
            raise ValueError(
                f"{' and '.join(rest)} have no `parameters`; one of them can have the rest"
            )
        return self


def _form(value: Any) -> str:
    several = (
        isinstance(value, Mapping)
        and value
        and all(isinstance(item, Mapping) for item in value.values())
    )
    return SEVERAL if several or isinstance(value, SeveralOptimizers) else ONE


ONE, SEVERAL = "", "+"  # forms of the key `optimizer`; no part of the place that an error names
OptimizerKey = Annotated[
    Annotated[OptimizerKeys, Tag(ONE)] | Annotated[SeveralOptimizers, Tag(SEVERAL)],
    Discriminator(_form),
]


class LrSchedule(Strict):
    """Factor on the optimizer's learning rates: linear warm-up, then `kind`. `decay_steps`: how
    long it falls to `min_factor` (default: cosine and linear to the end of the job, wsd its last
    tenth)."""

    kind: Literal["constant", "linear", "cosine", "wsd"]
    warmup_steps: int = Field(LrCurve.warmup_steps, ge=0, le=STEPS_MOST)
    decay_steps: int | None = Field(None, gt=0, le=STEPS_MOST)
    min_factor: float = Field(LrCurve.min_factor, ge=0, le=1)

    @model_validator(mode="after")
    def _agree(self) -> LrSchedule:
        if self.kind == "constant" and (self.decay_steps is not None or self.min_factor):
            raise ValueError("kind 'constant' does not decay; leave decay_steps and min_factor out")
        return self


class NoiseScaleSettings(Strict):
    """The gradient noise scale is measured every `every` steps: advice for the batch, in the
    report."""

    every: int = Field(NoiseMeasure.every, ge=1, le=STEPS_MOST)


class NormGroup(Strict):
    """Each `group` samples of a step, in its order, have statistics of their own."""

    group: int = Field(gt=1, le=SAMPLES_MOST)


def _norm_form(value: Any) -> str:
    return ONE if isinstance(value, Mapping | NormGroup) else SEVERAL


def _known(value: Any) -> Any:
    if not isinstance(value, Mapping | NormGroup) and value not in get_args(NormWord):
        raise ValueError(
            f"must be {{group: 16}} (so many samples have statistics of their own), "
            f"{', '.join(get_args(NormWord))}, not {shown_of(value)}"
        )
    return value


NormKey = Annotated[
    Annotated[NormGroup, Tag(ONE)] | Annotated[NormWord, Tag(SEVERAL)],
    Discriminator(_norm_form), BeforeValidator(_known),
]  # fmt: skip


def norm_problem(given: NormGroup | str, global_batch: int, by_tokens: bool) -> str:
    """What is wrong with the key `batch_norm`, in one line; '' = nothing. `by_tokens`: tokens say
    how micro-batches are cut."""
    if by_tokens and (isinstance(given, NormGroup) or given == STEP):
        return (
            "batch_norm and microbatch_tokens do not go together: micro-batches that are cut by "
            "tokens cut groups of samples"
        )
    if not isinstance(given, NormGroup) or global_batch % given.group == 0:
        return ""
    near = [n for n in range(2, min(global_batch, 1024) + 1) if global_batch % n == 0]
    near = sorted(sorted(near, key=lambda n: abs(n - given.group))[:3])
    take = f"take {', '.join(map(str, near))}" if near else "take batch_norm: step"
    return f"batch_norm: group {given.group} does not divide global_batch {global_batch}; {take}"


def problem(
    steps: int, schedule: LrSchedule | None, scaling: LrScaling, *, base_global_batch: int | None
) -> str:
    """What is wrong with them together, in one line; '' = nothing."""
    if schedule is not None and schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
        parts = f"warmup_steps={schedule.warmup_steps}"
        parts += f" and decay_steps={schedule.decay_steps}" if schedule.decay_steps else ""
        return f"lr_schedule: {parts} are more than the job's {steps} steps"
    if (scaling == "none") != (base_global_batch is None):
        return (
            "lr_scaling (linear or sqrt) and base_global_batch, for which the learning rate was "
            "found, belong together"
        )
    return ""


OWNERS: Mapping[str, type[Strict]] = {  # whose keys may stand under a key of job.yaml
    "guards": Guards, "not_finite": NotFinite, "loss_spike": LossSpike, "grad_norm": GradNorm,
    "block_norm": BlockNorm, "lr_schedule": LrSchedule, "noise_scale": NoiseScaleSettings,
    "batch_norm": NormGroup,
}  # fmt: skip
