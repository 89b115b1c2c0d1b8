"""When a request to the autoscaler counts as failed, and how nodes are released. No Ray."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from support.waiting import until

from elastic.cluster.nodes import autoscaler, providers
from elastic.cluster.nodes.autoscaler import AutoscalerClient, AutoscalerNodes
from elastic.cluster.nodes.autoscaler_agent import AutoscalerReport, Drains
from elastic.cluster.nodes.demand import Demand, DemandReport, SeenNode
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.ray import _ray_private
from elastic.errors import LostContact
from elastic.types import InstancesSeen, NodeReady, Pool, RequestFailed

SPOT = Pool("spot", market_type="spot", max_nodes=2)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for module in (autoscaler, providers):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


def nodes_of(
    reports: dict[str, AutoscalerReport], most: int = 2, tell: Any = lambda *told, **more: None
) -> AutoscalerNodes:
    desk: Any = SimpleNamespace(heard=lambda: (reports["now"], True), tell=tell)
    return AutoscalerNodes((replace(SPOT, max_nodes=most),), desk=desk)


def failures(nodes: AutoscalerNodes) -> list[RequestFailed]:
    return [event for event in nodes.news({}) if isinstance(event, RequestFailed)]


class Watchers:
    """What stands for Ray's actors: each `serves` answers as `ends` say, in turn, and an order is
    answered by a report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ends: Exception | None) -> None:
        self.left, self.made = list(ends), 0
        monkeypatch.setattr(autoscaler, "autoscaler_agent", self.agent)
        get = SimpleNamespace(get=lambda call, timeout: call())
        monkeypatch.setattr(autoscaler, "ray", get)
        monkeypatch.setattr(autoscaler, "SPEAK_S", 0.01)

    def agent(self, quiet_s: float) -> Any:
        self.made += 1
        serves = SimpleNamespace(remote=lambda: self.serves)
        order = lambda order: lambda: AutoscalerReport(given=order.adopted)  # noqa: E731
        return SimpleNamespace(serves=serves, order=SimpleNamespace(remote=order))

    def serves(self) -> bool:
        end = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if end is not None:
            raise end
        return True


def test_a_watcher_whose_process_ends_while_a_driver_starts_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where a head replaces it: the driver ended with a traceback, for good."""
    no_head = ValueError("Ray lists no head node")
    watchers = Watchers(
        monkeypatch, ActorDiedError(), no_head, ActorUnavailableError("x", None), None
    )
    desk = AutoscalerClient(DemandReport("r", 1, (SPOT,), 1000.0, adopted={"a": "spot"}))
    desk.close(end=False)
    assert desk.opened and watchers.made == 4 and desk.heard()[0].given == {"a": "spot"}


@pytest.mark.parametrize("end", [ActorDiedError(), GetTimeoutError("Get timed out")])
def test_a_watcher_that_does_not_answer_is_one_line_and_tried_again_by_the_next_driver(
    monkeypatch: pytest.MonkeyPatch, end: Exception
) -> None:
    Watchers(monkeypatch, end)
    monkeypatch.setattr(autoscaler, "ANSWER_MOST_S", 0.05)
    with pytest.raises(LostContact, match=r"watcher on the head does not answer \(.*run it again$"):
        AutoscalerClient(DemandReport("r", 1, (SPOT,), 1000.0))


def test_an_instance_that_is_replaced_gives_the_next_one_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The autoscaler ends one on which Ray does not start, after minutes, and launches another: no
    drought."""
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport()}
    nodes = nodes_of(reports)
    nodes.request("spot", 1, "r1")
    for at_s, coming in ((1005, 1), (1190, 1), (1191, 0), (1195, 0), (1200, 1), (1400, 1)):
        clock.now_s, reports["now"] = float(at_s), AutoscalerReport(coming={"spot": coming})
        assert not failures(nodes), at_s
    clock.now_s, reports["now"] = 1600.0, AutoscalerReport()
    (failed,) = failures(nodes)
    assert (
        isinstance(failed, RequestFailed) and failed.reason == "no capacity: no answer within 180 s"
    )


def test_a_node_that_joined_and_fits_no_pool_is_named_where_nothing_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    nodes, there = (
        nodes_of({"now": AutoscalerReport()}),
        replace(node_of("a"), labels={"pool": "b"}),
    )
    nodes.request("spot", 1, "r1")
    clock.now_s += 181
    (failed,) = nodes.news({"a": there})
    assert isinstance(failed, RequestFailed) and failed.reason == (
        "no capacity: no answer within 180 s; of no pool: 10.0.0.1 (8 CPUs, pool=b)"
    )


