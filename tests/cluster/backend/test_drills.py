"""Names of drills, when they are due, and the inbox."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.stage import plan
from support.storage.faulty_proxy import FaultyProxy
from support.waiting import until

from elastic.cluster.backend.drills import Schedule
from elastic.config.drill import Scene, resolve
from elastic.errors import SpecError
from elastic.observe import find_runs
from elastic.storage import LocalStorage, Storage, open_storage
from elastic.types import ProfileAsked, WorkerId
from elastic.worker.hosting.inbox import MOST_BYTES, Inbox, InboxOrders

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
    entries = [
        {"at_step": 30, "kill": "any"},
        {"at_step": 10, "add": "spot"},
        {"at_step": 10, "hang": "rank0"},
    ]
    first = Schedule(entries, storage)
    assert first.due(9) == []
    assert first.due(11) == [entries[1], entries[2]]
    assert first.due(12) == []
    again = Schedule(entries, storage)  # a driver that started again
    assert again.due(29) == []
    assert again.due(100) == [entries[0]]


def test_inbox(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    inbox = Inbox(storage)
    assert inbox.take() == InboxOrders()
    storage.put("inbox/1.json", json.dumps({"drill": {"notice": "any", "deadline_s": 5}}).encode())
    storage.put("inbox/2.json", json.dumps({"stop": "enough"}).encode())
    storage.put("inbox/3.json", json.dumps({"drill": {"explode": "any"}}).encode())
    storage.put("inbox/4.json", b"{")
    orders = inbox.take()
    assert orders.drills == ({"notice": "any", "deadline_s": 5.0},)
    assert orders.stop == "enough"
    rejected = why_rejected(storage)
    assert set(rejected) == {"inbox/rejected/3.json", "inbox/rejected/4.json"}
    assert "explode" in rejected["inbox/rejected/3.json"]
    assert inbox.take() == InboxOrders() and storage.list("inbox/2") == ["inbox/2.json"]
    inbox.written()
    assert inbox.take() == InboxOrders() and list((tmp_path / "inbox").glob("*.json")) == []


@pytest.mark.parametrize("remote", [False, True])
def test_an_order_to_stop_stays_until_the_journal_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    """A driver that dies before leaves it to the next one; a drill would happen twice."""
    monkeypatch.setattr("elastic.worker.hosting.inbox.REMOTE_EVERY_S", 0.01)
    monkeypatch.setattr(LocalStorage, "remote", remote)
    storage = open_storage(str(tmp_path))
    storage.put("inbox/1.json", json.dumps({"stop": "enough"}).encode())
    dies, inbox = Inbox(storage), Inbox(storage)
    for one in (dies, inbox):
        assert until(lambda one=one: one.take().stop, "the order") == "enough"
        one.take()
        assert storage.list("inbox/") == ["inbox/1.json"]
    dies.close()
    if dies._thread is not None:
        dies._thread.join()
    drilled(inbox, storage, "inbox/2.json")
    inbox.written()
    if remote:  # where its line comes later
        drilled(inbox, storage, "inbox/3.json")
        inbox.written(stored=True)
    inbox.close()
    assert storage.list("inbox/") == []


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("remote", [False, True])
def test_a_person_who_starts_the_run_means_it_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool, typed: bool
) -> None:
    """On object storage the order to stop that the driver before has heard lies there still."""
    monkeypatch.setattr("elastic.worker.hosting.inbox.REMOTE_EVERY_S", 0.01)
    monkeypatch.setattr(LocalStorage, "remote", remote)
    storage = Harmed(tmp_path)
    find_runs.order(storage, {"stop": "before"})
    find_runs.order(storage, {"profile": {"profile_id": "p", "steps": 5, "ranks": "0"}})
    find_runs.order(storage, {"drill": {"kill": "any"}})
    storage.faults = {"get": OSError(errno.EIO, "not now")}
    inbox = Inbox(storage, time.time() if typed else None)
    assert inbox.take() == InboxOrders()
    storage.faults = {}
    found: list[InboxOrders] = []

    def taken() -> bool:
        found.append(inbox.take())
        return any(one.drills for one in found)  # the youngest

    until(taken, "the drill")
    assert any(one.drills for one in found)
    assert [one.stop for one in found if one.stop] == ([] if typed else ["before"])
    assert any(one.profiles for one in found) != typed
    if typed:
        until(lambda: storage.list("inbox/") == [], "their end")
    find_runs.order(storage, {"stop": "now"})
    assert until(lambda: inbox.take().stop, "the order") == "now"
    storage.put("inbox/1.json", json.dumps({"stop": "of a clock that is behind"}).encode())
    assert until(lambda: inbox.take().stop, "the order") == "of a clock that is behind"
    inbox.close()


def drilled(inbox: Inbox, storage: Storage, key: str) -> None:
    """It has been looked at, and no drill is left."""
    storage.put(key, ORDER)
    assert until(lambda: inbox.take().drills, "the drill") == ({"kill": "any"},)
    until(lambda: storage.list("inbox/") == ["inbox/1.json"], "the drill's end")


def test_the_reason_of_a_stop_is_one_printable_line(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    reason = "\x1b]0;x\x07 enough\n" + "so " * 9999
    storage.put("inbox/1.json", json.dumps({"stop": reason}).encode())
    stop = Inbox(storage).take().stop
    assert stop is not None and stop.startswith("\\x1b]0;x\\x07 enough so so ")
    assert stop.isprintable() and len(stop) < 500


def test_a_profile_is_an_order_as_well(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    asked = {"profile_id": "p-1", "steps": 5, "ranks": "0,3"}
    storage.put("inbox/1.json", json.dumps({"profile": asked}).encode())
    for n, wrong in enumerate(NO_PROFILES):
        text = json.dumps({"profile": {**asked, **wrong}}).encode()
        storage.put(f"inbox/2-{n}.json", text)
    inbox = Inbox(storage)
    assert inbox.take() == InboxOrders(profiles=(ProfileAsked("p-1", 5, "0,3"),))
    assert len(why_rejected(storage)) == len(NO_PROFILES)


NO_PROFILES: tuple[dict[str, object], ...] = (
    {"steps": 0}, {"steps": 101}, {"steps": "5"}, {"steps": True}, {"ranks": "0,"},
    {"ranks": "some"}, {"ranks": [0]}, {"ranks": "-1"}, {"ranks": "9" * 7}, {"profile_id": "../x"},
    {"profile_id": ""}, {"profile_id": "x" * 65}, {"more": 1},
)  # fmt: skip


def why_rejected(storage: Storage) -> dict[str, str]:
    return {key: json.loads(storage.get(key))["why"] for key in storage.list("inbox/rejected/")}


def test_an_order_that_cannot_be_removed_is_given_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    storage.put("inbox/1.json", json.dumps({"drill": {"kill": "any"}}).encode())
    storage.put("inbox/2.json", json.dumps({"stop": "enough"}).encode())

    def broken(key: str) -> None:
        raise OSError("out of reach")

    inbox = Inbox(storage)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "delete", broken)
        orders = inbox.take()
        assert (len(orders.drills), orders.stop) == (1, "enough")
        inbox.written()
        assert inbox.take() == InboxOrders()
    assert inbox.take() == InboxOrders() and storage.list("inbox/") == []


ORDER = json.dumps({"drill": {"kill": "any"}}).encode()
NO_ORDERS = {
    "deep": b"[" * 200_000,
    "deep order": b'{"drill":' * 50_000,
    "endless deadline": b'{"drill": {"notice": "any", "deadline_s": 1e999}}',
    "no number": b'{"drill": {"slow": "any", "factor": NaN}}',
    "a deadline of years": b'{"drill": {"notice": "any", "deadline_s": 1e12}}',
    "a step of 40 digits": b'{"drill": {"kill": "any", "at_step": %d}}' % 10**40,
    "a rank of 5000 digits": b'{"drill": {"kill": "rank:%s"}}' % (b"9" * 5000),
    "long": json.dumps({"stop": "x" * MOST_BYTES}).encode(),
    "no text": b'{"stop": {"why": "so"}}',
    "not utf-8": b"\xff\xfe{",
    "empty": b"",
}


@pytest.mark.parametrize("text", NO_ORDERS.values(), ids=NO_ORDERS)
def test_what_is_no_order_is_refused_and_the_next_one_is_taken(tmp_path: Path, text: bytes) -> None:
    storage = open_storage(str(tmp_path))
    storage.put("inbox/1.json", text)
    storage.put("inbox/2.json", ORDER)
    inbox = Inbox(storage)
    assert inbox.take().drills == ({"kill": "any"},)
    assert (
        list(why_rejected(storage)) == ["inbox/rejected/1.json"]
        and not (tmp_path / "inbox/1.json").exists()
    )


@pytest.mark.parametrize("kind", ["dangling link", "pipe", "backslash", "not utf-8", "loop"])
def test_a_file_that_cannot_be_an_order_is_refused_and_said_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path))
    storage.put("inbox/2.json", ORDER)
    folder = tmp_path / "inbox"
    match kind:
        case "dangling link":
            (folder / "1.json").symlink_to("nothing")
        case "pipe":
            os.mkfifo(folder / "1.json")
        case "backslash":
            (folder / "1\\.json").write_bytes(ORDER)
        case "not utf-8":
            (folder / os.fsdecode(b"1\xff.json")).write_bytes(b"{")
        case "loop":
            (folder / "1.json").symlink_to("1.json")
    inbox = Inbox(storage)
    taken = [drill for _ in range(5) for drill in inbox.take().drills]
    assert taken == [{"kill": "any"}]
    assert caplog.text.count("is no order") == 1


class Harmed(LocalStorage):
    """A folder whose calls raise what stands in `faults`: method -> error."""

    faults: dict[str, OSError]

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.faults = {}

    def _fail(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]

    def get(self, key: str) -> bytes:
        self._fail("get")
        return super().get(key)

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        self._fail("put")
        return super().put(key, data, if_absent)

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        self._fail("list")
        return super().list(prefix, after)


def test_what_storage_does_not_answer_is_said_once_and_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Harmed(tmp_path)
    storage.put("inbox/1.json", ORDER)
    inbox = Inbox(storage)
    for method, number in (("list", errno.ESTALE), ("get", errno.EIO)):
        caplog.clear()
        storage.faults = {method: OSError(number, os.strerror(number))}
        assert [inbox.take() for _ in range(5)] == [InboxOrders()] * 5
        assert caplog.text.count(os.strerror(number)) == 1
    storage.faults = {}
    assert inbox.take().drills == ({"kill": "any"},)


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "not yours"), FileNotFoundError(errno.ENOENT, "just gone")],
)
def test_a_file_that_is_not_ours_to_read_or_has_just_gone_is_refused(
    tmp_path: Path, error: OSError
) -> None:
    storage = Harmed(tmp_path)
    storage.put("inbox/1.json", ORDER)
    storage.faults = {"get": error}
    inbox = Inbox(storage)
    assert inbox.take() == InboxOrders()
    storage.faults = {}
    assert inbox.take() == InboxOrders() and storage.list("inbox/") == ["inbox/rejected/1.json"]


def test_a_full_disk_while_a_refusal_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = Harmed(tmp_path)
    storage.put("inbox/1.json", b"{")
    storage.put("inbox/2.json", ORDER)
    storage.faults = {"put": OSError(errno.ENOSPC, "No space left on device")}
    inbox = Inbox(storage)
    assert inbox.take().drills == ({"kill": "any"},)
    assert caplog.text.count("No space left on device") == 1 and storage.list("inbox/") == []


def test_the_thread_that_follows_the_inbox_survives_what_nobody_thought_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.worker.hosting.inbox.REMOTE_EVERY_S", 0.01)
    monkeypatch.setattr(Harmed, "remote", True)
    storage = Harmed(tmp_path)
    looked, looks = threading.Event(), []

    class Odd(Exception):
        """Not one of the package's, nor of Python's."""

    def odd(prefix: str = "") -> list[str]:
        looks.append(prefix)
        if len(looks) == 3:
            looked.set()
        raise Odd

    with monkeypatch.context() as patch:
        patch.setattr(storage, "list", odd)
        inbox = Inbox(storage)
        assert looked.wait(30)
    storage.put("inbox/1.json", ORDER)
    assert until(lambda: inbox.take().drills, "the order") == ({"kill": "any"},)
    inbox.close()


def test_a_drill_whose_mark_cannot_be_written_waits(tmp_path: Path) -> None:
    storage = Harmed(tmp_path)
    schedule = Schedule([{"at_step": 3, "kill": "any"}], storage)
    storage.faults = {"put": OSError(errno.ENOSPC, "No space left on device")}
    assert schedule.due(3) == []
    storage.faults = {}
    assert schedule.due(4) == [{"at_step": 3, "kill": "any"}]


def test_the_inbox_in_object_storage_is_looked_at_seldom_and_never_waited_for(
    s3: Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.worker.hosting.inbox.REMOTE_EVERY_S", 0.1)
    asked, answers, gave_up = threading.Event(), threading.Event(), threading.Event()

    def hold(line: str) -> None:
        asked.set()
        if not answers.wait(30):
            gave_up.set()

    proxy.before = hold
    inbox = Inbox(s3)
    begun_s = time.monotonic()
    assert asked.wait(60)
    assert inbox.take() == InboxOrders() and not gave_up.is_set(), "it has waited for storage"
    answers.set()
    for n in range(3):
        s3.put(f"inbox/{n}.json", json.dumps({"drill": {"kill": f"n{n}"}}).encode())
    found: list[object] = []
    until(
        lambda: found.extend(entry["kill"] for entry in inbox.take().drills) or len(found) >= 3,
        "the orders",
    )
    assert found == ["n0", "n1", "n2"]
    s3.put("inbox/9.json", json.dumps({"stop": "enough"}).encode())
    until(lambda: inbox.take().stop == "enough", "the order to stop")
    assert len(proxy.seen) < 20 + 10 * (time.monotonic() - begun_s)
    inbox.close()
    until(
        lambda: all(thread.name != "inbox" for thread in threading.enumerate()),
        "the end of who asks",
    )
