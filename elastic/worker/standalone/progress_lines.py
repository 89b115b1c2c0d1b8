"""What rank 0 prints of a run that drives itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TextIO

from elastic.types import (
    CopyFailed,
    Evaluated,
    Event,
    GuardTripped,
    PlanEntered,
    StepDone,
    WrongNumbers,
)


@dataclass
class Lines:
    """A line per `every` steps, at evaluations and when something is wrong."""

    steps: int
    every: int
    out: TextIO
    batch: int = 0  # samples of a step; where it counts as many, it counts samples
    _since_s: float = field(default_factory=time.monotonic)
    _tokens: int = 0

    def hear(self, event: Event | str) -> None:
        match event:
            case str():
                self.say(event)
            case PlanEntered():
                self._since_s, self._tokens = time.monotonic(), 0
            case StepDone():
                self._step(event)
            case Evaluated():
                numbers = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
                self.say(f"step {event.step}/{self.steps}  {numbers}")
            case GuardTripped():
                self.say(f"guard {event.guard} ({event.do}): {event.reason}")
            case WrongNumbers(_, step, good_step, workers, reason):
                who = ", ".join(map(str, workers))
                self.say(
                    f"step {step}: silent data corruption after step {good_step}, on {who}: "
                    f"{reason}"
                )
            case CopyFailed():
                self.say(f"step {event.step}: no checkpoint: {event.reason}")

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def _step(self, event: StepDone) -> None:
        self._tokens += event.tokens
        if event.step % self.every and event.step != self.steps:
            return
        now_s = time.monotonic()
        rate = self._tokens / max(1e-9, now_s - self._since_s)
        self._since_s, self._tokens = now_s, 0
        unit = "samples" if event.tokens == self.batch else "tokens"
        self.say(
            f"step {event.step}/{self.steps}  train_loss {event.train_loss:.4f}  {rate:,.0f} "
            f"{unit}/s"
        )
