"""What NCCL does when ranks are lost, several of them on one GPU; what setting groups up and taking
them down leaves."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from one_shot_rows import Ranks, Tell, all_bounded, threads

from elastic.certify.gpu.solo import open_fds, rss_mib, slope
from elastic.certify.harness.place import NO_GPU, SHARED

EACH_S, AT_ONCE = 60.0, 3
HANG_S, WAIT_S, FREED_MOST_S = 1.0, 5.0, 20.0
DETECTED_S = 2.0  # from the end of a peer until a driver orders the others to leave
GENERATIONS, FIRST = 30, 8  # the first ones are not counted: allocators and caches fill

DUMPS: dict[str, str | None] = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": None,
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": None,
}
LEAST_IS_WORST = ("messages_done", "with_sizes", "with_sizes_again")
BLOCKING: dict[str, str | None] = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}


def environments(
    n: int, cpu: bool, more: dict[str, str | None] | None = None
) -> list[dict[str, str | None]]:
    """Of ranks that share a GPU: each claims to be a host of its own."""
    own: dict[str, str | None] = {**NO_GPU} if cpu else {**SHARED, "GLOO_SOCKET_IFNAME": "lo"}
    return [{**own, "NCCL_HOSTID": f"one-shot-{os.getpid()}-{i}", **(more or {})} for i in range(n)]


def transport(cpu: bool, cold: bool = False) -> Any:
    """elastic's own; on a CPU its stand-in. `cold`: groups are not used when they are made."""
    import torch

    from elastic.worker.process_groups.transport import Nccl

    made: type[Any] = Nccl
    if cpu:
        from support.worker.nccl_like import NcclLikeTransport as made
    if cold:
        made = type("Cold", (made,), {"warm_up": lambda self, groups: None})
    return made(torch.device("cpu")) if cpu else made(torch.device("cuda", 0))


def joined(
    number: int,
    layout: Any,
    at: tuple[int, int, int],
    over: Any,
    pid: int,
    *,
    note: Callable[[Any], Any] = lambda groups: None,
) -> Any:
    """The groups of a generation. `at`: rank, ranks, port of the store; `pid` keeps the places of
    cases apart; `note` gets them before they meet."""
    import torch

    from elastic.types import WorkerId
    from elastic.types.orders import Rendezvous
    from elastic.worker.process_groups.groups import Groups

    rank, n, port = at
    device = torch.device("cuda", 0) if over.device.type == "cuda" else over.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = Groups(number, layout, device, transport=over)
    note(groups)
    participants = tuple(WorkerId("node", i) for i in range(n))
    groups.join(Rendezvous(participants, ("127.0.0.1", port), 60.0, f"{pid:064x}"), rank)
    return groups


def store() -> Any:
    """Hosted by this process; of no other threads than its own."""
    from elastic.worker.process_groups.rendezvous import host_store

    return host_store("127.0.0.1", 120.0)


