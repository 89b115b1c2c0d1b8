"""The files of a profile in a run's storage: of each rank a trace, and what it says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.errors import SpecError
from elastic.storage import Storage

FOLDER, SCHEMA = "profiles", 1


@dataclass(frozen=True)
class RankParts:
    """Of one rank. `parts`: seconds of a step; they sum to `step_s`. `collectives`: seconds of a
    step in collectives by axis, also those that computation hides. `at`: its coordinates."""

    rank: int
    worker: str
    at: str
    steps: tuple[int, ...]
    step_s: float
    parts: Mapping[str, float]
    collectives: Mapping[str, float]
    on_device: bool
    trace: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any], trace: str) -> RankParts:
        """Raises SpecError for what a newer elastic has written."""
        if data["schema"] > SCHEMA:
            raise SpecError(f"{trace}: written by a newer elastic (schema {data['schema']})")
        return cls(
            data["rank"], data["worker"], data["at"], tuple(data["steps"]), data["step_s"],
            data["parts"], data["collectives"], data["on_device"], trace,
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "worker": self.worker, "at": self.at, "steps": list(self.steps),
            "step_s": self.step_s, "parts": dict(self.parts),
            "collectives": dict(self.collectives), "trace": self.trace,
        }  # fmt: skip


def read_profile(storage: Storage, profile_id: str) -> list[RankParts]:
    """Of the ranks that have written theirs, in order."""
    folder = f"{FOLDER}/{profile_id}/"
    found = []
    for key in storage.list(folder):
        if key.endswith(".json"):
            trace = storage.uri_of(key.removesuffix(".json") + ".trace.json.gz")
            found.append(RankParts.of(json.loads(storage.get(key)), trace))
    return sorted(found, key=lambda one: one.rank)


def mean_parts(ranks: Iterable[RankParts]) -> dict[str, float]:
    """Seconds of a step, over all ranks."""
    return _mean([one.parts for one in ranks])


def mean_collectives(ranks: Iterable[RankParts]) -> dict[str, float]:
    """Seconds of a step in collectives by axis, over all ranks."""
    return _mean([one.collectives for one in ranks])


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {name: sum(one.get(name, 0.0) for one in each) / len(each) for name in names}
