"""What a step came to, as all ranks know it after its commit. Numbers only: the driver's side reads
it too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastic.data.order import digest_text
from elastic.types import Event, GuardTripped, PlanEntered, Quiesced, StepDone

# steps of which a rank can tell afterwards: those that rank 0 has done, and had no time to report
KEPT_COMMITS = 16


@dataclass(frozen=True)
class Commit:
    """The sums of a step over the generation: all that a rank needs to do the step by it."""

    square_norm: float
    loss_sum: float
    tokens: float
    samples: tuple[int, int] = (0, 0)  # digest of the sample ids that the ranks trained on
    overflowed: bool = False  # some rank's gradients overflowed float16: the step is skipped
    block_square_norms: tuple[float, ...] = ()  # () = nobody has asked for them in this step
    unreached: tuple[int, ...] = ()  # numbers of the parameters that no rank's samples reach

    @property
    def numbers(self) -> tuple[float, ...]:
        """As the driver keeps it, for ranks that missed it."""
        sums = (self.square_norm, self.loss_sum, self.tokens)
        flags = (*self.samples, self.overflowed + 2 * len(self.unreached), *self.unreached)
        return (*sums, *map(float, flags), *self.block_square_norms)

    def told(self, *, skipped: bool) -> tuple[float, ...]:
        """Of it, as much as the report of a step needs."""
        overflowed = self.overflowed or skipped
        return replace(self, overflowed=overflowed, block_square_norms=(), unreached=()).numbers

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Commit:
        square_norm, loss_sum, tokens, one, two, flags, *more = numbers
        n_unreached, overflowed = divmod(int(flags), 2)
        return cls(
            square_norm, loss_sum, tokens, (int(one), int(two)), bool(overflowed),
            tuple(more[n_unreached:]), tuple(map(int, more[:n_unreached])),
        )  # fmt: skip

    @property
    def train_loss(self) -> float:
        return self.loss_sum / max(1.0, self.tokens)

    @property
    def grad_norm(self) -> float:
        """Of the gradient of the mean loss."""
        return (
            math.sqrt(self.square_norm) / max(1.0, self.tokens)
            if self.square_norm >= 0
            else math.nan
        )

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.square_norm)

    @property
    def block_norms(self) -> list[float]:
        """Of the gradient of the mean loss in each part of the model."""
        return [
            math.sqrt(square) / max(1.0, self.tokens) if square >= 0 else math.nan
            for square in self.block_square_norms
        ]


def step_done(
    generation: int,
    step: int,
    commit: Commit,
    *,
    times: tuple[float, float, float] = (0.0, 0.0, 0.0),
    skipped: bool = False,
    shape: tuple[float, float, float] = (0.0, 0.0, 0.0),
    logged: Mapping[str, float] | None = None,
) -> StepDone:
    """The report of a step. `times`: seconds of the step, of waiting for data, of waiting for
    copies; 0 = nobody measured. `shape`: imbalance of the ranks' tokens, share of the places that
    were filled up, load of the fullest experts. `logged`: what the user's code tells. Of what is
    measured only digits that mean something: there is a line of it for every step of a run."""
    sums, grad_norm = (commit.train_loss, int(commit.tokens)), float(f"{commit.grad_norm:.7g}")
    step_s, data_s, copy_s = (round(t, 6) for t in times)
    imbalance, pad_share, expert_load = (round(x, 4) for x in shape)
    # the update of such a step is never made
    skipped = skipped or commit.overflowed or not commit.finite
    return StepDone(
        generation, step, *sums, step_s, data_s, copy_s, grad_norm, digest_text(commit.samples),
        skipped, imbalance, pad_share, dict(logged or {}), expert_load,
    )  # fmt: skip


@dataclass
class StepReports:
    """Every step is reported once: by rank 0, or, where that is gone or has missed the commit, by
    what another has left with; and what a guard has found in it by the first rank that says so."""

    steps: dict[int, int] = field(default_factory=dict)  # generation -> newest step told of
    # generation -> newest step that a guard has tripped at
    tripped: dict[int, int] = field(default_factory=dict)
    # generation -> newest step that a guard has left out
    skipped: dict[int, int] = field(default_factory=dict)

    def add(self, event: Event) -> list[Event]:
        """The event, after the step that it is the first word of; nothing where all has been
        said."""
        match event:
            case PlanEntered():
                self.steps[event.generation] = event.step
            case StepDone():
                return self._step(event)
            case Quiesced():
                return [*self._untold(event), replace(event, earlier=())]
            case GuardTripped():
                if event.do == "skip":
                    self.skipped[event.generation] = event.step
                if event.step <= self.tripped.get(event.generation, -1):
                    return []
                self.tripped[event.generation] = event.step
        return [event]

    def _step(self, event: StepDone) -> list[Event]:
        if event.step <= self.steps.get(event.generation, -1):
            return []
        self.steps[event.generation] = event.step
        return [event]

    def _untold(self, event: Quiesced) -> list[Event]:
        """The steps up to the one that this worker has left with."""
        live = next((h for h in event.holdings if h.kind == "live"), None)
        if live is None or not event.commit:
            return []
        commits = {**dict(event.earlier), live.step: event.commit}
        told = self.steps.get(live.generation, live.step)
        untold = range(told + 1, live.step + 1)
        if not all(step in commits for step in untold):
            return []
        skipped = self.skipped.get(live.generation)
        return [
            found
            for step in untold
            for found in self._step(
                step_done(live.generation, step, Commit.of(commits[step]), skipped=skipped == step)
            )
        ]
