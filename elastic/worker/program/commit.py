"""What the one all-reduce of a step tells every rank. Numbers only: the driver's side reads it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from elastic.data.order import digest_text
from elastic.types import Event, GuardTripped, PlanEntered, Quiesced, StepDone

N_WORDS = 14  # what every commit holds; behind them the square norms of the gradient of each block, in steps that ask for them
WAIT_POWER, WAIT_MOST_S = 64, 1e4  # a sum of high powers is nearly the largest of them: one all-reduce that adds also finds it
FULL_POWER, FULL_MOST = 256, 10.0


@dataclass(frozen=True)
class Commit:
    """What all ranks know after the commit all-reduce of a step: the sums over the generation of each rank's vector."""

    vector: tuple[float, ...]

    @property
    def square_norm(self) -> float:
        return self.vector[0]

    @property
    def loss_sum(self) -> float:
        return self.vector[1]

    @property
    def tokens(self) -> float:
        return self.vector[2]

    @property
    def stop(self) -> bool:
        return self.vector[3] > 0

    @property
    def save(self) -> bool:
        return self.vector[4] > 0

    @property
    def n_copies_done(self) -> int:
        """Ranks whose part of the peer copy in flight is stored; below 0 when some rank's cannot be."""
        return int(self.vector[5])

    @property
    def n_copies_free(self) -> int:
        """Ranks that could take another peer copy at this boundary."""
        return int(self.vector[8])

    @property
    def cadence(self) -> tuple[int, int] | None:
        """New steps between peer and durable copies; None = as before."""
        return (int(self.vector[9]) - 1, int(self.vector[10]) - 1) if self.vector[9] else None

    @property
    def samples(self) -> tuple[int, int]:
        """Digest of the sample ids that the ranks trained on."""
        return int(self.vector[6]), int(self.vector[7])

    @property
    def overflowed(self) -> bool:
        """Some rank's gradients overflowed float16: the step is skipped."""
        return len(self.vector) > 11 and self.vector[11] > 0

    @property
    def train_loss(self) -> float:
        return self.loss_sum / max(1.0, self.tokens)

    @property
    def grad_norm(self) -> float:
        """Of the gradient of the mean loss."""
        return math.sqrt(self.square_norm) / max(1.0, self.tokens) if self.square_norm >= 0 else math.nan

    @property
    def data_s(self) -> float:
        """The longest that a rank has waited for its batch, in seconds; a little more with many ranks that waited equally long
        (its WAIT_POWERth power is the sum of theirs)."""
        return _root(self.vector, 12, WAIT_POWER)

    @property
    def fullest(self) -> float:
        """The most tokens per sample that a rank had, in the unit that all of them have divided by; 0 = nobody has said."""
        return _root(self.vector, 13, FULL_POWER)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.square_norm)

    def block_norms(self, n: int) -> list[float]:
        """Of the gradient of the mean loss in each of the `n` parts of the model that were asked for; [] = they were not."""
        squares = self.vector[N_WORDS : N_WORDS + n]
        return [math.sqrt(square) / max(1.0, self.tokens) if square >= 0 else math.nan for square in squares]


def power_of_wait(data_s: float) -> float:
    """A rank's word on how long it has waited for data."""
    return min(max(data_s, 0.0), WAIT_MOST_S) ** WAIT_POWER


def power_of_tokens(ratio: float) -> float:
    """A rank's word on its tokens per sample, as a multiple of what all ranks know."""
    return min(max(ratio, 0.0), FULL_MOST) ** FULL_POWER


def _root(vector: tuple[float, ...], at: int, power: int) -> float:
    return float(vector[at] ** (1 / power)) if len(vector) > at and vector[at] > 0 else 0.0


def step_done(
    generation: int,
    step: int,
    commit: Commit,
    times: tuple[float, float, float] = (0.0, 0.0, 0.0),
    skipped: bool = False,
    shape: tuple[float, float] = (0.0, 0.0),
) -> StepDone:
    """The report of a step. `times`: seconds of the step, of waiting for data, of waiting for copies; 0 = nobody measured.
    `shape`: imbalance of the ranks' tokens, share of the places that were filled up. Of what is measured only digits that mean
    something: there is a line of it for every step of a run."""
    sums, grad_norm = (commit.train_loss, int(commit.tokens)), float(f"{commit.grad_norm:.7g}")
    step_s, data_s, copy_s = (round(t, 6) for t in times)
    imbalance, pad_share = (round(x, 4) for x in shape)
    skipped = skipped or commit.overflowed or not commit.finite  # the update of such a step is never made
    return StepDone(
        generation, step, *sums, step_s, data_s, copy_s, grad_norm, digest_text(commit.samples), skipped, imbalance, pad_share
    )  # fmt: skip


@dataclass
class Told:
    """Every step is told of once: by rank 0, or, where that is gone or has missed the commit, by what another has left with;
    and what a guard has found in it by the first rank that says so."""

    steps: dict[int, int] = field(default_factory=dict)  # generation -> newest step told of
    tripped: dict[int, int] = field(default_factory=dict)  # generation -> newest step that a guard has tripped at
    skipped: dict[int, int] = field(default_factory=dict)  # generation -> newest step that a guard has left out

    def add(self, event: Event) -> list[Event]:
        """The event, after the step that it is the first word of; nothing where all has been said."""
        match event:
            case PlanEntered():
                self.steps[event.generation] = event.step
            case StepDone():
                return self._step(event)
            case Quiesced():
                return [*self._untold(event), event]
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
        live = next((h for h in event.holdings if h.kind == "live"), None)
        if live is None or not event.commit or self.steps.get(live.generation) != live.step - 1:
            return []
        skipped = self.skipped.get(live.generation) == live.step
        return self._step(step_done(live.generation, live.step, Commit(event.commit), skipped=skipped))
