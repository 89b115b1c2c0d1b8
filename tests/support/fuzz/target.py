"""One reader of what others have written, and how inputs for it are made."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.fuzz import mutating

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """`read` takes an input and gives what it means. `errors`: that it declares. `kept`: does an
    input that was changed by accident still mean what the good one does? None = nothing promises
    that. `meaning`: changes it as what it is."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    meaning: Mutate | None = None
    kept: Callable[[Any, Any], bool] | None = None

    def made(self, chance: random.Random) -> tuple[bytes, bytes, bool]:
        """A good input, one made of it, and whether by accident alone."""
        seed = chance.choice(self.seeds)
        kind = chance.random()
        if kind < 0.3:
            return seed, mutating.accident(seed, chance), True
        if kind < 0.6 and self.meaning is not None:
            return seed, self.meaning(seed, chance), False
        return seed, mutating.forced(seed, self.seeds, chance), False
