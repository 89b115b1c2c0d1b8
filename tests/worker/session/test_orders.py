"""Orders to a worker: which of several counts, which words the next commit carries, and where all
must have stopped."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.errors import InternalError, StateLost
from elastic.types import (
    Abort,
    Box,
    DropGroups,
    EnterPlan,
    Layout,
    Move,
    Plan,
    Prepare,
    Quiesce,
    Rehearsal,
    Resume,
    RollForward,
    SetCadence,
    SetShares,
    Stop,
    StoreCopy,
    Terms,
    WorkerId,
)
from elastic.types.admission import Entry
from elastic.types.orders import InjectFault, Isolate, Rendezvous, WorkerOrder, WriteShard
from elastic.worker.process.cut_off import CutOff
from elastic.worker.process.fault_injection import DeviceFaults, Slowness
from elastic.worker.process.side_stream import SideStream
from elastic.worker.session.session import Session
from elastic.worker.session.takeover import Takeover
from elastic.worker.session.workplace import EnterOrder
from elastic.worker.state.host_copy import HostMemory
from elastic.worker.state.train_state import Held

RANKS = (WorkerId("a", 0), WorkerId("b", 0))


def order(generation: int) -> EnterOrder:
    plan = Plan(
        generation,
        Layout(dp_shard=2),
        RANKS,
        (4, 4),
        (),
        resume=Resume("live", 6, generation - 1, Layout(dp_shard=2)),
    )
    return EnterOrder(plan, 0, Rendezvous(RANKS, ("", 0)))


def to_enter(generation: int) -> WorkerOrder:
    return WorkerOrder(EnterPlan(order(generation).plan), Rendezvous(RANKS, ("", 0)))


@pytest.fixture
def session() -> Any:
    """Without its thread."""
    found: Any = Session.__new__(Session)
    found._lock, found.me = threading.Condition(), RANKS[1]
    found._preparation = SimpleNamespace(place=None)
    found._orders, found._aborted, found._stop_at, found._save_at = [], 0, 0, 0
    found._thread, found._stood = threading.main_thread(), (0, "")
    return found


def ordered(session: Any) -> list[int]:
    return [one.plan.generation for one in session._orders]


def test_the_newest_order_to_enter_counts_whichever_comes_first(session: Any) -> None:
    session.order(to_enter(3))
    session.order(to_enter(2))
    assert ordered(session) == [3]
    session.order(to_enter(4))
    assert ordered(session) == [4]
    session._aborted = 5
    session.order(to_enter(5))
    assert ordered(session) == [4], "a generation that was aborted is not entered"


def test_a_generation_that_is_superseded_stops_and_a_copy_is_asked_for_once(session: Any) -> None:
    session._generation = None
    assert session._words(3) == (False, False)
    session.order(WorkerOrder(StoreCopy(3)))
    assert session._words(3) == (False, True)
    assert session._words(3) == (False, False), "the copy was asked for once"
    session.order(WorkerOrder(Quiesce(3)))
    assert session._words(3) == (True, True) == session._words(3), "until all have heard it"
    assert session._words(4) == (False, False), "that was an order to another generation"
    session.order(to_enter(5))
    assert session._words(4) == (True, False)


def test_each_action_goes_where_it_belongs(session: Any) -> None:
    """A worker knows itself among the participants; what the driver orders comes to the session as
    it was decided."""
    session._faults, session._cut = DeviceFaults(), CutOff()
    session._ahead, session._generation, session._forward, session._prepare_asked = (
        None,
        None,
        None,
        None,
    )
    said: list[Any] = []
    session._put, session._quiesced = said.append, lambda generation: generation
    entry, rehearsals = Entry(Terms()), (Rehearsal(Layout(), (4,), 1, 2, (0,)),)
    session.order(WorkerOrder(Prepare("b", rehearsals), entry=entry))
    assert session._prepare_asked == (rehearsals, entry)
    session.order(to_enter(3))
    (entering,) = session._orders
    assert (entering.me, entering.plan, entering.rendezvous) == (
        1,
        order(3).plan,
        to_enter(3).rendezvous,
    )
    session.order(WorkerOrder(RollForward(2, 6, (1.0, 2.0))))
    assert session._forward == (2, 6, (1.0, 2.0))
    session.order(WorkerOrder(InjectFault("slow", 2.0, 0.006)))
    assert session._faults.slowness == Slowness(2.0, 0.006)
    session.order(WorkerOrder(Isolate(60.0, storage=True)))
    with pytest.raises(TimeoutError):
        session._cut.check_storage()
    changed: list[Any] = []
    session._generation = SimpleNamespace(
        number=3, change=changed.append, groups=SimpleNamespace(abort=lambda: said.append("abort")),
        loader=SimpleNamespace(close=lambda timeout_s: said.append("batches")),
    )  # fmt: skip
    for action in (
        SetShares(3, (1, 7), 5),
        SetShares(2, (1, 7), 5),
        SetCadence(3, 4, 8),
        SetCadence(2, 4, 8),
    ):
        session.order(WorkerOrder(action))
    assert changed == [SetShares(3, (1, 7), 5), SetCadence(3, 4, 8)], "of the generation that runs"
    written: list[Any] = []
    session._preparation.place = SimpleNamespace(
        saving=SimpleNamespace(write_for=lambda *part: written.append(part))
    )
    session.order(WorkerOrder(WriteShard(order(3).plan, 6, 0)))
    assert written == [(order(3).plan, 6, 0)]
    ahead = session._ahead = SimpleNamespace(generation=4, drop=lambda: said.append("drop"))
    session.order(WorkerOrder(DropGroups(3)))
    assert session._ahead is ahead and said == []
    session.order(WorkerOrder(DropGroups(4)))
    session.order(WorkerOrder(Abort(3)))
    assert said == ["drop", "abort", "batches"] and session._aborted == 3 and ordered(session) == []
    session._generation = None
    session.order(WorkerOrder(Abort(4)))
    assert said[3:] == [4], "one that is idle answers at once"


def test_what_is_no_order_to_a_worker_is_refused(session: Any) -> None:
    with pytest.raises(InternalError, match="Stop is no order to a worker"):
        session.order(WorkerOrder(Stop("stopped", "enough")))
    with pytest.raises(InternalError, match="generation 3 says not where its participants meet"):
        session.order(WorkerOrder(EnterPlan(order(3).plan)))


@pytest.mark.parametrize(
    ("mine", "others", "step"), [(6, [6], 6), (None, [6], 6), (6, [7], None), (None, [-1], None)]
)
def test_all_ranks_of_the_old_generation_have_stopped_at_one_step(
    mine: int | None, others: list[int], step: int | None
) -> None:
    """Who has no part of the old generation (None) says nothing."""

    def all_reduce(seen: torch.Tensor, op: Any) -> None:
        rows = [seen, *(torch.tensor([n, -n if n >= 0 else -(1 << 60)]) for n in others)]
        seen.copy_(torch.stack(rows).max(dim=0).values)

    held = [] if mine is None else [SimpleNamespace(kind="live", generation=2, step=mine)]
    place: Any = SimpleNamespace(held=held)
    groups: Any = SimpleNamespace(control=SimpleNamespace(all_reduce=all_reduce))
    taking = Takeover(place, order(3), groups)
    if step is None:
        with pytest.raises(StateLost, match="the ranks of generation 2 stopped at steps"):
            taking._agree_on_step()
    else:
        assert taking._agree_on_step() == step


@pytest.mark.parametrize(("via", "moves"), [("host", True), ("device", False)])
def test_the_old_boxes_leave_the_device_where_both_shards_do_not_fit(via: Any, moves: bool) -> None:
    box = Box("model.w", (0,), (4,), "float32")
    tensors = {kind: torch.arange(4.0) for kind in ("live", "peer")}
    held = [
        Held(2, 0, 6, kind, Layout(), (), {box.fqn: (box, tensors[kind])})
        for kind in ("live", "peer")
    ]  # type: ignore[arg-type]
    sizes: list[int] = []
    reads = SimpleNamespace(  # a host copy of the generation before: it must have read them
        result=lambda: sizes.append(tensors["live"].untyped_storage().nbytes())
    )
    place: Any = SimpleNamespace(
        held=held,
        wait_for_checks=lambda: None,
        copying=reads,
        host_memory=HostMemory(),
        side=SideStream(torch.device("cpu")),
        device=torch.device("cpu"),
    )
    taking = order(3)
    taking = replace(taking, plan=replace(taking.plan, move=Move(via=via)))
    groups: Any = SimpleNamespace(world=None)
    Takeover(place, taking, groups).make_room()
    live, peer = place.held
    assert live.on_host == moves and not peer.on_host, "a peer replica is in host memory anyway"
    assert (tensors["live"].untyped_storage().nbytes() == 0) == moves and tensors[
        "peer"
    ].untyped_storage().nbytes() == 16
    assert live.tensors[box.fqn][1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert sizes == ([16] if moves else []), "it is waited for before, and only where it must be"
