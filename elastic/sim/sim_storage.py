"""What a simulated run's storage does at a time: it is away, slow, throttled, read-only, full, or
answers with the past."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic.sim.scripted_faults import Fault

STORAGE_KINDS = ("storage", "slow_storage", "throttled", "read_only", "full", "past")
PATIENCE_S = 120.0  # what is refused in passing is asked for again for so long
HASTY_S = 5.0  # a sign of life that takes longer is not given
CLOSED = ("storage", "throttled", "read_only")  # nothing of the driver is written meanwhile
REFUSALS = {
    "full": "No space left on device", "read_only": "403 AccessDenied", "throttled": "503 SlowDown",
}  # fmt: skip


@dataclass
class SimStorage:
    """Spells, as they began. Times are the simulator's."""

    spells: list[Fault] = field(default_factory=list)

    def begin(self, fault: Fault) -> None:
        self.spells.append(fault)

    def _now(self, at_s: float, *kinds: str) -> list[Fault]:
        return [
            one
            for one in self.spells
            if one.kind in kinds and one.at_s <= at_s < one.at_s + one.lasts_s
        ]

    def _left_s(self, at_s: float, *kinds: str) -> float:
        return max((one.at_s + one.lasts_s - at_s for one in self._now(at_s, *kinds)), default=0.0)

    def _slower_s(self, at_s: float) -> float:
        return max((one.amount for one in self._now(at_s, "slow_storage")), default=0.0)

    def read_s(self, at_s: float, delay_s: float) -> float:
        """How long it takes to read what takes `delay_s` by itself."""
        return delay_s + self._left_s(at_s, "storage", "throttled") + self._slower_s(at_s)

    def saved_s(self, at_s: float, delay_s: float) -> float:
        """How long it takes to write a checkpoint, or until it is refused."""
        return (
            delay_s
            + max(self._left_s(at_s, "storage"), min(PATIENCE_S, self._left_s(at_s, "throttled")))
            + self._slower_s(at_s)
        )

    def refusal(self, at_s: float) -> str:
        """Of a checkpoint; '' = it is taken."""
        return next((REFUSALS[one.kind] for one in self._now(at_s, *REFUSALS)), "")

    def written_s(self, at_s: float) -> float:
        """When a line of the journal is stored, which is tried until it is."""
        while (left_s := self._left_s(at_s, *CLOSED)) > 0:
            at_s += left_s
        return at_s + self._slower_s(at_s)

    def unheard_since_s(self, at_s: float) -> float | None:
        """Since when no sign of life is taken; None = they are."""
        spells = [
            one
            for one in self.spells
            if one.kind in CLOSED or (one.kind == "slow_storage" and one.amount > HASTY_S)
        ]
        if not any(one.at_s <= at_s < one.at_s + one.lasts_s for one in spells):
            return None
        while before := [one.at_s for one in spells if one.at_s < at_s <= one.at_s + one.lasts_s]:
            at_s = min(before)
        return at_s

    def changes_s(self, at_s: float) -> float | None:
        """When the spell ends that is the first to end; None = there is none."""
        return min(
            (one.at_s + one.lasts_s for one in self._now(at_s, *STORAGE_KINDS)), default=None
        )

    def past_s(self, at_s: float) -> float | None:
        """The time as of which it answers; None = now."""
        return min((one.at_s for one in self._now(at_s, "past")), default=None)

    def full_s(self, at_s: float) -> float:
        """How long it stays full."""
        return self._left_s(at_s, "full")
