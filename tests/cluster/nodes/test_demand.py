"""Who has which node of an autoscaled cluster, and which are to go: numbers only."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from elastic.cluster.backend.driver_hold import DriverHold
from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.nodes import autoscaler, autoscaler_agent
from elastic.cluster.nodes.autoscaler import AutoscalerNodes
from elastic.cluster.nodes.autoscaler_agent import AutoscalerAgent, AutoscalerReport, Reasons
from elastic.cluster.nodes.demand import (
    LEAVE_MOST_S,
    TAKE_OVER_S,
    UNASKED_S,
    Demand,
    DemandReport,
    SeenNode,
)
from elastic.cluster.nodes.node_types import NodeType, ResourceBundle, bundle_of, read_types
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.ray._ray_private import Scaling
from elastic.types import InstancesSeen, Node, NodeReady, Pool

SPOT, SAFE = (
    Pool("spot", "A100", 8, "spot", max_nodes=4),
    Pool("safe", "A100", 8, "on-demand", max_nodes=4),
)
ORDER = DemandReport("a", 1, (SPOT, SAFE), 100.0)


def nodes(**pools: str) -> dict[str, SeenNode]:
    return {name: SeenNode(pool) for name, pool in pools.items()}


def test_nodes_are_dealt_to_those_that_wait_once_each() -> None:
    demand = Demand()
    demand.hear(replace(ORDER, waits={"spot": 2}), 0)
    demand.hear(replace(ORDER, namespace="b", waits={"spot": 1}), 0)
    demand.look(nodes(n1="spot", n2="spot", n3="spot", n4="spot", n5="safe"), 0)
    assert (set(demand.given("a")), set(demand.given("b"))) == ({"n1", "n2"}, {"n3"})
    demand.look(nodes(n1="spot", n2="spot", n3="spot", n4="spot", n5="safe"), 1)
    assert len(demand.given("a")) == 2, (
        "what was given answers what is waited for, until the driver says that it has it"
    )
    assert not demand.leaving, "n4 and n5 stood there before: they are somebody else's"


def test_the_request_is_the_sum_of_what_is_held_and_waited_for() -> None:
    demand = Demand()
    demand.hear(replace(ORDER, waits={"spot": 1, "safe": 0}, held=frozenset({"n1", "n2"})), 0)
    demand.hear(replace(ORDER, namespace="b", waits={"safe": 2}), 0)
    seen = nodes(n1="spot") | {"n2": SeenNode("spot", draining=True)}
    demand.look(seen, 0)
    assert demand.wanted(seen, 0) == Counter({"spot": 2, "safe": 2}), (
        "a node that is preempted is not asked for any more"
    )


def test_each_run_has_the_instances_that_it_waits_for_in_turn() -> None:
    """What starts is on one bill; of what nobody waits for each run knows what it gave up."""
    demand, types = Demand(), {"spot": "big", "safe": "safe"}
    demand.hear(replace(ORDER, waits={"spot": 2}), 0)
    demand.hear(replace(ORDER, namespace="b", waits={"spot": 2}), 0)

    def shared(**instances: int) -> list[int]:
        found = [demand.coming(name, instances, types, now_s=0.0) for name in "ab"]
        assert all(one["safe"] == instances.get("safe", 0) for one in found)
        return [one["spot"] for one in found]

    assert shared(big=2) == [2, 0] and shared(big=3) == [2, 1]
    assert shared(big=5, safe=1) == [3, 3], "the fifth is nobody's"
    demand.look(nodes(n1="spot"), 0)
    assert shared(big=2) == [1, 1], "one of what the first waits for has joined"
    demand.hear(replace(ORDER, waits={"spot": 1}, held=frozenset({"n1"})), 1)
    assert shared(big=2) == [1, 1]
    demand.hear(replace(ORDER, waits={}, held=frozenset({"n1"})), 2)
    assert shared(big=2) == [0, 2]


def test_a_watcher_tells_two_runs_of_a_machine_once() -> None:
    stuck = Stuck(time.monotonic())
    stuck._scaling.coming["spot"] = 2
    reports = [
        stuck.order(replace(ORDER, namespace=name, waits={"spot": 2})).coming for name in "ab"
    ]
    assert reports == [{"spot": 2, "safe": 0}, {"spot": 0, "safe": 0}]


def test_a_dropped_node_leaves_and_is_not_dealt_again() -> None:
    demand = Demand()
    demand.hear(replace(ORDER, held=frozenset({"n1", "n2"})), 0)
    demand.look(nodes(n1="spot", n2="spot"), 0)
    demand.hear(
        replace(ORDER, waits={"spot": 1}, held=frozenset({"n2"}), dropped=frozenset({"n1"})), 1
    )
    demand.look(nodes(n1="spot", n2="spot"), 1)
    assert demand.to_drain(nodes(n1="spot", n2="spot"), {}) == ["n1"] and set(
        demand.given("a")
    ) == {"n2"}
    demand.look(nodes(n2="spot"), 2)
    assert not demand.leaving


def test_a_node_below_the_least_of_its_type_stays_for_the_next_request() -> None:
    demand, seen = Demand(), nodes(n1="spot", n2="spot")
    demand.hear(replace(ORDER, held=frozenset(seen)), 0)
    demand.look(seen, 0)
    demand.end("a", 1, 1)
    demand.look(seen, 1)
    assert demand.to_drain(seen, {"spot": 1}) == ["n2"]
    demand.hear(replace(ORDER, namespace="b", waits={"spot": 1}), 2)
    demand.look(nodes(n1="spot"), 2)
    assert set(demand.given("b")) == {"n1"}


def test_on_kubernetes_what_comes_unasked_is_left_to_the_clusters_own_timeout() -> None:
    """It may be one of its minReplicas: ended, it would be replaced, again and again."""
    demand = Demand(ends_unasked=False)
    demand.hear(ORDER, 0)
    demand.look({}, 0)
    demand.look(nodes(n1="spot"), 1)
    demand.look(nodes(n1="spot"), 1 + 10 * UNASKED_S)
    assert not demand.leaving
    demand.hear(replace(ORDER, waits={"spot": 1}), 200)
    demand.look(nodes(n1="spot"), 200)
    assert demand.given("a") == {"n1": "spot"}


def test_a_run_has_a_node_again_that_it_released_and_that_the_cluster_keeps() -> None:
    demand, seen = Demand(), nodes(n1="spot")
    demand.hear(replace(ORDER, held=frozenset(seen)), 0)
    demand.look(seen, 0)
    demand.hear(replace(ORDER, dropped=frozenset(seen)), 1)
    demand.look(seen, 1)
    assert demand.to_drain(seen, {"spot": 1}) == [] and demand.stay == {"n1"}
    demand.hear(replace(ORDER, waits={"spot": 1}), 2)  # its driver has heard that it stays
    demand.look(seen, 2)
    assert demand.given("a") == {"n1": "spot"} and demand.stay == set()


def test_a_driver_that_has_dropped_a_node_does_not_take_it_from_the_next_run() -> None:
    demand, seen = Demand(), nodes(n1="spot")
    demand.hear(replace(ORDER, held=frozenset(seen)), 0)
    demand.look(seen, 0)
    demand.hear(replace(ORDER, dropped=frozenset(seen)), 1)
    demand.to_drain(seen, {"spot": 1})
    demand.hear(replace(ORDER, namespace="b", waits={"spot": 1}), 2)
    demand.look(seen, 2)
    demand.hear(replace(ORDER, dropped=frozenset(seen)), 3)
    assert demand.given("b") == {"n1": "spot"} and not demand.leaving


def test_what_comes_unasked_goes_after_a_while() -> None:
    demand = Demand()
    demand.hear(ORDER, 0)
    demand.look({}, 0)
    demand.look(nodes(n1="spot"), 1)
    demand.look(nodes(n1="spot"), UNASKED_S)
    assert not demand.leaving
    demand.look(nodes(n1="spot"), 1 + UNASKED_S)
    assert set(demand.leaving) == {"n1"}


def test_a_silent_driver_loses_its_request_and_its_nodes_and_may_come_back() -> None:
    demand, seen = Demand(), nodes(n1="spot")
    order = replace(ORDER, waits={"safe": 1}, held=frozenset(seen))
    demand.hear(order, 0)
    demand.look(seen, 100)
    assert demand.wanted(seen, 0)
    demand.look(seen, 101)
    assert (
        not demand.wanted(seen, 0)
        and demand.to_drain(seen, {}) == ["n1"]
        and not demand.overdue(101)
    )
    demand.forget_gone()
    assert [run.order.namespace for run in demand.overdue(102 + LEAVE_MOST_S)] == ["a"]
    demand.hear(replace(order, epoch=2), 103)
    demand.look(seen, 103)
    assert not demand.leaving and set(demand.given("a")) == {"n1"}
    demand.look({}, 300)
    demand.forget_gone()
    assert not demand.runs


def test_what_starts_for_the_driver_before_comes_to_the_next_one() -> None:
    """It asks for nothing while it attaches, and the machine is paid for since its launch."""
    demand = Demand()
    demand.look(nodes(), 0)
    demand.hear(replace(ORDER, waits={"spot": 2}), 0)
    demand.hear(replace(ORDER, epoch=2), 10)
    seen = nodes(n1="spot")
    demand.look(seen, 20)
    assert demand.given("a") == {"n1": "spot"}
    demand.hear(replace(ORDER, epoch=2, held=frozenset({"n1"}), waits={"spot": 1}), 30)
    assert demand.wanted(seen, 30) == {"spot": 2}, "one is held, and one may come yet"
    demand.hear(replace(ORDER, epoch=2, held=frozenset({"n1"})), 40)
    assert demand.wanted(seen, 40) == {"spot": 2}
    assert demand.wanted(seen, 10 + TAKE_OVER_S) == {"spot": 1}
    demand.hear(replace(ORDER, epoch=3, fresh=True), 60)
    assert demand.wanted(nodes(), 60) == {}


def test_who_takes_over_has_the_nodes_of_its_workers_from_a_watcher_that_forgot_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process was replaced while no driver was there: else all that trains is killed."""
    actor = as_actor(monkeypatch, Stuck(time.monotonic()), [])
    desk = autoscaler.AutoscalerClient(replace(ORDER, epoch=2, adopted={"r1": "spot"}))
    nodes = AutoscalerNodes((SPOT, SAFE), desk=desk)
    alive = {ray_id: RayNode(ray_id, "10.0.0.1", 1, {}, 8, 8, False) for ray_id in ("r1", "r2")}
    try:
        events = nodes.news(alive)
    finally:
        desk.close(end=False)
    assert [(e.node.node_id, e.node.pool) for e in events if isinstance(e, NodeReady)] == [
        ("spot-r1", "spot")
    ]
    assert actor.order.remote(replace(ORDER, epoch=2)).given == {"r1": "spot"}


