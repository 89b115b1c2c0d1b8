"""Names of drills, when they are due, and the inbox."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.stage import plan
from support.storage.faulty_proxy import FaultyProxy
from support.waiting import until

from elastic.cluster import drills
from elastic.cluster.drills import Inbox, Orders, Scene, Schedule, read_inbox, resolve
from elastic.errors import SpecError
from elastic.storage import Storage, open_storage
from elastic.types import WorkerId

WORKERS = [WorkerId(node, k) for node in ("a", "b", "c") for k in (0, 1)]
PLAN = replace(plan(1, WORKERS), peer_every=5, copies_to=((2,), (3,), (4,), (5,), (0,), (1,)))
SCENE = Scene(PLAN, {"a": "on-demand", "b": "spot", "c": "on-demand", "spare": "spot"})


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("any", ("c",)),
        ("any-spot", ("b",)),
        ("rank0", ("a",)),
        ("rank:3", ("b",)),
        ("spare", ("spare",)),
        (["rank0", "partner"], ("a", "b")),
        (["c", "partner"], ("c", "a")),
        (["any", "any"], ("c", "b")),
        (["rank:0", "rank:1"], ("a",)),
    ],
)
def test_names(names: str | list[str], found: tuple[str, ...]) -> None:
    assert resolve(names, SCENE) == found


def test_any_passes_over_nodes_that_leave() -> None:
    assert resolve("any", Scene(SCENE.plan, SCENE.markets, frozenset({"c"}))) == ("b",)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("partner", "needs a node of the plan before it"),
        ("rank:6", "no rank 6"),
        ("z", "'z' is no node; standing are a, b, c, spare"),
        (["spare", "partner"], "needs a node of the plan"),
    ],
)
def test_names_that_mean_nothing(names: str | list[str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        resolve(names, SCENE)


def test_an_entry_is_due_once_per_run_in_order(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    entries = [{"at_step": 30, "kill": "any"}, {"at_step": 10, "add": "spot"}, {"at_step": 10, "hang": "rank0"}]
    first = Schedule(entries, storage)
    assert first.due(9) == []
    assert first.due(11) == [entries[1], entries[2]]
    assert first.due(12) == []
    again = Schedule(entries, storage)  # a driver that started again
    assert again.due(29) == []
    assert again.due(100) == [entries[0]]


def test_inbox(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert read_inbox(storage).drills == ()
    storage.put("inbox/1.json", json.dumps({"drill": {"notice": "any", "deadline_s": 5}}).encode())
    storage.put("inbox/2.json", json.dumps({"stop": "enough"}).encode())
    storage.put("inbox/3.json", json.dumps({"drill": {"explode": "any"}}).encode())
    storage.put("inbox/4.json", b"{")
    orders = read_inbox(storage)
    assert orders.drills == ({"notice": "any", "deadline_s": 5.0},)
    assert orders.stop == "enough"
    rejected = {key: json.loads(storage.get(key))["why"] for key in storage.list("inbox/rejected/")}
    assert set(rejected) == {"inbox/rejected/3.json", "inbox/rejected/4.json"}
    assert "explode" in rejected["inbox/rejected/3.json"]
    assert read_inbox(storage) == type(orders)()


def test_an_order_that_cannot_be_removed_is_given_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    storage.put("inbox/1.json", json.dumps({"drill": {"kill": "any"}}).encode())
    storage.put("inbox/2.json", json.dumps({"stop": "enough"}).encode())

    def broken(key: str) -> None:
        raise OSError("out of reach")

    taken: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", broken)
        assert len(read_inbox(storage, taken).drills) == 1
        with pytest.raises(OSError):
            read_inbox(storage, taken)
    orders = read_inbox(storage, taken)
    assert (orders.drills, orders.stop) == ((), "enough") and storage.list("inbox/") == []


def test_the_inbox_in_object_storage_is_looked_at_seldom_and_never_waited_for(
    s3: Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drills, "REMOTE_EVERY_S", 0.1)
    asked, answers, gave_up = threading.Event(), threading.Event(), threading.Event()

    def hold(line: str) -> None:
        asked.set()
        if not answers.wait(30):
            gave_up.set()

    proxy.before = hold
    inbox = Inbox(s3)
    begun_s = time.monotonic()
    assert asked.wait(60)
    assert inbox.take() == Orders() and not gave_up.is_set(), "it has waited for storage"
    answers.set()
    for n in range(3):
        s3.put(f"inbox/{n}.json", json.dumps({"drill": {"kill": f"n{n}"}}).encode())
    found: list[object] = []
    until(lambda: found.extend(entry["kill"] for entry in inbox.take().drills) or len(found) >= 3, "the orders")
    assert found == ["n0", "n1", "n2"]
    s3.put("inbox/9.json", json.dumps({"stop": "enough"}).encode())
    until(lambda: inbox.take().stop == "enough", "the order to stop")
    assert len(proxy.seen) < 20 + 10 * (time.monotonic() - begun_s)
    inbox.close()
    until(lambda: all(thread.name != "inbox" for thread in threading.enumerate()), "the end of who asks")