def test_one_that_never_joins_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport(coming={"spot": 1})}
    nodes = nodes_of(reports)
    nodes.request("spot", 1, "r1")
    assert not failures(nodes)
    clock.now_s += 839
    assert not failures(nodes)
    clock.now_s += 2
    (failed,) = failures(nodes)
    assert (
        isinstance(failed, RequestFailed)
        and failed.reason == "1 of its nodes did not join within 840 s"
    )

    clock.now_s += 10
    nodes.request("spot", 1, "r2")
    assert not failures(nodes)
    clock.now_s += 1679
    assert not failures(nodes), "its image may only be a large one"
    clock.now_s += 2
    (failed,) = failures(nodes)
    assert failed.reason == "1 of its nodes did not join within 1680 s"


def node_of(name: str) -> RayNode:
    return RayNode(name, "10.0.0.1", 1, {}, 8, 0, False)


@pytest.mark.parametrize("how", ["a launch failed", "no answer"])
def test_what_starts_for_a_request_that_has_failed_is_used(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """One of two comes; of the one that waits beside them nothing is said."""
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport()}
    told: list[dict[str, int]] = []
    nodes = nodes_of(reports, most=3, tell=lambda waits, *_, **more: told.append(waits))
    nodes.request("spot", 1, "r1")
    nodes.request("spot", 2, "r2")
    reports["now"] = AutoscalerReport(coming={"spot": 2})
    assert not failures(nodes)
    if how == "a launch failed":
        reports["now"] = AutoscalerReport(coming={"spot": 2}, failed={"spot": 1})
        why = "its launch failed; the autoscaler's log on the head (monitor.log) says why"
    else:
        clock.now_s, why = clock.now_s + 181, "no capacity: no answer within 180 s"
    assert failures(nodes) == [RequestFailed("spot", "r2", why, coming=1)]
    assert told[-1] == {"spot": 2}, "one for each request"
    assert not failures(nodes), "it is told once"
    reports["now"] = replace(reports["now"], given={"a": "spot", "b": "spot"}, coming={})
    clock.now_s += 600
    events = nodes.news({"a": node_of("a"), "b": node_of("b")})
    assert [type(event) for event in events] == [NodeReady, NodeReady]
    assert told[-1] == {} and nodes._dropped == {}