def test_what_others_have_or_is_about_to_go_is_not_had_again_by_who_takes_over() -> None:
    demand, seen = Demand(), nodes(n1="spot", n2="spot")
    demand.hear(replace(ORDER, namespace="b", waits={"spot": 1}), 0)
    demand.look(seen, 0)
    demand.hear(replace(ORDER, held=frozenset({"n2"})), 1)
    demand.hear(replace(ORDER, dropped=frozenset({"n2"})), 2)
    demand.hear(replace(ORDER, epoch=2, adopted=dict.fromkeys(seen, "spot")), 3)
    assert (demand.given("a"), demand.given("b")) == ({}, {"n1": "spot"})


def test_an_older_driver_is_not_heard_and_a_fresh_one_inherits_nothing() -> None:
    demand, seen = Demand(), nodes(n1="spot")
    demand.hear(replace(ORDER, epoch=2, held=frozenset(seen)), 0)
    demand.look(seen, 0)
    assert not demand.hear(ORDER, 1)
    demand.end("a", 1, 1)
    assert demand.given("a")
    demand.hear(replace(ORDER, epoch=3, fresh=True), 2)
    demand.look(seen, 2)
    assert not demand.given("a") and set(demand.leaving) == {"n1"}


# -------------------------------------------------------------------------- how a node is asked for

