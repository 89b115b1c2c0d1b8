"""Ranks that somebody else has started (torchrun, another trainer) find each other: each has a
connection to rank 0, over which orders and beats go."""

from __future__ import annotations

import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from elastic.errors import LostContact, SpecError
from elastic.text import n_of, ranks_of
from elastic.types import Node, WorkerId
from elastic.worker.hosting.served_session import Said
from elastic.worker.process.free_memory import free_host_bytes
from elastic.worker.process_groups.rendezvous import (
    PROOF_BYTES,
    SECRET_BYTES,
    host_store,
    listening,
    new_secret,
    proof,
)
from elastic.worker.standalone.rank_link import RankLink

log = logging.getLogger(__name__)
ADDRESS = "elastic/address"
LOOPBACK = "127.0.0.1"
HELLO_MOST_S, HELLO_MOST_BYTES = 10.0, 4096
VISITORS_MOST = 64  # that are heard at once
# a host that is gone without a word is found after 90 s
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 6}
LOOK_S = 0.1
POOL = "ranks"
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"  # of NCCL, from 2.30 on
GPUS_SHOWN = 2


@dataclass(frozen=True)
class Started:
    """What the launcher has said of this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    host: str = LOOPBACK  # of rank 0
    node: str = ""  # which of the launcher's nodes this is; '' = it says nothing of nodes

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
        node = environment.get("GROUP_RANK") or environment.get("NODE_RANK") or ""
        return cls(rank, local_rank, world_size, host, node)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        said = f"is '{text}'" if text else "is missing"
        raise SpecError(
            f"{name} {said}: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are set by "
            "torchrun; start it so"
        )
    return int(text)


@dataclass(frozen=True)
class RankHello:
    """What a rank says of itself. `node`: the launcher's, else its host's name; `host_bytes`: of
    memory that is free there; `gpu`: its own, as `gpu_here` has it."""

    rank: int
    node: str
    host_bytes: int
    gpu: str = ""

    @classmethod
    def of(cls, me: Started, gpu: str = "") -> RankHello:
        return cls(me.rank, me.node or socket.gethostname(), free_host_bytes(), gpu)

    @classmethod
    def read(cls, text: bytes | str) -> RankHello:
        """Raises ValueError for what no rank of this version says."""
        try:
            found = cls(**json.loads(text))
        except (TypeError, RecursionError) as error:
            raise ValueError(type(error).__name__) from error
        kinds = [type(found.rank), type(found.node), type(found.host_bytes), type(found.gpu)]
        if kinds != [int, str, int, str] or found.rank < 1:
            raise ValueError("it has other values")
        return found


def gpu_here(device: torch.device | None, environment: Mapping[str, str]) -> str:
    """That GPU as NCCL tells it from others: by its id, on one host. '' = there is none, or ranks
    may share it."""
    if device is None or environment.get(SHARE, "0") != "0":
        return ""
    host = environment.get("NCCL_HOSTID") or socket.gethostname()
    return f"GPU-{torch.cuda.get_device_properties(device).uuid} of {host}"


@dataclass(frozen=True)
class Meeting:
    """All ranks. `worker`: who this one is among the `nodes`; `links`: on rank 0 to each of the
    others, in order, on those to rank 0. `backend`: of the default group that was there before, ''
    = none; `store`: in which they meet to set it up again."""

    me: Started
    worker: WorkerId
    nodes: tuple[Node, ...] = ()
    workers: tuple[WorkerId, ...] = ()  # in the order of the ranks
    links: tuple[RankLink, ...] = ()
    backend: str = ""
    store: Store | None = None
    gpus: tuple[str, ...] = ()  # on rank 0: those of all ranks, in order

    def check_gpus(self) -> None:
        """Raises SpecError where ranks have one GPU together: NCCL refuses that, a minute later."""
        ranks: dict[str, list[int]] = {}
        for rank, gpu in enumerate(self.gpus):
            ranks.setdefault(gpu, []).append(rank)
        ranks.pop("", None)
        shared = [f"{ranks_of(some)} have {gpu}" for gpu, some in ranks.items() if len(some) > 1]
        if shared:
            n_more = len(shared) - GPUS_SHOWN
            more = [f"{n_of(n_more, 'more GPU')} likewise"] if n_more > 0 else []
            said = "; ".join([*shared[:GPUS_SHOWN], *more])
            raise SpecError(
                f"{said}: NCCL takes one rank for each GPU; start "
                "as many ranks as a host has GPUs (torchrun --nproc-per-node), and let "
                "CUDA_VISIBLE_DEVICES show them all, or each rank its own"
            )

    def give_back(self) -> None:
        """Sets up a default group again where there was one before."""
        if self.store is not None and not dist.is_initialized():
            dist.init_process_group(
                self.backend,
                store=PrefixStore("elastic/after", self.store),
                rank=self.me.rank,
                world_size=self.me.world_size,
            )


def meet(me: Started, timeout_s: float, gpu: str = "") -> Meeting:
    """Blocks until all ranks are there. A default process group that stands is used to meet, and
    then taken down. `gpu`: this rank's, as `gpu_here` has it. Raises LostContact."""
    backend = str(dist.get_backend()) if dist.is_initialized() else ""
    store = host_store(me.host, timeout_s) if backend and me.rank == 0 else None
    listener = listening(me.host) if me.rank == 0 and me.world_size > 1 else None
    here = _Address(
        listener.getsockname()[1] if listener is not None else 0,
        store.port if store is not None else 0,
        new_secret(),
    )
    until_s, ask = time.monotonic() + timeout_s, lambda: here
    if backend:
        here = _broadcast(here)
        dist.destroy_process_group()
        timeout = timedelta(seconds=timeout_s)
        store = store or TCPStore(
            me.host, here.store, is_master=False, timeout=timeout, wait_for_workers=False
        )
    elif me.world_size > 1:
        timeout = timedelta(seconds=timeout_s)
        meeting_point, _, _ = next(rendezvous("env://", me.rank, me.world_size, timeout=timeout))
        if listener is not None:
            meeting_point.set(ADDRESS, json.dumps(asdict(here)))
        ask = lambda: _Address(**json.loads(meeting_point.get(ADDRESS)))  # noqa: E731
    if me.rank > 0:
        link, worker = _found(me, ask, until_s, gpu=gpu)
        return Meeting(me, worker, links=(link,), backend=backend, store=store)
    if listener is None:
        (found,), workers = _nodes([RankHello.of(me, gpu)])
        return Meeting(me, workers[0], (found,), workers, (), backend, store)
    with listener:
        met = _gathered(listener, here.secret, me.world_size, until_s=until_s)
    hellos = [RankHello.of(me, gpu), *(hello for hello, _ in met)]
    nodes, workers = _nodes(hellos)
    for worker, (_, link) in zip(workers[1:], met, strict=True):
        link.send(Said(0, worker))
    links, gpus = tuple(link for _, link in met), tuple(hello.gpu for hello in hellos)
    return Meeting(me, workers[0], nodes, workers, links, backend, store, gpus)


