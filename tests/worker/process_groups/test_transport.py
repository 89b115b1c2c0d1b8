"""What recovery asks of NCCL, on a process group that behaves like it: every wait is freed, nothing
that an aborted kernel has left is believed, and the process can be used again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.waiting import is_waiting, until
from support.worker import nccl_like
from support.worker.nccl_like import WRONG, NcclLike, NcclLikeTransport, in_host_memory
from support.worker.ranks import meeting, on_ranks

from elastic.types import Abort, Layout, WorkerId
from elastic.types.orders import WorkerOrder
from elastic.worker.process_groups import transport
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import Nccl, is_collective_error
from elastic.worker.session.session import Session

TIMEOUT_S = 60.0
FREED_S = TIMEOUT_S / 2  # by the abort, not by the group's own timeout
LAYOUT = Layout(dp_shard=2, tp=2)


def joined(
    rank: int, n: int, store: tuple[str, int], layout: Layout, generation: int = 1
) -> Groups:
    out = Groups(generation, layout, torch.device("cpu"), transport=NcclLikeTransport())
    out.join(meeting(n, store[1], TIMEOUT_S, "secret"), rank)
    return out


def axis(of: Groups, name: str) -> dist.ProcessGroup:
    assert of.mesh is not None
    return of.mesh.get_group(name)


# -------------------------------------------------------------------------------------------- abort


def hangs(rank: int, n: int, store: tuple[str, int], where: str) -> tuple[float, list[float], str]:
    """Rank 0 does not come to a collective: seconds from the abort until this rank was free, what
    it got, what `check` says."""
    of = joined(rank, n, store, LAYOUT)
    if rank == 0:
        return 0.0, [], ""
    group = of.world if where == "world" else axis(of, where)
    vector = torch.ones(3)
    at: list[float] = []
    this, member = threading.current_thread(), 0 in dist.get_process_group_ranks(group)

    def abort() -> None:
        until(lambda: not member or is_waiting(this, "all_reduce"), "its wait in the collective")
        at.append(time.monotonic())
        of.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    if member:
        dist.all_reduce(vector, group=group)
    free_s = time.monotonic()
    thread.join()
    try:
        of.check()
        said = "believed"
    except ConnectionAbortedError as error:
        said = str(error)
    of.close()
    return max(0.0, free_s - at[0]), vector.tolist(), said


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["world", "fsdp", "tp"])
def test_whoever_waits_in_any_group_is_freed_and_believes_nothing(where: str) -> None:
    """abort of one communicator frees that one only."""
    found = on_ranks(hangs, 4, where)
    waited = [rank for rank in (1, 2, 3) if found[rank][1] == [WRONG] * 3]
    assert waited == {"world": [1, 2, 3], "fsdp": [2], "tp": [1]}[where], (
        "nobody was aborted: this test shows nothing"
    )
    assert max(seconds for seconds, _, _ in found) < FREED_S
    assert {said for _, _, said in found[1:]} == {"generation 1 was aborted"}


def two_kernels_hang(rank: int, n: int, store: tuple[str, int]) -> tuple[str, float, float]:
    """What the abort of one group alone says, and the seconds of the abort of all and of their
    end."""
    of = joined(rank, n, store, Layout(dp_shard=2))
    if rank == 0:
        return "", 0.0, 0.0
    for group in (of.world, axis(of, "fsdp")):
        dist.all_reduce(torch.ones(2), group=group, async_op=True)
    nccl_like.ENDS_S, said = 0.2, "ended"
    try:
        of.transport.communicator(of.world).abort()  # type: ignore[attr-defined]
    except dist.DistBackendError as error:
        said = str(error)
    nccl_like.ENDS_S = 60.0
    at = [time.monotonic()]
    of.abort()
    at.append(time.monotonic())
    of.close()
    return said, at[1] - at[0], time.monotonic() - at[1]


@pytest.mark.e2e
def test_groups_whose_kernels_hang_are_aborted_together() -> None:
    """The abort of one waits for the kernels of the other, and taking them down waits for both."""
    said, abort_s, close_s = on_ranks(two_kernels_hang, 2)[1]
    assert "waits for kernels that do not end" in said, "it does not wait: this test shows nothing"
    assert abort_s < transport.ABORT_MOST_S / 2 and close_s < transport.TAKE_DOWN_MOST_S / 2


def test_groups_made_ahead_are_dropped_while_the_running_ones_are_aborted() -> None:
    """Kernels of either keep the abort of the other."""
    running, ahead = threading.Event(), threading.Event()

    class Ahead:
        generation = 2

        def drop(self) -> None:
            ahead.set()
            assert running.wait(FREED_S)

    session = Session(WorkerId("n", 0), {}, "")
    session._generation = SimpleNamespace(number=1, groups=Blocks(ahead, running), loader=None)  # type: ignore[assignment]
    session._ahead = Ahead()  # type: ignore[assignment]
    try:
        session.order(WorkerOrder(Abort(1)))
        assert running.is_set() and ahead.is_set()
    finally:
        session._generation = None
        session.close()


def test_what_nccl_does_not_take_is_refused() -> None:
    kernel, host = torch.ones(2), torch.ones(2, dtype=torch.int64)
    assert in_host_memory([host]) and not in_host_memory([kernel])
    with pytest.raises(ValueError, match="CUDA and dense"):
        in_host_memory([kernel, host])
    with pytest.raises(TypeError, match="torch.int16"):
        in_host_memory([torch.ones(2, dtype=torch.int16)])


class Blocks:
    """A group whose abort waits for another one's."""

    def __init__(self, before: threading.Event, after: threading.Event) -> None:
        self.before, self.after = before, after

    def abort(self) -> None:
        self.after.set()
        assert self.before.wait(60)


