"""How long a poll waits for workers' answers before it looks at what no worker reports: inbox,
notices, deadlines, silence."""

from __future__ import annotations

from dataclasses import dataclass

SLICE_S = 0.05  # where other news may come; a round costs about as much as the report of a step
# between looks at the inbox, deadlines, notices and silence; while it trains, for answers too
LOOK_S = 0.25
LEAST_S = 0.001


@dataclass
class Pacing:
    """`trains`: a step of the newest plan is done, and nothing was ordered since."""

    trains: bool = False
    _looked_s: float = 0.0

    def looks(self, now_s: float) -> bool:
        """Is it time to look? It is then done."""
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def wait_s(self, now_s: float, until_s: float | None, expected: bool) -> float:
        """For an answer, which ends the wait. `expected`: other news may come at any time."""
        if expected or not self.trains:
            return SLICE_S
        look_s = self._looked_s + LOOK_S
        return max(LEAST_S, min(look_s, look_s if until_s is None else until_s) - now_s)