@dataclass(frozen=True)
class _Address:
    """Where rank 0 listens, and what those who come must know."""

    port: int
    store: int
    secret: str


def _nodes(hellos: Sequence[RankHello]) -> tuple[tuple[Node, ...], tuple[WorkerId, ...]]:
    """The nodes that the ranks are on, and each rank's worker there."""
    names = list(dict.fromkeys(hello.node for hello in hellos))
    width = len(str(len(names) - 1))
    on: dict[str, list[RankHello]] = {name: [] for name in names}
    workers = []
    for hello in hellos:
        node = f"node-{names.index(hello.node):0{width}}"
        workers.append(WorkerId(node, len(on[hello.node])))
        on[hello.node].append(hello)
    nodes = []
    for i, name in enumerate(names):
        least_bytes = min(hello.host_bytes for hello in on[name])
        nodes.append(Node(f"node-{i:0{width}}", POOL, len(on[name]), host_memory_bytes=least_bytes))
    return tuple(nodes), tuple(workers)


def _gathered(
    listener: socket.socket, secret: str, world_size: int, *, until_s: float
) -> list[tuple[RankHello, RankLink]]:
    """Whoever knows the secret, until all other ranks are there, in their order."""
    found: dict[int, _Heard] = {}
    with _Visitors(listener, secret) as visitors:
        while len(found) < world_size - 1:
            if time.monotonic() > until_s:
                missing = sorted({*range(1, world_size)} - {*found})
                raise LostContact(
                    f"of {world_size} ranks {len(missing)} did not come (the first of them: rank "
                    f"{missing[0]}); start all of them anew"
                )
            for one in visitors.heard(until_s):
                if one.hello is None:
                    one.link.close()
                elif one.hello.rank not in found or found[one.hello.rank].number < one.number:
                    found[one.hello.rank] = one  # the newest: it has given up the one before
    return [
        (one.hello, RankLink(one.link)) for _, one in sorted(found.items()) if one.hello is not None
    ]


@dataclass(frozen=True)
class _Heard:
    """A visitor. `hello`: None = it does not know the secret, or says nothing."""

    number: int  # in the order in which they came
    hello: RankHello | None
    link: Connection


