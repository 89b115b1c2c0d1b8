"""Drills: which nodes are meant, and when an entry is due."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.types import MarketType, Plan
from elastic.worker.hosting.inbox import INBOX

log = logging.getLogger(__name__)

DONE = f"{INBOX}done/"
MARK_MOST_S = 4.0  # the driver waits so long for the mark of an entry


@dataclass(frozen=True)
class Scene:
    """What names are resolved against: the newest plan, and each standing node's market type.
    `leaving`: a notice is out."""

    plan: Plan | None
    markets: Mapping[str, MarketType]
    leaving: frozenset[str] = frozenset()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that stand: those of the plan in rank order, then the others."""
        planned = self.plan.nodes if self.plan else ()
        return tuple(n for n in dict.fromkeys((*planned, *self.markets)) if n in self.markets)


def resolve(names: str | Sequence[str], scene: Scene) -> tuple[str, ...]:
    """Node ids for `any`, `any-spot`, `rank0`, `rank:N`, `partner` (keeps the copies of the node
    before it), or a node id.

    `any` and `any-spot` take the last one in rank order that is not named already and has no
    notice. Raises SpecError.
    """
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        found.append(_node(name, found, scene))
    return tuple(dict.fromkeys(found))


def _node(name: str, before: Sequence[str], scene: Scene) -> str:
    if name in ("any", "any-spot"):
        fresh = [n for n in scene.nodes if n not in before and n not in scene.leaving]
        planned = [n for n in fresh if scene.plan and n in scene.plan.workers_per_node] or fresh
        chosen = [n for n in planned if name == "any" or scene.markets[n] == "spot"]
        if not chosen:
            raise SpecError(f"drill: no node is '{name}'; standing are {_listed(scene.nodes)}")
        return chosen[-1]
    if name == "rank0" or name.startswith("rank:"):
        rank = 0 if name == "rank0" else int(name[5:])
        ranks = scene.plan.ranks if scene.plan else ()
        if rank >= len(ranks):
            raise SpecError(f"drill: there is no rank {rank}; the plan has {len(ranks)} ranks")
        return ranks[rank].node_id
    if name == "partner":
        return _partner(before, scene)
    if name not in scene.markets:
        raise SpecError(f"drill: '{name}' is no node; standing are {_listed(scene.nodes)}")
    return name


def _partner(before: Sequence[str], scene: Scene) -> str:
    ranks = scene.plan.ranks if scene.plan else ()
    mine = [rank for rank, worker in enumerate(ranks) if before and worker.node_id == before[-1]]
    kept_by = scene.plan.copies_to if scene.plan else ()
    if not mine or not kept_by or not kept_by[mine[0]]:
        raise SpecError(
            "drill: 'partner' needs a node of the plan before it and a second node; the list is "
            f"{_listed(before)}"
        )
    return ranks[kept_by[mine[0]][0]].node_id


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes) or "none"


@dataclass
class Schedule:
    """The job's drill. An entry is carried out once per run: a mark in the run's storage outlives
    the driver."""

    entries: Sequence[Mapping[str, Any]]
    storage: Storage
    _left: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._left = sorted(
            range(len(self.entries)), key=lambda i: (self.entries[i].get("at_step") or 0, i)
        )

    def due(self, step: int) -> list[dict[str, Any]]:
        """Entries whose step is reached, that nobody has carried out."""
        found = []
        while self._left and (self.entries[self._left[0]].get("at_step") or 0) <= step:
            i = self._left[0]
            try:
                mine = self.storage.put(
                    f"{DONE}{i:04d}.json",
                    json.dumps(dict(self.entries[i])).encode(),
                    if_absent=True,
                )
            except (
                OSError
            ) as error:  # storage does not answer, or is full: retried at the next step
                log.warning("the drill of step %s waits: %s", self.entries[i].get("at_step"), error)
                break
            self._left.pop(0)
            if mine:
                found.append(dict(self.entries[i]))
        return found
