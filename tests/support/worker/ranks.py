"""A function on several ranks, each a process of its own, around one store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from support.worker.forks import FORKS

from elastic.types import WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.process_groups.rendezvous import host_store

WITHIN_S = 120.0  # on a machine however busy


def meeting(n: int, port: int, timeout_s: float = 60.0, secret: str = "") -> Rendezvous:
    """Of n ranks at a store of this machine."""
    return Rendezvous(
        tuple(WorkerId("node", i) for i in range(n)), ("127.0.0.1", port), timeout_s, secret
    )


def _serve(
    pipe: Connection, function: Callable[..., Any], rank: int, arguments: tuple[Any, ...]
) -> None:
    pipe.send(function(rank, *arguments))
    pipe.recv()  # stays until all have answered: the end of a process ends its connections


def on_ranks(
    function: Callable[..., Any], n: int, *arguments: Any, within_s: float = WITHIN_S
) -> list[Any]:
    """What a module's `function(rank, n, store, *arguments)` has returned on each rank; `store`:
    host and port."""
    store = host_store("127.0.0.1", within_s)
    found = []
    with ExitStack() as ended:
        pipes = []
        for rank in range(n):
            mine, theirs = FORKS.Pipe()
            given = (n, ("127.0.0.1", store.port), *arguments)
            process = FORKS.Process(
                target=_serve, args=(theirs, function, rank, given), daemon=True
            )
            process.start()
            theirs.close()
            ended.callback(process.join)
            ended.callback(process.kill)
            pipes.append(mine)
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(within_s), f"rank {rank} has not answered"
            found.append(pipe.recv())
    return found
