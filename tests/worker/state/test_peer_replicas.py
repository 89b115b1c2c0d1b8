"""Peer replicas of a generation over queues: when they count, when they are given up, what is held
after a loss."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from support.waiting import is_waiting, until
from support.worker.wires import Lines, QueueWire

from elastic.ledger.journal import Line, write_line
from elastic.policy.copies.replica_placement import replica_holders
from elastic.reshard.rank_boxes import RNG, boxes
from elastic.types import (
    CopyStored,
    Layout,
    ModelProfile,
    OptimizerSpec,
    Plan,
    TensorSpec,
    WorkerId,
)
from elastic.worker.state.host_copy import HostCopies, HostMemory, Tensors
from elastic.worker.state.peer_replicas import PeerReplicas, slowdown
from elastic.worker.state.train_state import Held

PROFILE = ModelProfile(
    2,
    64,
    (TensorSpec("w", (16, 4), "float32", None, 0),),
    (OptimizerSpec(("exp_avg",), ("step",)),),
)


class Ranks:
    """All ranks of a generation on nodes of `per_node`; `step` is a boundary as generation.py lives
    it."""

    def __init__(
        self, layout: Layout, n_copies: int = 1, per_node: int = 1, **more: object
    ) -> None:
        n = layout.world_size
        workers = tuple(WorkerId(f"n{i // per_node}", i % per_node) for i in range(n))
        to = replica_holders(layout, workers, {}, n=n_copies)
        self.plan = Plan(3, layout, workers, (1,) * layout.dp, (2,), peer_every=2, copies_to=to)
        self.plan = replace(self.plan, **more)
        self.lines, self.step_now = Lines(), 0
        self.live = [self._tensors(rank) for rank in range(n)]
        self.hosts = [HostCopies(HostMemory(), t, frozenset({RNG}), limit=3) for t in self.live]
        self.copies = [
            PeerReplicas(PROFILE, self.plan, r, host=self.hosts[r], wire=self._wire(r))
            for r in range(n)
        ]
        self.held: list[list[Held]] = [[] for _ in range(n)]

    def _wire(self, rank: int) -> Callable[[int], QueueWire]:
        return lambda number: QueueWire(self.lines, rank)

    def _tensors(self, rank: int) -> Tensors:
        mine = boxes(PROFILE, self.plan.layout, self.plan.layers, rank)
        return {b.fqn: (b, torch.zeros(b.sizes, dtype=getattr(torch, b.dtype))) for b in mine}

    def start(self) -> None:
        for copies in self.copies:
            copies.start(self.step_now)

    def wait(self) -> None:
        """Until no thread of a copy is at work."""
        until(
            lambda: all(c.flight is None or c.flight.ended for c in self.copies),
            "the end of the copies",
        )

    def step(self, ready: bool = True) -> list[CopyStored]:
        """A step: words, commit, the change of the state, the boundary. Returns what rank 0 .. n-1
        reported."""
        if ready:
            self.wait()
        done, failed, free = (
            sum(getattr(c, word) for c in self.copies) for word in ("stored", "failed", "free")
        )
        stored = []
        self.step_now += 1
        for rank, copies in enumerate(self.copies):
            self.hosts[rank].settle()
            for _, tensor in self.live[rank].values():
                tensor.fill_(self.step_now)
            said = copies.heard(done, failed)
            if said is not None:
                stored.append(said)
                self.held[rank] = copies.acknowledged
            if copies.due(self.step_now, free):
                copies.start(self.step_now)
        return stored

    def kept(self, lost: set[str]) -> set[tuple[int, int]]:
        """(step, rank) of what the nodes that are left hold, contents checked."""
        found = set()
        for rank, worker in enumerate(self.plan.ranks):
            for held in self.held[rank] if worker.node_id not in lost else ():
                assert all(bool((t == held.step).all()) for _, t in held.tensors.values()), (
                    "the content of another step"
                )
                found.add((held.step, held.rank))
        return found


def test_a_copy_counts_when_all_have_stored_it_and_the_next_follows_the_cadence() -> None:
    ranks = Ranks(Layout(dp_shard=4))
    ranks.start()
    assert ranks.step(ready=False) == [] or ranks.held[0], (
        "acknowledged at the earliest in the next commit"
    )
    steps = [ranks.step() for _ in range(8)]
    told = [stored[0].copy.step for stored in steps if stored]
    assert told[-3:] == [told[-3], told[-3] + 2, told[-3] + 4]
    last = [stored for stored in steps if stored][-1]
    assert len(last) == 4 and {s.copy.step for s in last} == {told[-1]}
    assert last[0].seconds > 0 and last[0].stall_s >= 0
    # however many ranks: who keeps what follows from the plan
    assert len(write_line(Line(1.0, 1, ((1.0, last[0]),)))) < 700
    assert {rank for step, rank in ranks.kept(set())} == {0, 1, 2, 3}


@pytest.mark.parametrize("n_copies", [1, 2, 3])
def test_any_r_nodes_may_go_at_once(n_copies: int) -> None:
    ranks = Ranks(Layout(dp_shard=5), n_copies)
    ranks.start()
    for _ in range(5):
        ranks.step()
    for lost in combinations(range(5), n_copies):
        kept = ranks.kept({f"n{i}" for i in lost})
        assert {rank for step, rank in kept} == set(range(5))
        assert len({step for step, _ in kept}) == 1
    beyond = [ranks.kept({f"n{i}" for i in lost}) for lost in combinations(range(5), n_copies + 1)]
    assert any({rank for _, rank in kept} != set(range(5)) for kept in beyond), (
        "more than r is more than was promised"
    )


def test_replicas_on_other_nodes_send_nothing_and_still_keep_their_own() -> None:
    ranks = Ranks(Layout(dp_replicate=2, dp_shard=2))
    assert ranks.plan.copies_to == ((), (), (), ())
    ranks.start()
    ranks.step()
    ranks.step()
    assert {rank for _, rank in ranks.kept(set())} == {0, 1, 2, 3}
    assert sum(ranks.lines.sent_bytes.values()) == 0


def test_a_loss_in_the_flight_falls_back_to_the_copy_before_it() -> None:
    ranks = Ranks(Layout(dp_shard=3))
    ranks.start()
    while not ranks.held[0]:
        ranks.step()
    before = ranks.held[0][0].step
    while ranks.copies[0].flight is None:
        ranks.step()
    ranks.lines.hold.clear()
    while ranks.copies[0].flight is None or ranks.copies[0].flight.step == before:
        ranks.step(ready=False)
    ranks.lines.broken.set()
    ranks.wait()
    for rank in range(3):
        ranks.held[rank] = [*ranks.held[rank], *ranks.copies[rank].unacknowledged()]
    newest = ranks.kept({"n1"})
    whole = {step for step, _ in newest if {r for s, r in newest if s == step} == {0, 1, 2}}
    assert whole and max(whole) >= before


def test_an_acknowledgement_that_only_some_have_heard_leaves_a_whole_copy() -> None:
    """The commit that acknowledges a copy breaks: one rank has heard it and let the copy before go,
    the others have not."""
    ranks = Ranks(Layout(dp_shard=3), n_copies=1)
    ranks.start()
    while not ranks.held[0]:
        ranks.step()
    while ranks.copies[0].flight is None:
        ranks.step()
    ranks.wait()
    flight = ranks.copies[0].flight
    assert flight is not None
    ranks.copies[0].heard(3, 0)
    ranks.held[0] = ranks.copies[0].acknowledged
    for rank in (1, 2):
        ranks.held[rank] = [*ranks.held[rank], *ranks.copies[rank].unacknowledged()]
    for lost in ("n0", "n1", "n2"):
        assert {rank for step, rank in ranks.kept({lost}) if step == flight.step} == {0, 1, 2}


def test_an_altered_chunk_is_never_acknowledged_and_the_next_copy_is() -> None:
    ranks = Ranks(Layout(dp_shard=3))

    def alter(source: int, to: int, tensor: torch.Tensor) -> None:
        if source == 1 and tensor.dtype == torch.uint8 and ranks.step_now < 2:
            tensor[3] ^= 4

    ranks.lines.alter = alter
    ranks.start()
    ranks.wait()
    keeper = ranks.plan.copies_to[1][0]
    assert [rank for rank, copies in enumerate(ranks.copies) if copies.failed] == [keeper]
    assert [rank for rank, copies in enumerate(ranks.copies) if copies.stored] == [
        r for r in range(3) if r != keeper
    ]
    assert ranks.step() == []
    assert all(c.flight is None and c.n_given_up == 1 for c in ranks.copies), (
        "all gave it up at the same boundary"
    )
    for _ in range(6):
        ranks.step()
    assert {rank for _, rank in ranks.kept(set())} == {0, 1, 2}


def test_a_copy_that_one_rank_has_not_stored_does_not_count() -> None:
    ranks = Ranks(Layout(dp_shard=3))
    ranks.start()
    ranks.wait()
    for copies in ranks.copies:
        assert (
            copies.heard(2, 0) is None and copies.flight is not None and copies.acknowledged == []
        )
        assert copies.heard(3, 0) is not None and copies.acknowledged_step == 0


def test_a_rank_without_a_free_buffer_makes_all_wait_for_a_later_step() -> None:
    ranks = Ranks(Layout(dp_shard=3))
    ranks.start()
    ranks.step()
    readers = [ranks.hosts[2].take(100 + k) for k in range(3)]
    assert not ranks.copies[2].free
    started = ranks.copies[0].n_started
    for _ in range(4):
        ranks.step()
    assert all(c.n_started == started for c in ranks.copies)
    for reader in readers:
        if reader is not None:
            reader.release()
    for _ in range(2):
        ranks.step()
    assert all(c.n_started == started + 1 for c in ranks.copies)


def test_a_copy_in_flight_is_dropped_cleanly_where_the_generation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.worker.state.peer_replicas.QUIT_MOST_S", 300.0)
    ranks = Ranks(Layout(dp_shard=4), copy_bytes_per_s=1.0)
    ranks.lines.hold.clear()
    ranks.start()
    droppers = [threading.Thread(target=c.drop) for c in ranks.copies]
    for thread in droppers:
        thread.start()
    until(lambda: all(map(is_waiting, droppers)), "all of them held up")
    ranks.lines.hold.set()
    for thread in droppers:
        thread.join(120)
    assert not any(thread.is_alive() for thread in droppers)
    assert all(c.flight is None and c.unacknowledged() == [] for c in ranks.copies)
    assert all(q.empty() for q in ranks.lines.queues.values())
    assert all(len(host.memory.free) == 2 for host in ranks.hosts), (
        "own and kept buffer wait for the next"
    )


def test_buffers_that_are_still_written_to_are_given_to_no_other_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elastic.worker.state.peer_replicas.QUIT_MOST_S", 0.05)
    ranks = Ranks(Layout(dp_shard=2), copy_bytes_per_s=1.0)
    ranks.lines.hold.clear()
    ranks.start()
    for copies in ranks.copies:
        copies.drop()
    assert all(c.flight is None for c in ranks.copies) and not any(
        host.memory.free for host in ranks.hosts
    )
    ranks.lines.hold.set()
    until(
        lambda: all(len(host.memory.free) == 2 for host in ranks.hosts),
        "the buffers, once nobody writes to them",
    )


def test_the_buffers_of_a_copy_that_a_loss_has_cut_off_are_used_again() -> None:
    """Freed where the generation is left, they would be freed beside its kernels."""
    ranks = Ranks(Layout(dp_shard=3))
    ranks.lines.hold.clear()
    ranks.start()
    assert all(c.unacknowledged() == [] for c in ranks.copies)
    assert not any(host.memory.free for host in ranks.hosts)
    ranks.lines.broken.set()
    until(lambda: all(len(host.memory.free) == 2 for host in ranks.hosts), "their buffers")


def test_another_cadence_counts_from_the_newest_copy() -> None:
    ranks = Ranks(Layout(dp_shard=2))
    ranks.start()
    for _ in range(3):
        ranks.step()
    newest = max(c.acknowledged_step for c in ranks.copies)
    flying = ranks.copies[0].flight
    newest = flying.step if flying else newest
    for copies in ranks.copies:
        copies.set_every(ranks.step_now, 5)
    started = []
    for _ in range(12):
        n = ranks.copies[0].n_started
        ranks.step()
        started += [ranks.step_now] * (ranks.copies[0].n_started - n)
    assert started[:2] == [newest + 5, newest + 10]


def test_the_processor_time_that_copies_take_from_the_steps_is_their_cost() -> None:
    """Wall times on shared cores are too noisy to tell; a copy that only waits for its
    acknowledgement costs nothing."""
    ranks, told, n_busy = Ranks(Layout(dp_shard=2), peer_every=4), [], 0
    one = ranks.copies[0]
    ranks.lines.hold.clear()
    ranks.start()
    for i in range(60):
        busy = one.stepping()
        n_busy += busy
        ranks.lines.hold.set()
        ranks.wait()
        assert not one.stepping(), "it is stored"
        one.timed(1.0 + (i * 7 % 11) / 10, 0.2 + 0.03 * busy + 0.001 * (i % 3), busy)
        ranks.lines.hold.clear()
        told += [stored.slowed_s for stored in ranks.step(ready=False)[:1]]
    ranks.lines.hold.set()
    ranks.wait()
    assert n_busy == len(told) == 15
    assert told[0] == 0.0, "nobody can know yet"
    assert told[-1] == pytest.approx(0.03, abs=0.002)


def test_what_copies_slow_is_told_from_noise() -> None:
    calm = [1.0 + 0.01 * (i % 5) for i in range(20)]
    assert slowdown([t + 0.2 for t in calm], calm) == pytest.approx(0.2)
    assert slowdown(calm, calm) == 0.0
    assert slowdown([t + 0.2 for t in calm][:7], calm) == 0.0, "too few"
    noisy = [1.0 + 0.5 * ((7 * i) % 11 - 5) / 5 for i in range(20)]
    assert slowdown([t + 0.02 for t in noisy], noisy) == 0.0
