"""What trainers that restart at each change were measured to take, by what the change came of.

The shortest that docs/benchmarks.md has, with a model that loads in a moment: what is compared with
them leans against elastic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# for which a trainer that restarts does so as well; others are wishes of a run of ours
CAUSES = ("notice", "loss", "growth")


@dataclass(frozen=True)
class RestartTime:
    """Seconds without a step at a change, by its cause (`source`: where that stands)."""

    trainer: str
    by_cause: Mapping[str, float]
    source: str


RAY_TRAIN = RestartTime(
    "Ray Train 2.60 as it comes",
    {"loss": 82.6, "notice": 87.3, "growth": 14.4},
    "docs/benchmarks.md, ray_train",
)
RACE = "docs/benchmarks.md, race: idle time over four preemptions and four replacements"
RESTARTS = (
    RestartTime("torchrun with tuned timeouts", dict.fromkeys(CAUSES, 76.3 / 8), RACE),
    RestartTime("Ray Train 2.60 with tuned timeouts", dict.fromkeys(CAUSES, 112.9 / 8), RACE),
    RAY_TRAIN,
)
