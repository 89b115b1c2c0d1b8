"""Ranks as threads of one process: their groups are real ones of gloo, around a store that counts
what is asked of it.

What a process knows of its own sockets is not looked at: all ranks have the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.worker.ranks import meeting
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from elastic.types import Layout
from elastic.types.grid import ROW
from elastic.worker.process_groups import groups, rendezvous
from elastic.worker.process_groups.groups import Groups

TIMEOUT_S = 300.0


class CountedStore(Store):
    """One that all ranks share. `requests`: by thread; `n_bytes`: of all answers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = HashStore()
        self.requests: Counter[str] = Counter()
        self.n_bytes = 0
        self.lock = threading.Lock()

    def _count(self, answers: Sequence[bytes] = ()) -> None:
        with self.lock:
            self.requests[threading.current_thread().name] += 1
            self.n_bytes += sum(map(len, answers))

    def set(self, key: str, value: Any) -> None:
        self._count()
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        found: bytes = self.inner.get(key)
        self._count([found])
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._count()
        self.inner.wait(keys, timeout or timedelta(seconds=TIMEOUT_S))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.inner.get(key) for key in keys]
        self._count(found)
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        """Each wait has its own."""


@dataclass
class Ranks:
    """Of one generation, in the order of the ranks."""

    groups: list[Groups]
    store: CountedStore = field(default_factory=CountedStore)

    def all(self, work: Callable[[Groups, int], Any]) -> list[Any]:
        """What it returns on each rank; raises what it raised on the first one that did."""
        found: list[Any] = [None] * len(self.groups)

        def run(rank: int) -> None:
            try:
                found[rank] = work(self.groups[rank], rank)
            except Exception as error:  # noqa: BLE001 - raised below
                found[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}")
            for rank in range(len(self.groups))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found


def layout_of(n: int) -> Layout:
    """n ranks with groups of eight at most to train in, where that goes."""
    sizes: list[int] = []
    while n > 1 and len(sizes) < 3:
        part = next((size for size in range(ROW, 1, -1) if n % size == 0), n)
        sizes.append(part)
        n //= part
    tp, dp_shard, pp = [*sizes, 1, 1, 1][:3]
    return Layout(pp=pp, dp_shard=dp_shard, tp=tp, dp_replicate=n)


@contextmanager
def joined(n: int, layout: Layout | None = None, secret: str = "secret") -> Iterator[Ranks]:
    """n participants, of which the first train; torch is told of none of their groups."""
    ranks = Ranks([Groups(1, layout or layout_of(n), torch.device("cpu")) for _ in range(n)])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with (
        mock.patch.object(rendezvous, "TCPStore", return_value=ranks.store),
        mock.patch.object(groups, "listening", return_value=[]),
        mock.patch.object(groups, "inodes", return_value=set()),
    ):
        ranks.all(lambda of, me: of.form(meeting(n, server.port, TIMEOUT_S, secret), me))
        try:
            yield ranks
        finally:
            ranks.all(lambda of, me: of.close())
