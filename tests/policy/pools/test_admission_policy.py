"""A node that is rejected is released with the reason, and its pool is not asked again in a tight
loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.policy.story import SPOT, Story, orders

from elastic.types import (
    Holding,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodeRefused,
    Pool,
    Prepare,
    Quarantine,
    Quiesced,
    ReleaseNode,
    RequestNodes,
    WorkerFailed,
    WorkerId,
)

FIXED = Pool("fixed", "CPU", 1, "on-demand", 3.0, 0, 2)
WHY = "torch 2.12.0 (the run has 2.13.0)"


def test_a_refused_node_is_given_back_with_the_reason() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),))
    story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("b", "spot")))
    decision = story.tick(
        NodeRefused("a", WHY, "spot"), NodeRefused("a", "another worker of it says so too", "spot")
    )
    assert [order.node_id for order in orders(decision, ReleaseNode)] == ["a"]
    assert [order.node_id for order in orders(decision, Quarantine)] == ["a"]
    assert "node a of pool spot is released, rejected: " in decision.reason
    assert story.state.nodes["a"].status == "quarantined" and not story.state.refused
    late = story.tick(NodeRefused("a", WHY, "spot"))
    assert not orders(late, ReleaseNode), "once"
    story.tick(NodeLost("a", "released"))
    story.tick(NodePrepared("b"))
    assert story.state.n_losses == 0, "it was released"


def test_a_pool_whose_nodes_all_are_refused_is_backed_off_and_the_reason_stands() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=1),))
    waits = []
    for k in range(5):
        story.tick(NodeReady(Node(f"a{k}", "spot")), after_s=30)
        decision = story.tick(NodeRefused(f"a{k}", WHY, "spot"))
        asked = orders(decision, RequestNodes)
        decision = story.tick(NodeLost(f"a{k}", "released"))
        asked += orders(decision, RequestNodes)
        assert bool(asked) == (k == 0), "the first may be chance"
        if k:
            backoff = story.state.backoff["spot"]
            waits.append(backoff.wait_s)
            said = (
                f"pool spot: {k + 1} starts in a row ended before a node was prepared (the last "
                f"one: rejected: {WHY})"
            )
            assert f"{said}, retried after {backoff.wait_s:.0f} s" in decision.reason
            assert decision.wake_at_s is not None and decision.wake_at_s >= backoff.until_s - 1.0, (
                "nobody looks again before"
            )
            asked = orders(story.tick(after_s=backoff.until_s - story.now_s), RequestNodes)
            assert [order.pool for order in asked] == ["spot"]
    assert waits == [30.0, 60.0, 120.0, 240.0]


def test_another_pool_is_asked_meanwhile() -> None:
    story = Story(
        pools=(replace(SPOT, max_nodes=1), FIXED), purpose="cheapest", waiting_usd_per_h=100.0
    )
    asked: set[str] = set()
    for k in range(2):
        story.tick(NodeReady(Node(f"a{k}", "spot")), after_s=30)
        story.tick(NodeRefused(f"a{k}", WHY, "spot"))
        for _ in range(2):
            asked |= {
                order.pool
                for order in orders(story.tick(NodeLost(f"a{k}", "released")), RequestNodes)
            }
    assert "fixed" in asked


def test_a_refusal_that_a_loss_has_overtaken_changes_nothing() -> None:
    story = Story()
    story.tick(NodeReady(Node("a", "spot")))
    story.tick(NodeLost("a", "boot failed"), NodeRefused("a", WHY))
    assert story.state.nodes["a"].status == "lost" and not story.state.refused
    story.tick(NodeReady(Node("a", "spot")))
    assert story.state.nodes["a"].status == "ready"


def test_nodes_are_told_what_memory_the_coming_layout_needs() -> None:
    gpu = replace(SPOT, name="gpu", accelerator_type="H100", gpus_per_node=2)
    story = Story(pools=(SPOT, gpu))
    decision = story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("g", "gpu", 2)))
    needs = {
        order.node_id: (order.gpu_bytes, order.host_bytes) for order in orders(decision, Prepare)
    }
    assert needs["a"][0] == needs["g"][1] == 0
    assert needs["a"][1] == needs["g"][0] > 1_000_000, "a third or half of 16 MB, per worker"


def test_memory_that_a_killed_process_still_holds_gives_no_node_back() -> None:
    """Two GPUs: the process of one was killed, and the other one's still sends to the generation
    that is being entered."""
    story = Story(layout="auto")
    plan = story.running("a", "b", gpus=2, steps=5)
    story.tick(WorkerFailed(WorkerId("a", 0), 0, "process", "exit code -9"))
    held = {"a": {1: (1, 5)}, "b": {0: (2, 5), 1: (3, 5)}}
    decision = None
    for name, there in held.items():
        for k, (rank, step) in there.items():
            worker = WorkerId(name, k)
            kinds = [Holding(worker, plan.generation, rank, step, "live")]
            kinds += (
                [Holding(worker, plan.generation, 0, step, "peer")] if (name, k) == ("b", 0) else []
            )
            decision = story.tick(Quiesced(worker, plan.generation, step, tuple(kinds)))
    assert decision is not None and WorkerId("a", 1) in story.state.members
    short = NodeRefused(
        "a",
        "8.00 GiB of a GPU's memory are free, the job needs 70.00 GiB there",
        "spot",
        may_pass=True,
    )
    decision = story.tick(short)
    assert (
        not orders(decision, ReleaseNode)
        and not orders(decision, Quarantine)
        and not story.state.refused
    )
    assert not orders(decision, Prepare), "not while one of its workers sends"
    story.entered()
    assert any(orders(one, Prepare) for one in (story.decisions[-1], story.tick(after_s=1.0))), (
        "it is looked at again"
    )
    for _ in range(3):
        decision = story.tick(short, after_s=60.0)
    (order,) = orders(decision, Quarantine)
    assert order.node_id == "a" and "4 of its processes failed" in order.reason
    assert "(the last time: 8.00 GiB of a GPU's memory" in order.reason


@pytest.mark.parametrize("counts", [True, False])
def test_a_machine_that_stays_short_of_memory_is_left_however_slow_its_attempts(
    counts: bool,
) -> None:
    """Two workers report each attempt, and no four attempts fall into one hour."""
    story = Story(pools=(FIXED,))
    story.state = replace(story.state, counts_short=counts)
    story.running("a", gpus=2, steps=5)
    for k in range(2):
        story.tick(WorkerFailed(WorkerId("a", k), 0, "process", "exit code -9"))
    why = "train.py, line 6: MemoryError: 400 GiB"
    short = NodeRefused("a", why, "fixed", may_pass=True)
    found = [orders(story.tick(short, short, after_s=1500.0), Quarantine) for _ in range(5)]
    assert [len(orders_of) for orders_of in found] == [0, 0, 0, int(counts), 0]
    if counts:
        assert found[3][0].reason == (
            f"it was short of memory 4 times in a row, 3 are borne (the last time: {why})"
        )


def test_a_new_node_without_memory_is_given_back() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),))
    story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("b", "spot")))
    assert orders(
        story.tick(NodeRefused("a", "too little memory", "spot", may_pass=True)), ReleaseNode
    )


ABSENT = "FileNotFoundError: [Errno 2] No such file or directory: '/data/train'"


@pytest.mark.parametrize("flag", [True, False])
def test_what_the_program_raises_on_a_new_node_alone_is_that_nodes_fault(flag: bool) -> None:
    """A file system that is not mounted there, a package that is missing."""
    story = Story(pools=(replace(SPOT, max_nodes=2),))
    story.state = replace(story.state, spares_the_rest=flag)
    story.running("a", gpus=2)
    story.tick(NodeReady(Node("b", "spot", 2)))
    of_b = [WorkerFailed(WorkerId("b", k), 0, "program", ABSENT) for k in range(2)]
    decision = story.tick(*of_b)
    if not flag:
        assert story.state.fatal == f"the program raised on worker b/1: {ABSENT}"
        return
    assert [order.node_id for order in orders(decision, ReleaseNode)] == ["b"]
    assert "node b of pool spot is released, rejected: the program raised on " in decision.reason
    assert f"{ABSENT}; other nodes have opened it" in decision.reason
    story.tick(of_b[0])
    assert story.state.phase == "running" and not story.state.fatal
    story.tick(WorkerFailed(WorkerId("a", 0), 1, "program", ABSENT))
    assert story.state.fatal, "in a generation it is the program's as ever"


def test_what_the_program_raises_where_nobody_has_opened_it_ends_the_run() -> None:
    story = Story(pools=(replace(SPOT, max_nodes=2),))
    story.state = replace(story.state, spares_the_rest=True)
    story.tick(NodeReady(Node("a", "spot")), NodeReady(Node("b", "spot")))
    story.tick(WorkerFailed(WorkerId("a", 0), 0, "program", ABSENT))
    assert story.state.fatal == f"the program raised on worker a/0: {ABSENT}"