class _Visitors:
    """Who connects to rank 0, each heard in a thread of its own: one that says nothing, or half a
    word, keeps nobody else waiting. Who comes when VISITORS_MOST are being heard waits its turn."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        listener.setblocking(False)
        self._listener, self._secret = listener, secret
        # by number: until when it has time to say who it is, and a handle to end that by
        self._unheard: dict[int, tuple[float, socket.socket]] = {}
        self._numbers = count()
        self._news: SimpleQueue[_Heard] = SimpleQueue()
        self._wakes, self._woken = socket.socketpair()

    def __enter__(self) -> _Visitors:
        return self

    def __exit__(self, *exc: object) -> None:
        for number in list(self._unheard):
            self._forget(number)
        self._wakes.close()
        self._woken.close()

    def heard(self, until_s: float) -> Iterator[_Heard]:
        """Waits until then for somebody new, or somebody to be heard."""
        full = len(self._unheard) >= VISITORS_MOST
        ends_s = min([until_s, *(end_s for end_s, _ in self._unheard.values())])
        there = [self._woken] if full else [self._woken, self._listener]
        ready = wait(there, max(0.0, ends_s - time.monotonic()))
        if self._listener in ready:
            with suppress(BlockingIOError, ConnectionError):  # it has left again
                self._take(self._listener.accept()[0])
        if self._woken in ready:
            self._woken.recv(VISITORS_MOST)
        while not self._news.empty():
            one = self._news.get()
            if one.number in self._unheard:
                self._forget(one.number, end=False)
                yield one
        for number, (end_s, _) in list(self._unheard.items()):
            if time.monotonic() > end_s:
                self._forget(number)

    def _take(self, visitor: socket.socket) -> None:
        number = next(self._numbers)
        self._unheard[number] = time.monotonic() + HELLO_MOST_S, visitor.dup()
        threading.Thread(
            target=self._hear, args=(number, _connection(visitor)), name="visitor", daemon=True
        ).start()

    def _hear(self, number: int, link: Connection) -> None:
        self._news.put(_Heard(number, _welcomed(link, self._secret), link))
        with suppress(OSError):  # nobody waits any more
            self._wakes.send(b"1")

    def _forget(self, number: int, *, end: bool = True) -> None:
        _, handle = self._unheard.pop(number)
        if end:
            with suppress(OSError):  # it has hung up
                handle.shutdown(socket.SHUT_RDWR)
        handle.close()


def _welcomed(link: Connection, secret: str) -> RankHello | None:
    """Nothing that a stranger sends is looked into."""
    with suppress(OSError, EOFError):
        if not link.poll(HELLO_MOST_S):
            return None
        said = link.recv_bytes(HELLO_MOST_BYTES)
        mark, text = said[:PROOF_BYTES], said[PROOF_BYTES:].decode(errors="replace")
        if hmac.compare_digest(mark, proof(secret, text)):
            link.send_bytes(proof(secret, "rank 0"))
            try:
                return RankHello.read(text)
            except ValueError as error:
                log.warning(
                    "a rank said of itself what is not understood (%s); all ranks need the same "
                    "version of elastic", error
                )  # fmt: skip
    return None


def _found(
    me: Started, ask: Callable[[], _Address], until_s: float, *, gpu: str = ""
) -> tuple[RankLink, WorkerId]:
    """As `_joined`. The launcher's store may still hold the address of a rank 0 that is gone, until
    the one that was started in its place has written its own. Raises LostContact."""
    while True:
        try:
            return _joined(me, ask(), until_s, gpu=gpu)
        except LostContact:
            if time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)


def _joined(
    me: Started, there: _Address, until_s: float, *, gpu: str = ""
) -> tuple[RankLink, WorkerId]:
    """The connection to rank 0, and who this one is. Raises LostContact."""
    left_s = max(1.0, until_s - time.monotonic())
    try:
        link = _connection(socket.create_connection((me.host, there.port), left_s))
        text = json.dumps(asdict(RankHello.of(me, gpu)))
        link.send_bytes(proof(there.secret, text) + text.encode())
        if not link.poll(left_s):
            raise TimeoutError("it does not answer")
        known = link.recv_bytes(HELLO_MOST_BYTES)
        if not hmac.compare_digest(known, proof(there.secret, "rank 0")):
            raise LostContact(f"{me.host}:{there.port} is not rank 0; start all ranks anew")
        joined = RankLink(link)
        # it waits for the others, by its own clock
        if not joined.poll(max(1.0, until_s - time.monotonic()) + HELLO_MOST_S):
            raise TimeoutError("it does not say who this rank is")
        worker: WorkerId = joined.recv().what
    except (OSError, EOFError) as error:
        raise LostContact(
            f"rank 0 does not answer at {me.host}:{there.port} ({error or 'it has hung up'}); "
            "start all ranks anew"
        ) from error
    return joined, worker


def _connection(made: socket.socket) -> Connection:
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(made.detach())


def _broadcast(here: _Address) -> _Address:
    """Rank 0's, over the default group that stands."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in str(dist.get_backend())
        else torch.device("cpu")
    )
    numbers = [here.port, here.store, *bytes.fromhex(here.secret)]
    told: Any = torch.tensor(numbers, device=device)
    dist.broadcast(told, 0)
    port, store, *secret = told.tolist()
    return _Address(port, store, bytes(secret[:SECRET_BYTES]).hex())