def test_what_starts_for_a_request_that_has_failed_is_told_until_it_joins_or_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five of eight start: one of them ends, one joins, and the others do not."""
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport()}
    nodes = nodes_of(reports, most=8)
    nodes.request("spot", 8, "r1")
    reports["now"] = AutoscalerReport(coming={"spot": 5}, failed={"spot": 3})
    assert [event.coming for event in failures(nodes)] == [5]
    reports["now"] = replace(reports["now"], coming={"spot": 4})
    why = "1 of its nodes that were starting did not join"
    assert failures(nodes) == [RequestFailed("spot", "r1", why, coming=4)]
    reports["now"] = replace(reports["now"], coming={"spot": 3}, given={"a": "spot"})
    there = {"a": node_of("a")}
    assert [type(event) for event in nodes.news(there)] == [NodeReady]
    clock.now_s += nodes.join_most_s + 1
    (failed,) = nodes.news(there)
    why = "3 of its nodes that were starting did not join"
    assert failed == RequestFailed("spot", "r1", why) and nodes._open == []


def test_a_node_that_joins_counts_as_starting_until_it_is_known_here() -> None:
    """Else its request, which waits only for what starts, is withdrawn in that moment."""
    reports = {"now": AutoscalerReport(coming={"spot": 1})}
    nodes = nodes_of(reports)
    nodes.request("spot", 1, "r1")
    assert nodes.news({}) == [InstancesSeen("spot", starting=1)]
    reports["now"] = AutoscalerReport(given={"a": "spot"})
    assert nodes.news({}) == []
    assert [type(event) for event in nodes.news({"a": node_of("a")})] == [NodeReady]


def test_a_driver_that_takes_over_takes_what_joins_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport()}
    nodes = nodes_of(reports)
    nodes.takes_until_s = clock.now_s + 45
    reports["now"] = AutoscalerReport(given={"a": "spot"})
    assert [type(event) for event in nodes.news({"a": node_of("a")})] == [NodeReady]
    clock.now_s += 46
    reports["now"] = AutoscalerReport(given={"a": "spot", "b": "spot"})
    assert nodes.news({name: node_of(name) for name in "ab"}) == [InstancesSeen("spot", leaving=1)]


def test_a_node_that_the_cluster_keeps_may_be_had_again() -> None:
    reports = {"now": AutoscalerReport(given={"a": "spot"})}
    nodes, there = nodes_of(reports), {"a": node_of("a")}
    nodes.request("spot", 1, "r1")
    (ready,) = nodes.news(there)
    assert isinstance(ready, NodeReady)
    nodes.release(ready.node.node_id)
    reports["now"] = AutoscalerReport(stay=frozenset("a"))
    assert nodes.news(there) == [], "it is on this run's bill no more"
    nodes.request("spot", 1, "r2")
    reports["now"] = AutoscalerReport(given={"a": "spot"})
    assert [type(event) for event in nodes.news(there)] == [NodeReady]


def test_a_quarantined_node_that_the_cluster_keeps_is_not_had_before_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one is started instead; this one was given, quarantined and released every 2 s."""
    clock, demand, told = Clock(monkeypatch), Demand(), list[frozenset[str]]()
    order, seen = DemandReport("r", 1, (SPOT,), 1000.0), {"a": SeenNode("spot")}
    there, reports = {"a": node_of("a")}, {"now": AutoscalerReport()}

    def tell(waits: Any, held: Any, dropped: Any, *, out: frozenset[str]) -> None:
        told.append(out)
        new = replace(order, waits=waits, held=held, dropped=dropped, out=out)
        assert demand.hear(new, clock.now_s)

    nodes = nodes_of(reports, tell=tell)

    def looked() -> tuple[list[type], int]:
        """What comes of a look of the watcher, and how many nodes the cluster is to have."""
        demand.look(seen, clock.now_s)
        wanted = demand.wanted(seen, clock.now_s)
        assert not demand.to_drain(seen, {"spot": 1}), "the cluster keeps one"
        reports["now"] = AutoscalerReport(given=demand.given("r"), stay=frozenset(demand.stay))
        found = [type(event) for event in nodes.news(there) if isinstance(event, NodeReady)]
        return found, wanted["spot"]

    nodes.request("spot", 1, "r1")
    assert looked() == ([NodeReady], 1)
    nodes.quarantine("spot-a", 100.0)
    nodes.release("spot-a")
    assert looked() == ([], 0)
    nodes.request("spot", 1, "r2")
    for _ in range(5):
        assert looked() == ([], 2), "the one that is kept, and another"
    there["b"], seen["b"] = node_of("b"), SeenNode("spot")
    assert looked()[0] == [NodeReady] and set(nodes._ours) == {"spot-b"}
    nodes.request("spot", 1, "r3")
    assert looked() == ([], 3)
    clock.now_s += 101
    looked()
    assert told[-1] == frozenset()
    looked()
    assert set(nodes._ours) == {"spot-a", "spot-b"}


def test_where_the_cluster_has_all_that_it_may_have_the_quarantined_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another one beside it the cluster could not have what is asked of it for all runs and
    pools together, and would start nothing."""
    clock, demand = Clock(monkeypatch), Demand()
    seen = {"a": SeenNode("spot"), "b": SeenNode("spot"), "c": SeenNode("safe")}
    order = DemandReport("r", 1, (SPOT,), 1000.0, {"spot": 1, "safe": 1}, out=frozenset("abc"))
    assert demand.hear(order, clock.now_s)
    most = {"spot": 2, "safe": 4}
    assert demand.wanted(seen, clock.now_s, most) == {"spot": 2, "safe": 2}
    assert demand.wanted(seen, clock.now_s, {}) == {"spot": 3, "safe": 2}
    nodes = nodes_of({"now": AutoscalerReport()})
    nodes._out_until_s["a"] = clock.now_s + 1000.0
    nodes.request("spot", 1, "r1")
    assert nodes.news({"a": node_of("a")}) == []
    clock.now_s += nodes.launch_most_s + 1
    (failed,) = nodes.news({"a": node_of("a")})
    assert isinstance(failed, RequestFailed) and "no capacity" in failed.reason
    assert "; 1 node of it quarantined, the first one for another 13:" in failed.reason


@pytest.mark.parametrize("leaves", [True, False])
def test_a_request_of_a_full_pool_waits_for_the_nodes_that_leave_it(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """All have a notice, and what replaces them is asked for at once: no drought."""
    clock, told = Clock(monkeypatch), []
    there = {name: node_of(name) for name in "ab"}
    reports = {"now": AutoscalerReport(given=dict.fromkeys(there, "spot"))}
    nodes = nodes_of(reports, tell=lambda waits, *_, **more: told.append(waits))
    nodes.request("spot", 2, "r1")
    ready = [event for event in nodes.news(there) if isinstance(event, NodeReady)]
    nodes.request("spot", 2, "r2")
    clock.now_s += 179
    assert len(ready) == 2 and not nodes.news(there) and told[-1] == {}
    if leaves:
        nodes.lost(ready[0].node.node_id)
        nodes.news(there)
        assert told[-1] == {"spot": 1}
        return
    clock.now_s += 2
    assert nodes.news(there) == [RequestFailed("spot", "r2", "no capacity: 2 of 2 in use")]


def test_a_part_that_comes_counts_as_an_answer_also_where_the_rest_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of four have room, and one of them starts after three minutes: the next has as long."""
    clock, reports = Clock(monkeypatch), {"now": AutoscalerReport()}
    nodes = nodes_of(reports)
    nodes.request("spot", 4, "r1")
    clock.now_s += 170
    reports["now"] = AutoscalerReport(coming={"spot": 1})
    assert not failures(nodes)
    clock.now_s += 20
    assert not failures(nodes)
    clock.now_s += 170
    why = "no capacity: no answer within 180 s"
    assert failures(nodes) == [RequestFailed("spot", "r1", why, coming=1)]