LABELS = {"ray.io/market-type": "spot", "ray.io/accelerator-type": "A100"}
BIG = NodeType("big", LABELS, {"CPU": 96, "GPU": 8}, most=4)


class DeafDesk:
    """Has heard nothing yet, and keeps what it was told."""

    def __init__(self) -> None:
        self.report, self.waits, self.dropped, self.current = (
            AutoscalerReport(),
            dict[str, int](),
            frozenset[str](),
            True,
        )

    def heard(self) -> tuple[AutoscalerReport, bool]:
        return self.report, self.current

    def tell(
        self, waits: Mapping[str, int], held: object, dropped: frozenset[str], *, out: object
    ) -> None:
        self.waits, self.dropped = dict(waits), dropped


class Stuck(AutoscalerAgent):
    """A watcher without a cluster; `looked` says when its thread last came back from a look."""

    def __init__(self, looked: float) -> None:
        self._demand, self._types, self._pools = Demand(), {}, {}
        self._reasons, self._scaling = (
            Reasons(Path("none")),
            Scaling(Counter(), Counter(), Counter(), Counter()),
        )
        self._asked, self._heard, self._asked_for, self._looked_s = None, 0, 0, looked
        self._lock, self._wake = threading.Lock(), threading.Event()


def as_actor(
    monkeypatch: pytest.MonkeyPatch, agent: AutoscalerAgent, kills: list[tuple[object, bool]]
) -> Any:
    """The cluster's one, whose calls are done at once."""
    actor = SimpleNamespace(
        serves=SimpleNamespace(remote=lambda: True),
        order=SimpleNamespace(remote=agent.order),
        end=SimpleNamespace(remote=agent.end),
    )
    monkeypatch.setattr(autoscaler, "autoscaler_agent", lambda quiet_s: actor)
    monkeypatch.setattr(
        autoscaler,
        "ray",
        SimpleNamespace(
            get=lambda answer, timeout: answer,
            kill=lambda it, no_restart: kills.append((it, no_restart)),
        ),
    )
    return actor