class Waits(threading.Thread):
    """A thread that does something on the device which may never end."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.value, self.error, self.ended_s = work, None, "", 0.0
        self.start()

    def run(self) -> None:
        try:
            self.value = self.work()
        except Exception as error:  # noqa: BLE001 - what it raises is the answer
            self.error = f"{type(error).__name__}: {error}"
        self.ended_s = time.monotonic()

    def over(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()

    def since(self, began: float) -> float | str:
        return self.ended_s - began if not self.is_alive() else f"not within {FREED_MOST_S:g} s"


def summed(group: Any, device: Any) -> float:
    """An all-reduce of a one, and what the host reads."""
    import torch
    import torch.distributed as dist

    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)
    return float(one)


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------------ what ranks do


def _hang(rank: int, talk: Any, port: int, pid: int, cpu: bool) -> None:
    from elastic.types import Layout

    groups = joined(1, Layout(dp_shard=2), (rank, 2, port), transport(cpu), pid)
    talk.send(("ready", rank))
    talk.recv()
    part, slow = groups.mesh.get_group("fsdp"), 0.1 if cpu else 1.0
    hung = Waits(lambda: summed(part, groups.device))
    assert not hung.over(HANG_S * slow)
    world = Waits(groups.transport.communicator(groups.world).abort)
    world.over(WAIT_S * slow)
    talk.send(("world_abort_frees", hung.over(WAIT_S * slow)))
    began = time.monotonic()
    groups.abort()
    hung.over(FREED_MOST_S)
    talk.send(("freed_s", hung.since(began)))
    talk.send(("item_raises", bool(hung.error)))
    talk.send(("item_value", hung.error or hung.value))
    after = Waits(lambda: summed(part, groups.device))
    after.over(WAIT_S)
    talk.send(("next_call_raises", bool(after.error)))
    began = time.monotonic()
    groups.close()
    talk.send(("close_s", time.monotonic() - began))
    again = joined(2, Layout(), (0, 1, port), transport(cpu), pid)
    talk.send(("again", summed(again.world, again.device) == 1.0))


def _many(rank: int, talk: Any, port: int, pid: int, cpu: bool, together: bool) -> None:
    """Kernels hang in several groups of this rank at once."""
    import torch
    import torch.distributed as dist

    from elastic.types import Layout

    groups = joined(1, Layout(dp_replicate=2, dp_shard=2), (rank, 4, port), transport(cpu), pid)
    talk.send(("ready", rank))
    talk.recv()

    def all_groups() -> None:
        ones = [torch.ones(1, device=groups.device) for _ in groups._device_groups]
        works = [
            dist.all_reduce(x, group=g, async_op=True)
            for x, g in zip(ones, groups._device_groups, strict=True)
        ]
        for work in works:
            work.wait()
        synchronize(groups.device)

    hung = Waits(all_groups)
    assert not hung.over(HANG_S)
    began = time.monotonic()

    def one_by_one() -> None:
        for group in groups._device_groups:
            groups.transport.communicator(group).abort()

    Waits(groups.abort if together else one_by_one)
    hung.over(FREED_MOST_S)
    talk.send(("freed_s", hung.since(began)))


def _kill(rank: int, talk: Any, port: int, pid: int, cpu: bool) -> None:
    from elastic.types import Layout

    groups = joined(1, Layout(dp_shard=2), (rank, 2, port), transport(cpu), pid)
    hung = (
        Waits(lambda: summed(groups.mesh.get_group("fsdp"), groups.device)) if rank == 0 else None
    )
    talk.send(("ready", rank))
    talk.recv()
    assert hung is not None
    began = time.monotonic()
    groups.abort()
    hung.over(FREED_MOST_S)
    talk.send(("freed_s", hung.since(began)))
    began = time.monotonic()
    groups.close()
    talk.send(("close_s", time.monotonic() - began))


def _first_batch(rank: int, talk: Any, port: int, pid: int, cpu: bool, cold: bool) -> None:
    """Two of three ranks exchange a message."""
    import torch
    import torch.distributed as dist

    from elastic.types import Layout

    groups = joined(1, Layout(dp_shard=3), (rank, 3, port), transport(cpu, cold), pid)
    talk.send(("ready", rank))
    talk.recv()

    def exchange() -> None:
        there, into = 1 - rank, torch.zeros(4096, device=groups.device)
        given = torch.ones(4096, device=groups.device)
        ops = [dist.P2POp(dist.irecv, into, there), dist.P2POp(dist.isend, given, there)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        synchronize(groups.device)

    sent = Waits(exchange)
    talk.send(("messages_done", sent.over(HANG_S if cpu else 8.0) and not sent.error))
    if cold:
        began = time.monotonic()
        Waits(groups.abort)
        sent.over(FREED_MOST_S)
        talk.send(("freed_s", sent.since(began)))


def _to_all(rank: int, talk: Any, port: int, pid: int, cpu: bool) -> None:
    """An all-to-all with sizes, without them, and with them again."""
    import torch
    import torch.distributed as dist

    from elastic.types import Layout

    groups = joined(1, Layout(dp_shard=2), (rank, 2, port), transport(cpu), pid)
    talk.send(("ready", rank))
    talk.recv()
    group, came = groups.mesh.get_group("fsdp"), torch.zeros(4, device=groups.device)
    given = torch.arange(4.0, device=groups.device)

    def exchanged(sizes: list[int] | None) -> list[float]:
        dist.all_to_all_single(came.zero_(), given, sizes, sizes, group=group)
        return came.tolist()  # type: ignore[no-any-return]

    expected = [0.0, 1.0, 0.0, 1.0] if rank == 0 else [2.0, 3.0, 2.0, 3.0]
    talk.send(("with_sizes", exchanged([2, 2]) == expected))
    try:
        talk.send(("without", f"done: {exchanged(None) == expected}"))
    except RuntimeError as error:
        talk.send(("without", f"{type(error).__name__}: {error}"))
    again = Waits(lambda: exchanged([2, 2]) == expected)
    talk.send(("with_sizes_again", again.over(WAIT_S) and again.value))


def _set_up(rank: int, talk: Any, port: int, pid: int, cpu: bool) -> None:
    """Communicators are set up, and one rank does not come."""
    from elastic.types import Layout

    over = transport(cpu, cold=rank == 2)
    made: list[Any] = []
    talk.send(("ready", rank))
    joins = Waits(partial(_join_noted, made, Layout(dp_shard=3), (rank, 3, port), over, pid))
    assert rank == 2 or not joins.over(WAIT_S)
    talk.recv()
    began = time.monotonic()
    made[0].abort()
    joins.over(FREED_MOST_S)
    talk.send(("freed_s", joins.since(began)))
    talk.send(("raises", bool(joins.error)))
    talk.send(("why", joins.error))
    began = time.monotonic()
    made[0].close()
    talk.send(("close_s", time.monotonic() - began))
    again = joined(2, Layout(), (0, 1, port), transport(cpu), pid + rank)
    talk.send(("again", summed(again.world, again.device) == 1.0))


def _join_noted(made: list[Any], *how: Any) -> None:
    joined(1, *how, note=made.append)


# ------------------------------------------------------------------------------------ the part nccl


def _one(tell: Tell, cpu: bool, name: str, n: int, what: tuple[Any, ...]) -> None:
    """A case: `what` is the ranks' work, its arguments, the environment, the fault."""
    work, more, environment, fault = what
    here = store()
    with Ranks(
        n, work, environments(n, cpu, environment), here.port, os.getpid(), cpu, *more
    ) as ranks:
        ranks.ready()
        if fault == "stop":
            ranks.signal(n - 1, signal.SIGSTOP)
        if fault == "kill":
            ranks.kill(n - 1)
            time.sleep(0.1 if cpu else DETECTED_S)  # sleeps: a driver needs so long to find out
        # the last is stopped, gone, or has no message
        speak = range(n if fault == "both" else n - 1)
        for rank in speak:
            ranks.go(rank)
        found: dict[str, list[Any]] = {}
        for rank in speak:
            for key, value in ranks.told(rank, 4 * FREED_MOST_S):
                if key == "error":
                    tell("error", f"{name}, rank {rank}: {value}")
                elif len(speak) == 1:
                    tell(f"{name}.{key}", value)
                else:
                    found.setdefault(key, []).append(value)
        for key, values in found.items():  # the worst of the ranks
            words = [value for value in values if isinstance(value, str)]
            tell(
                f"{name}.{key}",
                words[0] if words else (min if key in LEAST_IS_WORST else max)(values),
            )