def test_pods_that_may_have_no_machine_are_not_paid_for() -> None:
    reports = {"now": AutoscalerReport(coming={"spot": 2}, machines=False)}
    nodes = nodes_of(reports)
    nodes.request("spot", 2, "r1")
    assert nodes.news({}) == []


def test_a_machine_that_nobody_reaches_does_not_keep_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, asked = threading.Event(), list[str]()

    def end_when_idle(ray_id: str, why: str) -> bool:
        asked.append(ray_id)
        return ray_id != "dead" or reached.wait(60)

    monkeypatch.setattr(_ray_private, "end_when_idle", end_when_idle)
    drains = Drains()
    try:
        for ray_id in ("dead", "idle", "dead"):
            drains.end(ray_id)
        until(lambda: "idle" in asked, "the other node")
        assert sorted(asked) == ["dead", "idle"], "and the dead one is asked once at a time"
    finally:
        reached.set()


def test_a_machine_that_joins_for_nobody_is_starting_no_more() -> None:
    """Its request was given up; what starts beside it is another run's. Nor where one that was
    released before ends in the same moment, so that as many leave as did."""
    reports = {"now": AutoscalerReport(given={"a": "spot"}, coming={"spot": 1})}
    nodes, there = nodes_of(reports), {name: node_of(name) for name in "a"}
    nodes.request("spot", 2, "r1")
    ready, seen = nodes.news(there)
    assert isinstance(ready, NodeReady) and seen == InstancesSeen("spot", starting=1)
    nodes.request("spot", 0, "r1")
    nodes.release(ready.node.node_id)
    assert nodes.news(there) == [InstancesSeen("spot", starting=1, leaving=1)]
    reports["now"] = AutoscalerReport(given={"b": "spot"}, coming={"spot": 1})
    assert nodes.news({"b": node_of("b")}) == [InstancesSeen("spot", leaving=1)]


def test_machines_are_told_from_their_launch_until_they_have_ended() -> None:
    """Also those that come after their request was given up; what other runs wait for is not this
    one's."""
    reports = {"now": AutoscalerReport(coming={"spot": 3})}
    nodes = nodes_of(reports)
    assert nodes.news({}) == []
    nodes.request("spot", 2, "r1")
    assert nodes.news({}) == [InstancesSeen("spot", starting=2)]
    node = RayNode("n1", "10.0.0.1", 1, {}, 8, 0, False)
    reports["now"] = AutoscalerReport(given={"n1": "spot"}, coming={"spot": 3})
    ready, *machines = nodes.news({"n1": node})
    assert isinstance(ready, NodeReady) and machines == [], (
        "NodeReady says itself that one starts no more"
    )
    nodes.request("spot", 0, "r1")
    reports["now"] = AutoscalerReport(given={"n1": "spot"}, coming={"spot": 1})
    assert nodes.news({"n1": node}) == []
    nodes.release(ready.node.node_id)
    assert nodes.news({"n1": node}) == [InstancesSeen("spot", starting=1, leaving=1)]
    reports["now"] = AutoscalerReport()
    assert nodes.news({}) == [InstancesSeen("spot")]