@pytest.mark.parametrize(("hangs_s", "killed"), [(10.0, 0), (31.0, 1)])
def test_a_watcher_that_answers_and_does_not_look_is_replaced(
    monkeypatch: pytest.MonkeyPatch, hangs_s: float, killed: int
) -> None:
    kills = list[tuple[object, bool]]()
    actor = as_actor(monkeypatch, Stuck(time.monotonic() - hangs_s), kills)
    desk = autoscaler.AutoscalerClient(ORDER)  # its first word is told in the constructor
    desk.close(end=True)
    assert kills[:1] == [(actor, False)] * killed
    assert desk.heard()[0].looked_s >= hangs_s


def test_a_look_that_ends_is_one_also_where_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is won by another process where the head does not answer."""

    class Ends(BaseException):
        pass

    stuck, turns = Stuck(0.0), list[float]()

    def look() -> None:
        turns.append(stuck._looked_s)
        if len(turns) > 1:
            raise Ends
        raise OSError("the head does not answer")

    monkeypatch.setattr(stuck, "_look", look)
    monkeypatch.setattr(autoscaler_agent, "LOOK_S", 0.0)
    with pytest.raises(Ends):
        stuck._run()
    assert turns[0] == 0.0 and turns[1] > 0.0


def test_a_request_that_is_taken_back_brings_no_node() -> None:
    desk: Any = DeafDesk()
    nodes = AutoscalerNodes((SPOT, SAFE), desk=desk)
    nodes.request("spot", 2, "spot-1")
    nodes.request("safe", 1, "safe-2")
    assert desk.waits == {"spot": 2, "safe": 1}
    nodes.request("spot", 0, "spot-1")
    assert desk.waits == {"safe": 1}
    desk.report = AutoscalerReport(given={"r1": "spot", "r2": "safe"})
    alive = {ray_id: RayNode(ray_id, "10.0.0.1", 1, {}, 8, 8, False) for ray_id in ("r1", "r2")}
    ready, *machines = nodes.news(alive)
    assert isinstance(ready, NodeReady) and ready.node.pool == "safe", (
        "the other one had been on its way: it is released"
    )
    assert machines == [InstancesSeen("spot", leaving=1)], "and paid for until it has ended"


def test_nodes_that_were_given_back_are_told_until_they_are_gone_and_then_forgotten() -> None:
    desk: Any = DeafDesk()
    nodes = AutoscalerNodes((replace(SPOT, max_nodes=1),), desk=desk)
    for k in range(50):
        node = RayNode(f"r{k}", "10.0.0.1", 1, {}, 8, 8, False)
        nodes.request("spot", 1, f"spot-{k}")
        desk.report = AutoscalerReport(given={node.ray_id: "spot"})
        (ready,) = [
            event for event in nodes.news({node.ray_id: node}) if isinstance(event, NodeReady)
        ]
        nodes.release(ready.node.node_id)
        nodes.news({node.ray_id: node})
        assert desk.dropped == {node.ray_id}, "it is still there"
        desk.report, desk.current = AutoscalerReport(), False
        nodes.news({})
        assert desk.dropped == {node.ray_id}, (
            "a watcher that has not answered since may not know of it"
        )
        desk.current = True
        nodes.news({})
        assert desk.dropped == frozenset()
    assert not nodes._dropped and nodes._used("spot") == 0


def test_a_bundle_fills_a_node_of_its_type() -> None:
    found = bundle_of(replace(SPOT, name="big", gpus_per_node=4), {"big": BIG})
    assert found == ResourceBundle((("GPU", 8.0),), tuple(sorted(LABELS.items())))
    assert bundle_of(replace(SPOT, name="other"), {"big": BIG}) == found, (
        "the only type of its kind"
    )
    cpu = bundle_of(Pool("big", "CPU", 2, "spot"), {"big": BIG})
    assert isinstance(cpu, ResourceBundle) and cpu.resources == (("CPU", 96.0),)
    assert isinstance(bundle_of(SPOT, None), ResourceBundle)
    any_gpu = bundle_of(replace(SPOT, accelerator_type="GPU"), None)
    assert isinstance(any_gpu, ResourceBundle)
    assert dict(any_gpu.selector) == {"ray.io/market-type": "spot"}, "no node is labeled GPU"


@pytest.mark.parametrize("known", [True, False], ids=["ray up", "KubeRay"])
def test_a_node_that_was_asked_for_counts_to_its_pool_whatever_its_type_is_called(
    known: bool,
) -> None:
    """Else it is bought, belongs to nobody, and another one is asked for."""
    other, owned = replace(SPOT, name="other"), Pool("mine", "A100", 8, "owned", max_nodes=1)
    agent = Stuck(0.0)
    agent._types = {"big": BIG} if known else None
    assert isinstance(bundle_of(other, agent._types), ResourceBundle)
    joined = RayNode("r1", "10.0.0.1", 1, {**LABELS, "ray.io/node-group": "big"}, 96, 8, False)
    strange = replace(joined, ray_id="r2", labels={**joined.labels, "ray.io/node-group": "huge"})

    def pools(*told: Pool) -> dict[str, str]:
        agent.order(replace(ORDER, pools=told, waits={told[0].name: 1}))
        seen = agent._seen([joined, strange], {})
        return {ray_id: node.pool for ray_id, node in seen.items()}

    of_huge = {} if known else {"r2": "other"}
    assert pools(other, owned) == {"r1": "other"} | of_huge, "of a type that is not its own: no"
    big = replace(SPOT, name="big")
    assert pools(big) == {"r1": "big"} | of_huge, "the run that was here before has it no more"
    assert pools(other, big)["r1"] == "big"


def test_what_cannot_be_asked_for_is_said() -> None:
    text = bundle_of(SAFE, {"big": BIG})
    assert isinstance(text, str) and "named or labeled 'safe'" in text and "big" in text
    twin = replace(BIG, name="twin", resources={"GPU": 16})
    text = bundle_of(replace(SPOT, name="big"), {"big": BIG, "twin": twin})
    assert (
        isinstance(text, str)
        and "'big' and 'twin' have the same labels" in text
        and "elastic-pool: big" in text
    )
    small = replace(BIG, name="small", resources={"GPU": 4})
    assert isinstance(
        bundle_of(replace(SPOT, name="big"), {"big": BIG, "small": small}), ResourceBundle
    )


def test_types_are_read_without_the_head(tmp_path: Path) -> None:
    path = f"{tmp_path}/cluster.yaml"
    with open(path, "w") as file:
        file.write(
            "head_node_type: h\navailable_node_types: {h: {}, w: {min_workers: 1, max_workers: 3, "
            "resources: {GPU: 8}}}\n"
        )
    assert read_types(path) == {"w": NodeType("w", {}, {"GPU": 8}, 1, 3)}


def test_reasons_are_read_from_the_log_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "monitor.log"
    reasons = Reasons(log)
    reasons.read()
    line = (
        "2026-11-22 04:51:01,411\tINFO node_provider.py:491 -- Failed to launch 2 nodes of type "
        "spot: none is left\n"
    )
    log.write_text(line + line.replace("none is", "nothing is")[:-5])
    reasons.read()
    assert reasons.by_type == {"spot": "none is left"}
    log.write_text(line + line.replace("none is", "nothing is"))
    reasons.read()
    assert reasons.by_type == {"spot": "nothing is left"}
    log.write_text(line)
    reasons.read()
    assert reasons.by_type == {"spot": "none is left"}


def test_the_log_of_reasons_is_where_ray_was_told_to_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not that of an autoscaler's process on this machine."""

    class Idle(AutoscalerAgent):
        def _run(self) -> None:
            """Looks at no cluster."""

    place = SimpleNamespace(get_temp_dir=lambda: str(tmp_path / "ray"), current_actor=None)
    monkeypatch.setattr(autoscaler_agent.ray, "get_runtime_context", lambda: place)
    monkeypatch.setattr(autoscaler_agent, "monitor_here", lambda: None)
    logs = tmp_path / "ray" / "session_latest" / "logs"
    assert Idle(0.0)._reasons.path == logs / "monitor.log"


