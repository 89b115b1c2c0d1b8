"""Who does not answer while a generation meets: told by name, where that is why it does not meet."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from errno import EINPROGRESS

import pytest
import torch
import torch.distributed as dist
from support.waiting import until

from elastic.types import Layout, WorkerId
from elastic.types.orders import Rendezvous
from elastic.worker.process_groups import reach
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.reach import PeersUnreached, Reach, place_told, unanswered
from elastic.worker.process_groups.sockets import inodes, shut
from elastic.worker.session.worker_errors import kind_of, text_of


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that answers nobody: the queue of who listens there is full."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=0)) as server:
        address = server.getsockname()
        held = []
        try:
            for _ in range(3):
                held.append(socket.socket())
                held[-1].setblocking(False)
                held[-1].connect_ex(address)
            yield address
        finally:
            for one in held:
                one.close()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def at(store: dist.TCPStore, *nodes: str) -> Rendezvous:
    workers = tuple(WorkerId(name, nodes[:i].count(name)) for i, name in enumerate(nodes))
    return Rendezvous(workers, ("127.0.0.1", store.port), 60.0)


def test_who_listens_and_who_has_gone_has_answered(silent: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = {
            "there": there.getsockname(), "gone": closed.getsockname(), "cut-off": silent
        }  # fmt: skip
        assert unanswered(addresses, 0.3, lambda: False) == ("cut-off",)
        assert unanswered({"there": there.getsockname()}, 60.0, lambda: False) == ()


def test_an_abort_ends_a_connection_that_nobody_answers(silent: tuple[str, int]) -> None:
    """gloo would wait for it for two minutes."""
    before = inodes()
    with socket.socket() as waits, select.epoll() as poll:
        waits.setblocking(False)
        assert waits.connect_ex(silent) == EINPROGRESS
        poll.register(waits, select.EPOLLOUT)
        assert poll.poll(0.1) == [], "nobody answers"
        shut(before, (), 0, at_once=False)
        assert poll.poll(0.1) == [], "once all have met none of theirs is under way"
        shut(before, (), 0, at_once=True)
        assert poll.poll(10)


def test_only_the_first_participant_of_a_node_looks(store: dist.TCPStore) -> None:
    looks = [
        Reach(at(store, "a", "a", "b"), me, lambda: None).begin(store, "", "127.0.0.1")
        for me in range(3)
    ]
    assert [one is not None for one in looks] == [True, False, True]
    alone = Reach(at(store, "a", "a"), 0, lambda: None)
    assert alone.begin(store, "", "127.0.0.1") is None, "nobody is on another node"


def test_a_meeting_with_a_node_that_does_not_answer_ends_and_names_it(
    store: dist.TCPStore, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b has come, as the store says, and connects with nobody; of c nothing is known."""
    monkeypatch.setattr(reach, "LATE_S", 0.1)
    monkeypatch.setattr(reach, "ANSWER_S", 0.3)
    place = dist.PrefixStore("generation-1", store)
    place.set("reach/1", place_told("", 1, f"{silent[0]} {silent[1]}"))
    found: list[BaseException] = []
    of = Groups(1, Layout(dp_shard=3), torch.device("cpu"))

    def join() -> None:
        try:
            of.join(at(store, "a", "b", "c"), 0)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    until(lambda: found, "the meeting to end", 30.0)
    thread.join()
    of.close()
    (error,) = found
    assert isinstance(error, PeersUnreached) and error.unreached == ("b",)
    assert kind_of(error) == "collective"
    assert text_of(error).startswith("a does not reach b: no answer within")


@pytest.mark.parametrize(
    "word", ["x y", "127.0.0.1 99999999", "", "\x00", place_told("guessed", 1, "127.0.0.1 1")]
)
def test_what_a_stranger_puts_into_the_store_ends_no_look(
    store: dist.TCPStore, silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """In the place of b; c does not answer, and is named."""
    monkeypatch.setattr(reach, "LATE_S", 0.1)
    monkeypatch.setattr(reach, "ANSWER_S", 0.3)
    looked: list[tuple[str, ...]] = []

    def looks(*words: object) -> tuple[str, ...]:
        looked.append(unanswered(*words))  # type: ignore[arg-type]
        return looked[-1]

    monkeypatch.setattr(reach, "unanswered", looks)
    secret, cut = "of the generation", threading.Event()
    place = dist.PrefixStore("p", store)
    place.set("reach/1", word)
    look = Reach(replace(at(store, "a", "b", "c"), secret=secret), 0, cut.set)
    assert look.begin(place, "p", "127.0.0.1") is not None
    until(lambda: len(looked) > 2, "some looks at that word alone")
    assert set(looked) == {()} and not cut.is_set()
    place.set("reach/2", place_told(secret, 2, f"{silent[0]} {silent[1]}"))
    assert cut.wait(30.0)
    look.end()
    assert look.unreached == ("c",)


def test_a_meeting_that_takes_long_while_all_answer_is_waited_for(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LATE_S", 0.02)
    monkeypatch.setattr(reach, "ANSWER_S", 5.0)
    looked: list[tuple[str, ...]] = []

    def looks(*words: object) -> tuple[str, ...]:
        looked.append(unanswered(*words))  # type: ignore[arg-type]
        return looked[-1]

    monkeypatch.setattr(reach, "unanswered", looks)
    ends = [Reach(at(store, "a", "b"), me, lambda: looked.append(("cut",))) for me in range(2)]
    for one in ends:
        assert one.begin(store, "p", "127.0.0.1") is not None
    until(lambda: len(looked) > 5, "some looks")
    for one in ends:
        one.end()
        one.check()
    assert set(looked) == {()}
