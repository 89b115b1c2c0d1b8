"""Ranks that somebody else has started (torchrun, another trainer) find each other and a store of
their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from elastic.errors import SpecError
from elastic.worker.process_groups.rendezvous import host_store

ADDRESS = "elastic/address"
READ_MOST_S, READ_LOOK_S = 30.0, 0.02
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Started:
    """What the launcher has said of this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = LOOPBACK  # of rank 0
    attempt: int = 0  # how often the launcher has started all ranks anew

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Started:
        """From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; none of them = one process.
        Raises SpecError."""
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls()
        world_size = _number(environment, "WORLD_SIZE")
        rank = _number(environment, "RANK")
        if not 0 <= rank < world_size:
            raise SpecError(
                f"RANK={rank}, WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE - 1; start "
                "it by torchrun"
            )
        if world_size > 1:
            _number(environment, "MASTER_PORT")
        local_rank = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        host = environment.get("MASTER_ADDR", "" if world_size > 1 else LOOPBACK)
        if not host:
            raise SpecError(
                f"WORLD_SIZE={world_size} and no MASTER_ADDR: the host of rank 0 is missing; "
                "start it by torchrun"
            )
        attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
        return cls(rank, local_rank, world_size, host, attempt)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        said = f"is '{text}'" if text else "is missing"
        raise SpecError(
            f"{name} {said}: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set by "
            "torchrun; start it so"
        )
    return int(text)


@dataclass
class Meeting:
    """All ranks, around a store that rank 0 hosts. `store` is for single words; the generation's
    groups hang on `address`."""

    me: Started
    address: tuple[str, int]
    store: Store
    backend: str  # of the default group that was there before; '' = none

    def decided(self, key: str, decide: Callable[[], str]) -> str:
        """What rank 0 has decided, for everyone. What `decide` raises on rank 0 belongs to the
        caller, who tells the others."""
        if self.me.rank == 0:
            self.store.set(key, decide())
        return self.store.get(key).decode()

    def all_said(self, key: str) -> dict[int, str] | None:
        """What each rank has said under `key`; None until all have."""
        keys = [f"{key}/{rank}" for rank in range(self.me.world_size)]
        if not self.store.check(keys):
            return None
        return {rank: self.store.get(name).decode() for rank, name in enumerate(keys)}

    def say(self, key: str, words: str) -> None:
        self.store.set(f"{key}/{self.me.rank}", words)

    def said(self, key: str) -> str | None:
        """What anyone has set under `key`."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def tell(self, key: str, words: str) -> None:
        self.store.set(key, words)

    def all_have_read(self, key: str) -> None:
        """Every rank says that it has; rank 0 waits for that before it goes, a bounded time: the
        others would find its store gone, in the middle of a call."""
        self.say(f"read/{key}", "")
        until_s = time.monotonic() + READ_MOST_S
        while self.me.rank == 0 and self.all_said(f"read/{key}") is None:
            if time.monotonic() > until_s:
                return
            time.sleep(READ_LOOK_S)

    def give_back(self) -> None:
        """Sets up a default group again where there was one before."""
        if self.backend and not dist.is_initialized():
            store = PrefixStore("elastic/after", self.store)
            dist.init_process_group(
                self.backend, store=store, rank=self.me.rank, world_size=self.me.world_size
            )


def meet(me: Started, timeout_s: float) -> Meeting:
    """Blocks until all ranks are there. A default process group that stands is used to meet, and
    then taken down."""
    timeout = timedelta(seconds=timeout_s)
    server = host_store(me.host, timeout_s) if me.rank == 0 else None
    port, backend = server.port if server is not None else 0, ""
    if dist.is_initialized():
        backend = str(dist.get_backend())
        port = _broadcast(port)
        dist.destroy_process_group()
    elif me.world_size > 1:
        meeting_point, _, _ = next(rendezvous("env://", me.rank, me.world_size, timeout=timeout))
        if server is not None:
            meeting_point.set(ADDRESS, str(port))
        port = int(meeting_point.get(ADDRESS))
    store = server or TCPStore(
        me.host, port, is_master=False, timeout=timeout, wait_for_workers=False
    )
    meeting = Meeting(me, (me.host, port), PrefixStore("elastic/words", store), backend)
    meeting.say("here", "")
    for rank in range(me.world_size):
        store_key = f"here/{rank}"
        meeting.store.get(store_key)  # the launcher's own store is not needed any more
    return meeting


def _broadcast(port: int) -> int:
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in str(dist.get_backend())
        else torch.device("cpu")
    )
    told: Any = torch.tensor([port], device=device)
    dist.broadcast(told, 0)
    return int(told[0])