class Direct(Nccl):
    def communicator(self, group: Any) -> Any:
        return group


def test_communicators_are_aborted_at_once() -> None:
    """One whose kernel waits for another's keeps its abort until that one is aborted too."""
    first, second = threading.Event(), threading.Event()
    groups: Any = [Blocks(second, first), Blocks(first, second)]
    began_s = time.monotonic()
    assert Direct(torch.device("cpu")).abort(groups) == 0
    assert time.monotonic() - began_s < transport.ABORT_MOST_S / 2, (
        "one after the other each would keep the abort until then"
    )


def test_an_abort_that_never_returns_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ABORT_MOST_S", 0.05)
    never, done = threading.Event(), threading.Event()
    groups: Any = [Blocks(never, done)]
    assert Direct(torch.device("cpu")).abort(groups) == 1
    assert done.wait(60)
    never.set()
    never.set()


def test_an_abort_that_raises_stops_nothing() -> None:
    class Raises:
        def abort(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    free = threading.Event()
    free.set()
    done = threading.Event()
    groups: Any = [Raises(), Blocks(free, done)]
    began_s = time.monotonic()
    assert Direct(torch.device("cpu")).abort(groups) == 0
    assert time.monotonic() - began_s < transport.ABORT_MOST_S / 2, (
        "one after the other each would keep the abort until then"
    )
    assert done.is_set()


# ---------------------------------------------------------------------------------------- first use


def a_part_exchanges(rank: int, n: int, store: tuple[str, int], warm: bool) -> str:
    if not warm:
        NcclLikeTransport.warm_up = lambda self, groups: None  # type: ignore[method-assign]
    of = joined(rank, n, store, LAYOUT)
    if rank < 2:
        return "not asked"
    mine, theirs = torch.full((4,), float(rank)), torch.zeros(4)
    peer = 5 - rank
    ops = [
        dist.P2POp(dist.isend, mine, group=of.world, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=of.world, group_peer=peer),
    ]
    try:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    except dist.DistBackendError as error:
        return f"{is_collective_error(error)} {error}"
    return "came" if theirs.tolist() == [float(peer)] * 4 else f"wrong {theirs.tolist()}"


@pytest.mark.e2e
def test_messages_of_a_part_of_the_ranks_do_not_wait_for_the_others() -> None:
    """The communicator of a group is set up by all of its ranks: done when the generation is
    joined."""
    assert on_ranks(a_part_exchanges, 4, True)[2:] == ["came", "came"]
    cold = on_ranks(a_part_exchanges, 4, False)[2:]
    assert all("not all ranks of the group took part" in said for said in cold), (
        "it waits for nobody: this test shows nothing"
    )


def sets_up(rank: int, n: int, store: tuple[str, int]) -> tuple[float, bool]:
    """The last rank does not take part in the set-up: seconds from the abort until this rank was
    free, and whether it joined."""
    if rank == n - 1:
        NcclLikeTransport.warm_up = lambda self, groups: None  # type: ignore[method-assign]
        joined(rank, n, store, LAYOUT)
        return 0.0, True
    nccl_like.SET_UP_S = TIMEOUT_S
    of = Groups(1, LAYOUT, torch.device("cpu"), transport=NcclLikeTransport())
    at: list[float] = []

    def abort() -> None:
        until(lambda: bool(NcclLike.setting_up), "the set-up of a communicator")
        at.append(time.monotonic())
        of.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        of.join(meeting(n, store[1], TIMEOUT_S, "secret"), rank)
    except (dist.DistError, ConnectionAbortedError):
        free_s = time.monotonic()
        thread.join()
        of.close()
        return free_s - at[0], False
    raise AssertionError("joined without the last rank")


@pytest.mark.e2e
def test_set_up_that_waits_for_a_rank_is_freed_though_it_holds_the_lock_of_abort() -> None:
    """On an H200 it was not, within 20 s; since its sockets are shut it takes 0.03 s."""
    found = on_ranks(sets_up, 4)[:3]
    assert not any(in_it for _, in_it in found) and max(s for s, _ in found) < FREED_S


# -------------------------------------------------------------------------------------- taking down


def two_generations(rank: int, n: int, store: tuple[str, int], how: str) -> list[float]:
    """The second one's sum over all ranks, after a first one whose shutdown does not work."""
    if how == "raises":
        NcclLike.shutdown_raises = True
    else:
        NcclLike.shutdown_takes_s, transport.TAKE_DOWN_MOST_S = 300.0, 0.2
    first = joined(rank, n, store, Layout(dp_shard=n))
    first.abort()
    first.close()
    assert not dist.is_initialized()
    second = joined(rank, n, store, Layout(tp=n), 2)
    vector = torch.full((2,), float(rank))
    dist.all_reduce(vector, group=axis(second, "tp"))
    return vector.tolist()


@pytest.mark.e2e
@pytest.mark.parametrize("how", ["raises", "takes long"])
def test_a_shutdown_that_fails_leaves_a_process_that_can_be_used(how: str) -> None:
    assert on_ranks(two_generations, 2, how) == [[1.0, 1.0]] * 2


def slow_to_end(rank: int, n: int, store: tuple[str, int]) -> tuple[int, float]:
    """How many groups there were, and the seconds of taking them down."""
    NcclLike.shutdown_takes_s = 1.0
    of = joined(rank, n, store, Layout(dp_shard=n))
    n_groups, began = len(of._made), time.monotonic()
    of.close()
    return n_groups, time.monotonic() - began


@pytest.mark.e2e
def test_groups_are_taken_down_at_once() -> None:
    for n_groups, took_s in on_ranks(slow_to_end, 2):
        assert n_groups >= 3 and took_s < n_groups - 0.5


def test_gloo_that_cannot_be_taken_down_is_forgotten() -> None:
    class Fails:
        def shutdown(self) -> None:
            raise RuntimeError("put in by the test")

    of = Groups(1, Layout(), torch.device("cpu"))
    of.pretend(0)
    of._made.append((Fails(), (0,)))  # type: ignore[arg-type]
    of.close()
    assert not dist.is_initialized()
    of = Groups(2, Layout(tp=2), torch.device("cpu"))
    of.pretend(0)
    of.close()
    assert not dist.is_initialized()


# ------------------------------------------------------------------------------------- who has come


def counts(rank: int, n: int, store: tuple[str, int]) -> list[tuple[str, int]]:
    of = joined(rank, n, store, LAYOUT)
    before = {name: count for name, _, count in of.arrived()}
    if rank != 3:
        dist.all_reduce(torch.ones(2), group=axis(of, "tp"), async_op=True)
    return [(name, count - before[name]) for name, _, count in of.arrived()]


@pytest.mark.e2e
def test_who_has_not_begun_a_collective_is_seen() -> None:
    found = [dict(row)["tp"] for row in on_ranks(counts, 4)]
    assert found == [1, 1, 1, 0]
