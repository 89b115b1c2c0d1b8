"""What a restarted script's process asks the supervisor above it, and how all ranks get one answer.

They agree through a store beside rank 0, which is there as long as the group is, whatever becomes
of the driver.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elastic.text import n_of

NOTICE, REPORT, STORED = "get_preemption_info", "report", "stored"
NAP_S, NAP_MOST_S = 0.001, 0.2  # between two looks of a rank that waits for another
LONG_S = 60.0  # that a rank waits for others before it says so
WAITS = (
    "ray.train.{what}(): rank {rank} has waited {s:.0f} s for the other ranks; all {ranks} must "
    "call it equally often\n"
)


ENDED = "ray.train.{what}(): rank {rank} has ended; all {ranks} must call it equally often"
ANY, ERROR = "any", "error"


class RankEnded(Exception):
    """One for which this rank would wait has ended, and well."""


class GroupEnds(Exception):
    """The process that has asked is gone."""


def naps(store: Any, key: str) -> Iterator[None]:
    """Ever longer ones, until another rank has put the key there."""
    nap_s = NAP_S
    while not store.check([key]):
        yield
        time.sleep(nap_s)
        nap_s = min(NAP_MOST_S, 2 * nap_s)


@dataclass
class Questions:
    """`store`: of the ranks of this group; None where there is one rank. `notice`: that is known
    here; `over`: the process is gone. `noticed`: the script has been told of a notice."""

    rank: int
    world: int
    store: Any
    notice: Callable[[], dict[str, Any] | None]
    over: Callable[[], bool]
    noticed: bool = False
    _asked: Counter[str] = field(default_factory=Counter)

    def answer(self, script: socket.socket) -> None:
        """Until the process ends, or rank 0's worker has: then its line is cut."""
        ends = (OSError, RuntimeError, GroupEnds)
        with script, script.makefile("r") as lines, suppress(*ends):
            for line in lines:
                try:
                    found = self._answer(**json.loads(line))
                except RankEnded as error:
                    found = {ERROR: str(error)}
                script.sendall(json.dumps(found).encode() + b"\n")

    def ended(self) -> None:
        """The script of this rank has: nobody is to wait for it."""
        if self.store is not None:
            with suppress(OSError, RuntimeError):  # the store's host is gone
                for key in (self.rank, ANY):
                    self.store.set(f"ended/{key}", str(self.rank))

    def _answer(self, ask: str, said: Any = None, given: bool = False) -> Any:
        if ask != NOTICE:
            return self._agreed(ask, said, given)
        found, _ = self._agreed(ask, self.notice())
        self.noticed = self.noticed or found is not None
        return found

    def _agreed(self, ask: str, said: Any, given: bool | None = None) -> tuple[Any, int]:
        """What rank 0 says to the n-th question of a kind, on all ranks. With `given` it waits for
        all of them, and how many have given something stands behind it."""
        if self.world == 1:
            return said, int(bool(given))
        key, awaited = f"{ask}/{self._asked[ask]}", "said"
        self._asked[ask] += 1
        if self.rank == 0:
            self.store.set(f"{key}/said", json.dumps(said))
        if given is not None:
            self.store.add(f"{key}/given", int(given))
            awaited = "all"
            if self.store.add(f"{key}/here", 1) == self.world:
                self.store.set(f"{key}/all", "1")
        self._wait(f"{key}/{awaited}", ask)
        n_given = int(self.store.add(f"{key}/given", 0))
        found = json.loads(self.store.get(f"{key}/said"))
        if self.store.add(f"{key}/read", 1) == self.world:
            for name in ("said", "given", "here", "all", "read"):
                self.store.delete_key(f"{key}/{name}")
        return found, n_given

    def _wait(self, key: str, ask: str) -> None:
        """For all ranks, or of a notice for rank 0. Raises GroupEnds, RankEnded."""
        long_s = time.monotonic() + LONG_S
        ended = f"ended/{0 if ask == NOTICE else ANY}"
        for _ in naps(self.store, key):
            if self.over():
                raise GroupEnds
            # who has ended may have been the last one to come
            if self.store.check([ended]) and not self.store.check([key]):
                rank, ranks = int(self.store.get(ended)), n_of(self.world, "rank")
                raise RankEnded(ENDED.format(what=ask, rank=rank, ranks=ranks))
            if ask != STORED and time.monotonic() > long_s:
                long_s = float("inf")
                ranks = n_of(self.world, "rank")
                text = WAITS.format(what=ask, rank=self.rank, s=LONG_S, ranks=ranks)
                with suppress(OSError):  # a full disk
                    os.write(1, text.encode())
