"""Which nodes are requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.policy.story import Story, job, orders

from elastic.policy.pools.node_orders import capacity, potential
from elastic.policy.state.fold import Backoff, Request, State
from elastic.types import InstancesSeen, Job, Node, NodeReady, Pool, RequestFailed, RequestNodes

SPOT = Pool("cheap", "CPU", 2, "spot", 1.0, 0, 3)
FIXED = Pool("fixed", "CPU", 2, "on-demand", 3.0, 0, 2)
OWNED = Pool("ours", "CPU", 2, "owned", 0.0, 0, 1)


def state(**changes: Any) -> State:
    return replace(State(run="r", job=Job.from_plain(job()), pools=(FIXED, SPOT, OWNED)), **changes)


def asked(found: State, now_s: float = 0.0) -> list[tuple[str, int]]:
    return [
        (a.pool, a.count) for a in capacity(found, now_s).actions if isinstance(a, RequestNodes)
    ]


def test_spot_comes_before_on_demand_and_what_is_owned_before_both() -> None:
    assert asked(state()) == [("ours", 1), ("cheap", 3), ("fixed", 2)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_workers": 4}, [("ours", 1), ("cheap", 1)]),
        ({"max_workers": 5}, [("ours", 1), ("cheap", 2)]),
        ({"max_nodes": 3}, [("ours", 1), ("cheap", 2)]),
        ({"layout": "dp_shard=2"}, [("ours", 1)]),
        ({"layout": {"2": "dp_shard=2", 4: "dp_shard=4"}}, [("ours", 1), ("cheap", 1)]),
    ],
)
def test_no_more_than_the_job_can_use(
    changes: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    assert asked(state(job=Job.from_plain(job(**changes)))) == expected


def test_what_is_there_or_coming_counts_and_what_is_leaving_does_not() -> None:
    nodes = {
        "a": Node("a", "cheap", 2, "prepared"),
        "b": Node("b", "cheap", 2, "draining"),
        "c": Node("c", "ours", 2, "ready"),
    }
    requests = {"fixed-1": Request("fixed-1", "fixed", 1, 0.0)}
    found = state(nodes=nodes, requests=requests, preparing={"c": 0.0})
    assert asked(found) == [("cheap", 2), ("fixed", 1)]
    # a request without an answer is taken back
    assert asked(found, 901.0) == [("fixed", 0), ("cheap", 2)]


@pytest.mark.parametrize("flag", [True, False])
def test_machines_that_have_not_ended_count_for_max_nodes(flag: bool) -> None:
    """Three of four nodes are there or start, and one that was released is still paid for."""
    found = state(
        nodes={"a": Node("a", "cheap", 2, "prepared")},
        requests={"cheap-1": Request("cheap-1", "cheap", 1, 0.0)},
        instances={"cheap": InstancesSeen("cheap", 1), "fixed": InstancesSeen("fixed", 0, 1)},
        job=Job.from_plain(job(max_nodes=4)),
        counts_leaving=flag,
    )
    assert sum(n for _, n in asked(found)) == (1 if flag else 2)


@pytest.mark.parametrize("flag", [True, False])
def test_what_starts_for_a_request_that_has_failed_is_not_asked_for_again(flag: bool) -> None:
    """Five of eight start. One of them ends, and each that joins is one of those."""
    pools = (replace(SPOT, max_nodes=8), replace(FIXED, max_nodes=8))
    story = Story(pools, max_workers=16)
    story.state = replace(story.state, expects_started=flag, waits_for_started=True)
    asked_s = next(iter(story.state.requests.values())).at_s
    failed = RequestFailed("cheap", "cheap-1", "InsufficientInstanceCapacity", coming=5)
    seen = InstancesSeen("cheap", starting=5)
    assert orders(story.tick(seen, failed), RequestNodes) == [
        RequestNodes("fixed", 3 if flag else 8, "fixed-2")
    ]
    assert story.state.backoff["cheap"].reason == failed.reason
    if not flag:
        return
    ended = replace(failed, reason="1 of its nodes that were starting did not join", coming=4)
    no = story.state.backoff["cheap"]
    assert orders(story.tick(ended), RequestNodes) == [RequestNodes("fixed", 1, "fixed-3")]
    assert story.state.backoff["cheap"] == no, "it has said no once"
    story.tick(*(NodeReady(Node(name, "cheap", 2)) for name in "abcd"))
    assert all(story.state.born[name] == asked_s for name in "abcd")
    assert {one.pool for one in story.state.requests.values()} == {"fixed"}


def test_what_starts_unseen_for_one_that_has_failed_is_used_where_it_joins() -> None:
    """On Kubernetes nobody knows which pods have a machine: they count no longer than others."""
    one = Request("cheap-1", "cheap", 2, 0.0, failed=True)
    found = state(requests={"cheap-1": one}, waits_for_started=True)
    assert ("cheap", 1) in asked(found, 899.0)
    assert ("cheap", 3) in asked(found, 901.0) and ("cheap", 0) not in asked(found, 901.0)


def test_a_pool_that_said_no_is_left_alone_until_its_time() -> None:
    found = state(backoff={"cheap": Backoff(50.0, 30.0, "no capacity")})
    decision = capacity(found, 10.0)
    assert asked(found, 10.0) == [("ours", 1), ("fixed", 2)] and decision.wake_at_s == 50.0
    assert ("cheap", 3) in asked(found, 50.0)


def test_request_ids_are_never_used_twice() -> None:
    story = Story(pools=(SPOT, FIXED))
    story.tick(after_s=1000)
    story.tick(after_s=60)
    ids = [
        a.request_id
        for d in story.decisions
        for a in d.actions
        if isinstance(a, RequestNodes) and a.count
    ]
    assert len(ids) == len(set(ids)) == 4
    assert [
        a.request_id
        for d in story.decisions
        for a in d.actions
        if isinstance(a, RequestNodes) and not a.count
    ] == ids[:2]
    assert story.state.backoff["cheap"].reason == "no answer for 1000 s"


def test_potential_is_what_is_there_plus_what_pools_could_give() -> None:
    def gpus(of: State) -> int:
        return sum(n * each for (_, each), n in potential(of).items())

    assert gpus(state()) == 12
    assert gpus(state(job=Job.from_plain(job(max_nodes=2)))) == 4
    there = {"a": Node("a", "cheap", 2, "prepared"), "x": Node("x", "cheap", 2, "lost")}
    assert gpus(state(nodes=there)) == 12


@pytest.mark.parametrize("flag", [True, False])
def test_machines_that_start_without_a_request_count_for_the_budget(flag: bool) -> None:
    """Such as those of a request that was withdrawn, or that a driver before has made: three start,
    and the budget bears three."""
    found = state(
        pools=(SPOT,),
        job=Job.from_plain(job(budget_usd=0.02)),
        instances={"cheap": InstancesSeen("cheap", 3)},
        counts_starting=flag,
    )
    assert asked(found) == ([] if flag else [("cheap", 3)])