def nccl(tell: Tell, cpu: bool, seconds: float) -> None:
    cases = [
        ("hang", 2, (_hang, (), {}, "stop")),
        ("to_all", 2, (_to_all, (), {}, "both")),
        ("kill", 2, (_kill, (), {}, "kill")),
        ("set_up", 3, (_set_up, (), {}, "")),
        ("cold", 3, (_first_batch, (True,), {}, "")),
        ("kill_dump", 2, (_kill, (), DUMPS, "kill")),
        ("together", 4, (_many, (True,), {}, "stop")),
        ("warm", 3, (_first_batch, (False,), {}, "")),
        ("one_by_one", 4, (_many, (False,), {}, "stop")),
        ("blocking", 3, (_set_up, (), BLOCKING, "")),
    ]
    if cpu:
        for name in ("kill_dump", "one_by_one", "blocking"):
            tell.skip(f"{name}.freed_s", "differs from the case before it in NCCL alone")
        cases = [case for case in cases if case[0] not in ("kill_dump", "one_by_one", "blocking")]
    works = [(name, partial(_one, tell, cpu, name, n, what)) for name, n, what in cases]
    all_bounded(works, tell, AT_ONCE, min(EACH_S, seconds))


# ----------------------------------------------------------------------------- the part generations


def _lives(rank: int, talk: Any, port: int, pid: int, cpu: bool, ends_s: float) -> None:
    """One generation after the other, until all of them were or the time is up: rank 0 says so."""
    import torch
    import torch.distributed as dist

    from elastic.types import Layout
    from elastic.worker.process.allocator import settle_allocator, trim

    settle_allocator()  # and trim, as a session does
    talk.send(("ready", rank))
    layout, n = (Layout(dp_shard=2), 2) if cpu else (Layout(dp_replicate=2, dp_shard=2), 4)
    seen: dict[str, list[float]] = {
        key: [] for key in ("join_s", "close_s", "rss_mib", "fds", "threads", "gpu_mib")
    }
    for number in range(1, (5 if cpu else GENERATIONS) + 1):
        began = time.monotonic()
        groups = joined(number, layout, (rank, n, port), transport(cpu), pid)
        seen["join_s"].append(time.monotonic() - began)
        summed(groups.mesh.get_group("fsdp"), groups.device)
        more = torch.tensor([int(time.monotonic() < ends_s)])
        dist.all_reduce(more, op=dist.ReduceOp.MIN, group=groups.world)
        began = time.monotonic()
        groups.close()
        seen["close_s"].append(time.monotonic() - began)
        trim()
        if not cpu:
            free, whole = torch.cuda.mem_get_info()
            seen["gpu_mib"].append((whole - free) / 2**20 / n)
        seen["rss_mib"].append(rss_mib())
        seen["fds"].append(open_fds())
        seen["threads"].append(threads())
        if not int(more):
            break
    for key in ("join_s", "close_s"):
        talk.send((key, statistics.median(seen[key])))
    for key in ("rss_mib", "fds", "threads", "gpu_mib"):
        if seen[key]:
            talk.send((f"{key}.slope", slope(seen[key][1 if cpu else FIRST :])))
    talk.send(("n", len(seen["join_s"])))


def generations(tell: Tell, cpu: bool, seconds: float) -> None:
    here, n = store(), 2 if cpu else 4
    ends_s = time.monotonic() + 0.8 * seconds
    with Ranks(n, _lives, environments(n, cpu), here.port, os.getpid(), cpu, ends_s) as ranks:
        ranks.ready()
        for key, value in ranks.told(0, seconds):
            tell(key, value)
    if cpu:
        tell.skip("gpu_mib.slope", "there is no GPU")