# ---------------------------------------------------------------------- what a driver leaves behind


@pytest.mark.parametrize(
    ("stopped", "replaced", "told"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_a_driver_that_ends_without_its_run_says_what_stays_paid(
    stopped: bool, replaced: bool, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where it gives everything back nor where another driver has it."""
    held: Any = MagicMock(spec=RayBackend, _closed=False, _stopped=stopped, cluster=None)
    held.nodes = {
        name: Node(name, pool)
        for name, pool in (("s-2", "spot"), ("s-1", "spot"), ("own-1", "own"))
    }
    held.run = SimpleNamespace(pools=(replace(SPOT, usd_per_node_h=6.0), Pool("own")))
    held.worker_group = MagicMock(setup=SimpleNamespace(orphan_lease_s=900.0))
    held.lease = SimpleNamespace(lost=replaced, epoch=1, release=lambda: None)
    held.certain = True
    held.hold = DriverHold(held.run, None, held, held.worker_group, False)
    for part in ("survey", "cloud_feed", "inbox", "entrance", "copies", "provider", "stores"):
        setattr(held, part, MagicMock())
    RayBackend.close(held)
    held.provider.close.assert_called_once_with(end=stopped)
    text = (
        "2 paid node(s) stay for the run's next driver (s-1, s-2; $12.00/h): without one they "
        "leave after 18 min at the most, "
    )
    text += "$3.50 more"
    assert caplog.messages == ([text] if told else [])
