"""Drills: which nodes are meant, when an entry is due, and what arrives through the run's inbox."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from elastic.cluster.ray.thread_boundary import ThreadBoundary
from elastic.config.job import drill_entry
from elastic.errors import SpecError, StorageRefused
from elastic.storage import Storage
from elastic.types import MarketType, Plan

log = logging.getLogger(__name__)

INBOX, REJECTED, DONE = "inbox/", "inbox/rejected/", "inbox/done/"
REMOTE_EVERY_S = 2.0
MARK_MOST_S = 4.0  # the driver waits so long for the mark of an entry
MOST_BYTES = 1 << 16  # of an order


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


@dataclass(frozen=True)
class InboxOrders:
    """What the inbox held."""

    drills: tuple[dict[str, Any], ...] = ()
    stop: str | None = None


class Inbox:
    """Orders as they come. Object storage is asked by a thread every REMOTE_EVERY_S: the driver
    never waits for it.

    Anybody who may write the run's folder may leave a file there: nothing of it raises. What is no
    order, or cannot be read, goes to inbox/rejected with the reason; what storage did not answer is
    retried at the next look.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        # given out or refused, and still there: it could not be removed
        self._taken: set[str] = set()
        self._found: SimpleQueue[InboxOrders] = SimpleQueue()
        self._done = threading.Event()
        self._boundary = ThreadBoundary(log, "inbox")
        if storage.remote:
            threading.Thread(target=self._follow, name="inbox", daemon=True).start()

    def take(self) -> InboxOrders:
        """What has come since the last call."""
        if not self._storage.remote:
            self._boundary.holds(self._look)
        found: list[InboxOrders] = []
        while not self._found.empty():
            found.append(self._found.get())
        stops = [orders.stop for orders in found if orders.stop is not None]
        return InboxOrders(
            tuple(drill for orders in found for drill in orders.drills),
            stops[-1] if stops else None,
        )

    def close(self) -> None:
        self._done.set()

    def _follow(self) -> None:
        while not self._done.wait(REMOTE_EVERY_S):
            self._boundary.holds(self._look)

    def _look(self) -> None:
        keys = [
            key
            for key in self._storage.list(INBOX)
            if key.count("/") == 1 and key.endswith(".json")
        ]
        self._taken.intersection_update(keys)
        for key in keys:
            if key not in self._taken:
                self._boundary.holds(partial(self._take, key))
            if key in self._taken:
                with suppress(OSError, SpecError):  # it stays, and is not taken again
                    self._storage.delete(key)

    def _take(self, key: str) -> None:
        """Gives the order out. Raises OSError where storage did not answer: it is looked at
        again."""
        text = b""
        try:
            text = self._text(key)
            found = _order(text)
        except (FileNotFoundError, PermissionError, SpecError, ValueError, RecursionError) as error:
            if isinstance(error, StorageRefused):
                raise
            self._taken.add(key)
            self._refuse(
                key,
                text,
                f"{type(error).__name__}: {error}"
                if not isinstance(error, SpecError)
                else str(error),
            )
        else:
            self._taken.add(key)
            self._found.put(found)

    def _text(self, key: str) -> bytes:
        if not self._storage.exists(key):
            raise FileNotFoundError(
                "there is no such file; it was removed, or is a link to nothing, or a pipe"
            )
        if self._storage.size(key) > MOST_BYTES:
            raise SpecError(f"an order has at most {MOST_BYTES} bytes")
        return self._storage.get(key)

    def _refuse(self, key: str, text: bytes, why: str) -> None:
        log.warning("%a is no order, and is not taken: %s", key, why)
        record = json.dumps({"order": text.decode(errors="replace"), "why": why}).encode()
        try:
            self._storage.put(f"{REJECTED}{key[len(INBOX) :]}", record)
        except (OSError, SpecError) as error:
            log.warning("the reason could not be written to %s: %s", REJECTED, error)


def _order(text: bytes) -> InboxOrders:
    """Raises SpecError, ValueError, RecursionError for what is none."""
    order = json.loads(text)
    if not isinstance(order, dict) or len(order) != 1 or next(iter(order)) not in ("drill", "stop"):
        raise SpecError('an order is {"drill": {...}} or {"stop": "reason"}')
    if "drill" in order:
        return InboxOrders((drill_entry(order["drill"], "drill").plain(),))
    if not isinstance(order["stop"], str):
        raise SpecError('the reason of a stop is a text, as in {"stop": "reason"}')
    return InboxOrders(stop=order["stop"])
