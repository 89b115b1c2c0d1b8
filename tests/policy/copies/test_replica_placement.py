"""Who keeps whose copies: any r nodes may go, nobody keeps much more than others, and the host
memory is there."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.policy.story import MODEL, SPOT, Story, job, plan_of

from elastic.planner.layout_choice import plan_layout
from elastic.policy.copies.recovery import covered
from elastic.policy.copies.replica_placement import (
    Copies,
    copies,
    holders,
    node_bytes,
    rank_bytes,
    replica_holders,
)
from elastic.policy.state.fold import State
from elastic.types import (
    HardwareProfile,
    Holding,
    Job,
    Layout,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    PinningFailed,
    Plan,
    Pool,
    WorkerId,
)  # fmt: skip


def workers(gpus: list[int]) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"n{i}", k) for i, n in enumerate(gpus) for k in range(n))


@st.composite
def places(draw: st.DrawFn) -> tuple[Layout, tuple[WorkerId, ...], int, list[int]]:
    n_nodes = draw(st.integers(2, 6))
    if draw(st.booleans()):
        gpus = [draw(st.sampled_from([1, 2, 4]))] * n_nodes
    else:
        gpus = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=n_nodes, max_size=n_nodes))
    world = sum(gpus)
    replicate = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    inner = world // replicate
    pp = draw(st.sampled_from([d for d in (1, 2) if inner % d == 0]))
    return (
        Layout(pp=pp, dp_replicate=replicate, dp_shard=inner // pp),
        workers(gpus),
        draw(st.integers(1, 3)),
        gpus,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(places())
def test_every_box_has_a_holder_after_the_loss_of_any_r_nodes(
    case: tuple[Layout, tuple[WorkerId, ...], int, list[int]],
) -> None:
    layout, ranks, n, gpus = case
    to = replica_holders(layout, ranks, {}, n=n)
    plan = Plan(1, layout, ranks, (), (), copies_to=to)
    holdings = [
        Holding(ranks[k], 1, rank, 5, "peer")
        for rank in range(len(ranks))
        for k in (rank, *to[rank])
    ]
    r = min(n, len(gpus) - 1)
    for lost in combinations([f"n{i}" for i in range(len(gpus))], r):
        assert covered(plan, [h for h in holdings if h.worker.node_id not in lost])
    for rank, kept_by in enumerate(to):
        nodes = [ranks[k].node_id for k in kept_by]
        assert ranks[rank].node_id not in nodes and len(set(nodes)) == len(nodes)
    kept = dict.fromkeys((f"n{i}" for i in range(len(gpus))), 0)
    for keeper in chain(*to):
        kept[ranks[keeper].node_id] += 1
    if len(set(gpus)) == 1:
        assert max(kept.values()) <= -(-sum(kept.values()) // len(gpus)), (
            f"one node keeps more than its part: {kept}"
        )


def test_what_a_node_held_comes_back_from_several() -> None:
    ranks = workers([4, 4, 4, 4, 4])
    to = replica_holders(Layout(dp_shard=20), ranks, {}, n=1)
    assert {ranks[to[rank][0]].node_id for rank in range(4)} == {"n1", "n2", "n3", "n4"}


def test_replicas_count_and_only_one_of_them_sends() -> None:
    two_nodes = workers([2, 2])
    assert replica_holders(Layout(dp_replicate=2, dp_shard=2), two_nodes, {}, n=1) == (
        (),
        (),
        (),
        (),
    )
    same_node = replica_holders(
        Layout(dp_shard=2, dp_replicate=2), tuple(two_nodes[i] for i in (0, 2, 1, 3)), {}, n=1
    )
    assert sum(map(bool, same_node)) == 2, (
        "both replicas on one node: one of them sends to the other node"
    )
    three = workers([1, 1, 1, 1])
    to = replica_holders(Layout(dp_replicate=2, dp_shard=2), three, {}, n=2)
    assert [len(t) for t in to] == [1, 1, 0, 0]
    assert all(
        len(nodes) == 3 for nodes in holders(Layout(dp_replicate=2, dp_shard=2), three, to).values()
    )


def test_replicas_of_values_do_not_hold_what_owners_keep() -> None:
    """Where optimizers step whole tensors no two ranks have the same boxes: each sends a copy, and
    without it the loss of a replica is a loss of state."""
    layout, ranks = Layout(dp_replicate=4), workers([1, 1, 1, 1])
    assert replica_holders(layout, ranks, {}, n=1) == ((), (), (), ())
    to = replica_holders(layout, ranks, {}, n=1, alone=True)
    assert all(len(kept) == 1 and kept[0] != rank for rank, kept in enumerate(to))
    plan = Plan(1, layout, ranks, (1,) * 4, ())
    own = [Holding(worker, 1, rank, 5, "live") for rank, worker in enumerate(ranks)]
    assert covered(plan, own[1:]) and not covered(plan, own[1:], alone=True)
    kept = [Holding(ranks[k], 1, rank, 5, "peer") for rank, to_ in enumerate(to) for k in to_]
    assert covered(plan, [h for h in (*own, *kept) if h.worker != ranks[0]], alone=True)
    whole = replace(MODEL, optimizers=(replace(MODEL.optimizers[0], form="{}"),))
    choice = replace(CHOICE, layout=Layout(dp_replicate=8), layers=())
    asked = replace(state(), model=whole)
    assert all(copies(asked, choice, NODES).to) and not copies(asked, choice, NODES).replicas
    assert not any(copies(state(), choice, NODES).to) and copies(state(), choice, NODES).replicas


def test_copies_stay_in_their_zone_unless_the_job_widens_it() -> None:
    ranks, zones = workers([1, 1, 1, 1]), {"n0": "a", "n1": "a", "n2": "b", "n3": "b"}
    inside = replica_holders(Layout(dp_shard=4), ranks, zones, n=1)
    assert inside == ((1,), (0,), (3,), (2,))
    across = replica_holders(Layout(dp_shard=4), ranks, zones, n=1, across=True)
    assert all(zones[f"n{rank}"] != zones[f"n{kept[0]}"] for rank, kept in enumerate(across)), (
        "a zone may be lost"
    )
    both = replica_holders(Layout(dp_shard=4), ranks, zones, n=2, across=True)
    assert all(len(kept) == 2 for kept in both)
    assert replica_holders(Layout(dp_shard=4), ranks, zones, n=2) == inside, (
        "no second node in the zone"
    )


# ----------------------------------------------------------------------------- host memory and link

GIB = 1 << 30
NODES = tuple(Node(name, "spot", 2, "prepared") for name in "abcd")
CHOICE = plan_layout(MODEL, Job.from_plain(job()), NODES)
GPU = replace(SPOT, accelerator_type="A100", gpus_per_node=2)


def state(pool: Pool = GPU, **changes: object) -> State:
    return State(
        run="r",
        job=Job.from_plain(job(**changes)),
        pools=(pool,),
        model=MODEL,
        nodes={node.node_id: node for node in NODES},
    )


def planned(pool: Pool = GPU, **changes: object) -> Copies:
    return copies(state(pool, **changes), CHOICE, NODES)


def room_for(n_copies: int, buffers: int) -> int:
    """Host memory that is just enough: 25 % of so small a node is kept free."""
    to = replica_holders(CHOICE.layout, CHOICE.ranks, {}, n=n_copies)
    return (
        -(
            -max(node_bytes(CHOICE.ranks, to, rank_bytes(MODEL, CHOICE), buffers=buffers).values())
            * 4
            // 3
        )
        + 4
    )


def test_without_a_known_host_memory_copies_are_as_asked() -> None:
    assert planned().to == replica_holders(CHOICE.layout, CHOICE.ranks, {}, n=1)
    assert (planned().note, planned().buffers) == ("", 2)
    assert max(len(kept) for kept in planned(peer_copies=2).to) == 2
    assert planned(peer_copies=0) == planned(peer_every=0) == Copies()


def test_where_host_memory_is_short_fewer_copies_then_one_buffer_then_none() -> None:
    def with_room(n_bytes: int) -> Copies:
        return planned(replace(GPU, host_memory_bytes=n_bytes), peer_copies=2)

    enough = with_room(room_for(2, 2))
    assert enough.note == "" and {len(kept) for kept in enough.to} == {2}
    fewer = with_room(room_for(2, 2) - 64)
    assert {len(kept) for kept in fewer.to} == {1} and fewer.buffers == 2
    assert (
        fewer.note.startswith("peer replicas: 1 of 2, since ")
        and "GiB of host memory and has" in fewer.note
    )
    single = with_room(room_for(1, 2) - 64)
    assert single.buffers == 1 and {len(kept) for kept in single.to} == {1}
    assert "one buffer each, no whole copy while one is sent" in single.note
    none = with_room(room_for(1, 1) - 64)
    assert none.to == () and none.missing and none.note.startswith("no peer replicas: ")


def test_on_cpu_nodes_what_training_takes_is_not_there_for_copies() -> None:
    fits = replace(GPU, host_memory_bytes=room_for(1, 2))
    assert planned(fits).buffers == 2 and planned(fits).note == ""
    assert planned(replace(fits, accelerator_type="CPU")).missing


def test_a_nodes_own_memory_counts_before_its_pools() -> None:
    nodes = (replace(NODES[0], host_memory_bytes=room_for(1, 1) // 2), *NODES[1:])
    found = copies(state(replace(GPU, host_memory_bytes=100 * GIB)), CHOICE, nodes)
    assert found.missing and "a would need" in found.note


def test_too_few_nodes_for_all_copies_are_told() -> None:
    choice = plan_layout(MODEL, Job.from_plain(job()), NODES[:2])
    found = copies(state(peer_copies=3), choice, NODES[:2])
    assert {len(kept) for kept in found.to} == {
        1
    } and found.note == "peer replicas: 1 of 3, there are 2 nodes"
    alone = copies(state(), plan_layout(MODEL, Job.from_plain(job()), NODES[:1]), NODES[:1])
    assert alone == Copies(), "one node has nobody to send to, which is no news"


def test_copies_get_their_share_of_a_nodes_link() -> None:
    fast = replace(state(), hardware=(HardwareProfile("A100", link_bytes_per_s=50e9),))
    assert copies(fast, CHOICE, NODES).bytes_per_s == pytest.approx(0.1 * 50e9 / 2), (
        "two workers share it"
    )
    third = replace(fast, job=Job.from_plain(job(copy_link_share=0.3)))
    assert copies(third, CHOICE, NODES).bytes_per_s == pytest.approx(0.3 * 50e9 / 2)


def test_the_plan_holds_it_and_its_reason_says_what_is_not_as_asked() -> None:
    story = Story(peer_copies=2)
    story.nodes("a", "b")
    decision = story.tick(after_s=20)
    plan = plan_of(decision)
    assert plan.copies_to == ((1,), (0,)) and plan.peer_every > 0 and plan.copy_bytes_per_s > 0
    assert decision.reason.endswith("peer replicas: 1 of 2, there are 2 nodes")


def test_without_room_for_copies_storage_is_written_more_often() -> None:
    small = replace(SPOT, accelerator_type="A100", host_memory_bytes=64)
    story = Story(pools=(small,))
    story.nodes("a", "b")
    decision = story.tick(after_s=20)
    plan = plan_of(decision)
    assert (plan.peer_every, plan.copies_to, plan.durable_every) == (0, (), 10)
    assert "no peer replicas: a would need" in decision.reason


def test_pinned_buffers_that_are_rounded_up_need_more_host_memory() -> None:
    exact, rounded = rank_bytes(MODEL, CHOICE), rank_bytes(MODEL, CHOICE, rounded=True)
    assert (
        all(
            n <= more < 2 * n and more & (more - 1) == 0
            for n, more in zip(exact, rounded, strict=True)
        )
        and exact != rounded
    )


def test_a_node_says_how_it_has_pinned_memory_and_a_lost_one_is_forgotten() -> None:
    told = Story()
    told.tick(NodeReady(Node("a", "spot", 1)))
    told.tick(
        NodePrepared("a", pinned_rounded=True), PinningFailed(WorkerId("a", 0), "16.00 GiB: no")
    )
    assert (told.state.pinned_rounded, dict(told.state.unpinned)) == ({"a"}, {"a": "16.00 GiB: no"})
    told.tick(NodeLost("a", "gone"))
    assert (told.state.pinned_rounded, dict(told.state.unpinned)) == (frozenset(), {})
