"""What the survey makes of ports, of the head, and of a network that is away: no Ray cluster
needed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from support.waiting import until

from elastic.cluster.nodes import survey as room
from elastic.cluster.nodes.providers import RayNode
from elastic.cluster.nodes.survey import (
    AWAY_MOST_S,
    HOSTS_LEAST,
    MUTE_MOST_S,
    REFUSES,
    HeadService,
    Survey,
    reach_each,
    reaches,
)
from elastic.types import NodesMute

OWN = "10.0.0.1"


def ray_node(name: str, address: str = "10.0.0.2") -> RayNode:
    return RayNode(name, address, 1, {}, 8, 4, False)


def test_a_port_answers_or_refuses() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert reaches("127.0.0.1", port) is False
        listening.listen()
        assert reaches("127.0.0.1", port) is True


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Refuses until it listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def asked(head: HeadService, seconds: Iterable[float], looked: bool = False) -> str:
    """What it says at the last of these seconds."""
    return [head.ask(looked, at_s) for at_s in seconds][-1]


def head_at(port: socket.socket, refused_most_s: float = AWAY_MOST_S) -> HeadService:
    return HeadService(f"127.0.0.1:{port.getsockname()[1]}", refused_most_s)


def test_a_node_whose_link_was_cut_is_found_again_and_one_that_refused_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, answers, looks = ray_node("n"), [True, None], []
    place = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "own")
    # else Ray would be started, and each later test of this process be on a cluster
    monkeypatch.setattr(room.ray, "get_runtime_context", lambda: place)
    monkeypatch.setattr(room._ray_private, "draining_nodes", dict)
    monkeypatch.setattr(room, "living", lambda: looks.append(1) or [node])
    monkeypatch.setattr(room, "reach_each", lambda places: dict.fromkeys(places, answers[-1]))
    monkeypatch.setattr(HeadService, "ask", lambda self, looked, now_s: "")
    for name, seconds in (("SURVEY_S", 0.01), ("PROBE_S", 0.01), ("MUTE_MOST_S", 0.05)):
        monkeypatch.setattr(room, name, seconds)
    survey = Survey()
    try:
        survey.suspect([node.ray_id])
        until(lambda: node.ray_id in survey.gone and not survey.alive, "its loss")
        seen = len(looks)
        until(lambda: len(looks) > seen + 2, "more looks")
        assert "cannot be reached" in survey.gone[node.ray_id] and not survey.alive
        answers.append(True)
        until(lambda: node.ray_id in survey.alive, "its return")
        assert survey.gone == {}
        answers.append(False)
        survey.suspect([node.ray_id])
        until(lambda: node.ray_id in survey.gone, "its end")
        answers.append(True)
        seen = len(looks)
        until(lambda: len(looks) > seen + 2, "more looks")
        assert survey.gone == {node.ray_id: REFUSES} and not survey.alive
    finally:
        survey.close()


def test_an_embedded_head_that_refuses_is_gone(port: socket.socket) -> None:
    head = head_at(port, 0.0)
    assert head.ask(looked=True, now_s=0.0) == ""
    assert "has refused connections for 1 s" in head.ask(looked=False, now_s=0.5) + head.ask(
        looked=False, now_s=1.0
    )


def test_that_of_a_cluster_may_come_back(port: socket.socket) -> None:
    head = head_at(port)
    assert asked(head, range(29)) == ""
    port.listen()
    assert asked(head, range(29, 58)) == "", "it listens again, and has not answered yet"
    assert asked(head, range(58, 62)).endswith("has not answered for 32 s")
    assert asked(head, range(62, 63), looked=True) == ""


def test_a_head_that_only_listens_is_gone_in_time(port: socket.socket) -> None:
    port.listen()
    head = head_at(port, 0.0)
    assert asked(head, range(30)) == ""
    assert "has not answered for 31 s" in asked(head, range(30, 32))
    assert AWAY_MOST_S == 30.0, "Ray ends this process after 60 s, and to end takes it some 10 s"


def test_what_this_process_stood_still_does_not_count(port: socket.socket) -> None:
    port.listen()
    head = head_at(port)
    assert asked(head, (0.0, 1.0, 3600.0, 7200.0)) == ""


# ------------------------------------------------------------------------- whose link it is


@dataclass
class Network:
    """Nodes as Ray lists them and what their ports say (None = nothing), at seconds of its own."""

    names: list[str]
    mute: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    now_s: float = 1000.0
    here: list[str] = field(default_factory=list)  # nodes on the driver's own host
    asked: list[int] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now_s

    def address(self, name: str) -> str:
        return OWN if name in ("own", *self.here) else f"host-{name}"

    def living(self) -> list[RayNode]:
        return [ray_node(name, self.address(name)) for name in ("own", *self.names)]

    def reach_each(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], bool | None]:
        wanted = [*places]
        self.asked.append(len(wanted))
        mute, refusing = ({self.address(n) for n in of} for of in (self.mute, self.refusing))
        return {place: None if place[0] in mute else place[0] not in refusing for place in wanted}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    place = SimpleNamespace(gcs_address="127.0.0.1:1", get_node_id=lambda: "own")
    monkeypatch.setattr(room.ray, "get_runtime_context", lambda: place)
    monkeypatch.setattr(room._ray_private, "draining_nodes", dict)
    for thread in ("_run", "_ask"):
        monkeypatch.setattr(Survey, thread, lambda self: None)
    return monkeypatch


def surveyed(network: Network, patch: pytest.MonkeyPatch, most_s: float = 900.0) -> Survey:
    patch.setattr(room, "living", network.living)
    patch.setattr(room, "reach_each", network.reach_each)
    patch.setattr(room, "time", network)
    return Survey(alone_most_s=most_s)


def pass_s(survey: Survey, network: Network, seconds: float, late: Iterable[str]) -> None:
    """Every quarter of a second the driver suspects the nodes of late workers, and they are asked."""
    until_s = network.now_s + seconds
    while network.now_s < until_s:
        survey.suspect(late)
        survey._probe()
        network.now_s += 0.25


def test_a_host_that_no_other_answers_is_cut_off_itself(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "b", "c"], mute={"a", "b", "c"})
    survey = surveyed(network, patch)
    pass_s(survey, network, MUTE_MOST_S, "ab")
    assert (survey.liveness_known, survey.news(0.0)) == (False, [])
    pass_s(survey, network, 100.0, "ab")
    assert survey.gone == {} and not survey.liveness_known
    began_s = 5000.0 - 100.0 - MUTE_MOST_S
    assert survey.news(5000.0) == [NodesMute(3, began_s)]
    pass_s(survey, network, 10.0, ())
    assert not survey.liveness_known, "also where nobody is suspected any more"
    assert survey.news(5000.0) == []

    network.mute -= {"c"}
    pass_s(survey, network, 0.25, "ab")
    assert survey.news(5010.25) == [NodesMute(3, began_s, "host-c answers again")]
    pass_s(survey, network, MUTE_MOST_S - 0.25, "ab")
    assert survey.gone == {}, "each has its time from here on"
    network.mute -= {"b"}
    pass_s(survey, network, 1.0, "ab")
    assert set(survey.gone) == {"a"} and "cannot be reached" in survey.gone["a"]


def test_what_was_lost_meanwhile_is_sent_again_before_anybody_is_silent(
    patch: pytest.MonkeyPatch,
) -> None:
    network = Network(["a", "b"], mute={"a", "b"})
    survey = surveyed(network, patch)
    pass_s(survey, network, 8.0, "ab")
    network.mute.clear()
    pass_s(survey, network, 7.75, "ab")
    assert not survey.liveness_known
    pass_s(survey, network, 0.5, "ab")
    assert survey.liveness_known and survey.gone == {}


def test_a_single_other_host_that_is_mute_is_lost_as_ever(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "near"], mute={"a"}, here=["near"])
    survey = surveyed(network, patch)
    assert HOSTS_LEAST == 2
    pass_s(survey, network, MUTE_MOST_S, "a")
    assert survey.gone == {} and survey.liveness_known
    pass_s(survey, network, 0.5, "a")
    assert set(survey.gone) == {"a"} and survey.news(0.0) == []


@pytest.mark.parametrize("answer", ["listens", "refuses"])
def test_one_host_that_answers_shows_that_the_others_are_gone(
    patch: pytest.MonkeyPatch, answer: str
) -> None:
    network = Network(["a", "b", "c"], mute={"a", "b"})
    if answer == "refuses":
        network.refusing = {"c"}
    survey = surveyed(network, patch)
    pass_s(survey, network, MUTE_MOST_S, "ab")
    assert survey.gone == {} and survey.liveness_known
    pass_s(survey, network, 0.5, "ab")
    assert set(survey.gone) == {"a", "b"} and survey.news(0.0) == []


def test_of_a_thousand_hosts_a_few_are_asked_for_those_that_are_mute(
    patch: pytest.MonkeyPatch,
) -> None:
    network = Network([f"n{k}" for k in range(1000)], mute={"n0", "n1"})
    survey = surveyed(network, patch)
    pass_s(survey, network, MUTE_MOST_S, ["n0", "n1"])
    assert max(network.asked) <= room.WITNESSES


def test_nodes_of_its_own_host_are_lost_as_ever(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "b", "c"], here=["a", "b", "c"])
    network.mute = {"own"}
    survey = surveyed(network, patch)
    pass_s(survey, network, MUTE_MOST_S + 0.5, "abc")
    assert set(survey.gone) == {"a", "b", "c"}


def test_it_lasts_as_long_as_workers_wait_at_most(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "b"], mute={"a", "b"})
    survey = surveyed(network, patch, most_s=60.0)
    pass_s(survey, network, 60.0, "ab")
    assert survey.gone == {}
    pass_s(survey, network, 0.5, "ab")
    assert set(survey.gone) == {"a", "b"} and survey.liveness_known
    assert [one.over for one in survey.news(0.0)] == ["", "they count as lost from here on"]
    survey._look()
    pass_s(survey, network, 5.0, ())
    network.mute.clear()
    survey._look()
    assert survey.gone == {} and set(survey.alive) == {"own", "a", "b"}
    assert survey.news(0.0) == [] and survey.liveness_known


def test_what_ray_gives_up_is_lost(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "b"], mute={"a", "b"})
    survey = surveyed(network, patch)
    pass_s(survey, network, 5.0, "ab")
    network.names.remove("a")
    survey._look()
    pass_s(survey, network, MUTE_MOST_S, "b")
    assert survey.gone == {"a": "Ray lists it as dead"}
    assert [one.over for one in survey.news(0.0)] == ["", "Ray lists them as dead"]
    pass_s(survey, network, 0.5, "b")
    assert set(survey.gone) == {"a", "b"}, "of a single host nobody can tell"


def test_nobody_is_silent_before_its_node_was_asked(patch: pytest.MonkeyPatch) -> None:
    network = Network(["a", "b"])
    survey = surveyed(network, patch)
    assert survey.liveness_known
    survey.suspect("a")
    assert not survey.liveness_known
    survey._probe()
    assert survey.liveness_known
    survey.suspect("b")
    network.now_s += MUTE_MOST_S
    assert survey.liveness_known, "what asks has come to a stop itself"


def test_many_ports_are_asked_at_once() -> None:
    with socket.socket() as full, socket.socket() as free:
        full.bind(("", 0))
        full.listen(0)
        free.bind(("127.0.0.1", 0))
        port = full.getsockname()[1]
        waiting = [socket.create_connection(("127.0.0.1", port))]  # its queue is full with that
        mute = [(f"127.0.{k // 250}.{1 + k % 250}", port) for k in range(300)]
        began_s = time.monotonic()
        refuses = free.getsockname()
        found = reach_each([*mute, refuses, refuses])
        took_s = time.monotonic() - began_s
        for one in waiting:
            one.close()
    assert found.pop(refuses) is False
    assert set(found.values()) <= {True, None} and [*found.values()].count(None) > 290
    assert took_s < 10.0, "one after the other they would take 90 s"
    assert reach_each([("no such host.invalid", 1)]) == {("no such host.invalid", 1): None}
