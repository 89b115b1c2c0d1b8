"""One driver per run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.storage.faulty_proxy import Fault, FaultyProxy, unavailable
from support.waiting import until

from elastic.errors import SpecError
from elastic.ledger.holder import Machine, started
from elastic.ledger.lease import MOST_EPOCH, Lease, Sign, Times, holder, newest
from elastic.storage import LocalStorage, Storage, open_storage

QUICK = Times(renew_s=0.05, ttl_s=600.0)


@pytest.fixture(params=["local", "s3", "gs", pytest.param("az", marks=pytest.mark.whole)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path))
    found: Storage = request.getfixturevalue(request.param)
    return found


def put(storage: Storage, **changes: object) -> Sign:
    """A sign of life of a driver on another machine."""
    sign = replace(
        Sign(3, 7, "elsewhere", "other-boot", 4711, 1, time.time() - 100, time.time(), 0.3),
        **changes,
    )  # type: ignore[arg-type]
    storage.put(sign.key, json.dumps(asdict(sign)).encode())
    return sign


def gives_signs(monkeypatch: pytest.MonkeyPatch, storage: Storage, **changes: object) -> None:
    """A driver on another machine, while somebody watches for its next sign of life."""
    watched = SimpleNamespace(
        **vars(time) | {"sleep": lambda seconds: put(storage, n=8, ttl_s=300.0, **changes)}
    )
    monkeypatch.setattr("elastic.ledger.lease.time", watched)


def test_a_second_driver_is_refused_by_name_and_the_epoch_grows(storage: Storage) -> None:
    first = Lease(storage, "r", QUICK)
    assert (first.epoch, first.attached) == (1, False)
    with pytest.raises(
        SpecError, match=f"run 'r' is driven by process {os.getpid()} on .* since 20"
    ):
        Lease(storage, "r", QUICK)
    first.release()
    second = Lease(storage, "r", QUICK)
    assert (second.epoch, second.attached) == (2, False)
    second.release()


def test_the_lease_is_renewed_by_new_objects_only(storage: Storage) -> None:
    lease = Lease(storage, "r", QUICK)
    until(lambda: lease.sign.n >= 3, "three signs")
    assert len(storage.list("lease/")) <= 2
    assert not lease.lost
    lease.release()
    after = newest(storage)
    assert after is not None
    assert after.released


def test_a_living_driver_elsewhere_is_refused(storage: Storage) -> None:
    put(storage, ttl_s=60.0)
    with pytest.raises(SpecError, match="process 4711 on elsewhere"):
        Lease(storage, "r", QUICK)


def test_one_that_is_patient_waits_for_a_driver_elsewhere_that_was_heard_of_just_now(
    storage: Storage,
) -> None:
    put(storage, at_s=time.time(), ttl_s=300.0)
    with pytest.raises(SpecError, match="driven by process 4711 on elsewhere"):
        Lease(storage, "r", QUICK)
    put(storage, at_s=time.time(), ttl_s=0.3)
    began_s = time.monotonic()
    lease = Lease(storage, "r", QUICK, patient=True)
    assert lease.epoch == 4 and time.monotonic() - began_s >= 0.3
    with pytest.raises(SpecError, match=f"driven by process {os.getpid()}"):
        Lease(storage, "r", QUICK, patient=True)
    lease.release()


def test_a_driver_elsewhere_is_replaced_after_expiry(storage: Storage) -> None:
    put(storage, at_s=time.time() - 10)
    lease = Lease(storage, "r", QUICK)
    assert (lease.epoch, lease.attached) == (4, True)
    lease.release()


def test_a_driver_whose_clock_is_behind_still_lives(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, at_s=time.time() - 1000, ttl_s=300.0)
    gives_signs(monkeypatch, storage, at_s=time.time() - 1000)
    with pytest.raises(SpecError, match="elsewhere"):
        Lease(storage, "r", QUICK)


def test_a_driver_that_looks_expired_by_this_clock_is_named_while_it_gives_signs(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock is a minute ahead."""
    put(storage, at_s=time.time() - 60, ttl_s=0.3)
    began_s = time.monotonic()
    assert holder(storage) == "" and time.monotonic() - began_s >= 0.3
    put(storage, at_s=time.time() - 60, ttl_s=15.0)
    assert holder(storage, patient=False) == ""
    gives_signs(monkeypatch, storage, at_s=time.time() - 60)
    assert holder(storage) == "process 4711 on elsewhere"


def test_a_driver_whose_last_sign_lies_far_ahead_is_watched_too(tmp_path: Path) -> None:
    """This machine's clock is half an hour behind: it may be long gone."""
    storage = open_storage(str(tmp_path))
    put(storage, at_s=time.time() + 1800, ttl_s=0.3)
    assert holder(storage) == ""
    put(storage, at_s=time.time() + 0.2, ttl_s=60.0)
    assert holder(storage) == "process 4711 on elsewhere", "at once"


def test_a_living_process_of_this_machine_that_was_held_up_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine stalled for longer than its time to live; it gives its next sign now."""
    me = {"boot": Machine.here().boot, "pid": os.getpid(), "started": started(os.getpid())}
    put(storage, at_s=time.time() - 1000, ttl_s=300.0, **me)
    gives_signs(monkeypatch, storage, **me)
    with pytest.raises(SpecError, match="elsewhere"):
        Lease(storage, "r", QUICK)


def test_a_dead_process_of_this_machine_is_replaced_at_once(storage: Storage) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    put(storage, boot=Machine.here().boot, pid=gone.pid, ttl_s=60.0)
    lease = Lease(storage, "r", QUICK)
    assert (lease.epoch, lease.attached) == (4, True)
    lease.release()


def test_a_process_id_that_was_used_again_is_not_the_driver(storage: Storage) -> None:
    put(storage, boot=Machine.here().boot, pid=os.getpid(), started=1, ttl_s=60.0)
    lease = Lease(storage, "r", QUICK)
    assert lease.epoch == 4
    lease.release()


def test_a_driver_that_was_replaced_learns_it(storage: Storage) -> None:
    lease = Lease(storage, "r", QUICK)
    put(storage, epoch=2, n=0)
    until(lambda: lease.lost, "the word that the lease is lost")
    lease.release()
    assert newest(storage).epoch == 2  # type: ignore[union-attr]


def test_of_several_that_take_over_one_wins(storage: Storage) -> None:
    put(storage, at_s=time.time() - 10)
    leases: list[Lease] = []
    refused: list[str] = []

    def take() -> None:
        try:
            leases.append(Lease(storage, "r", QUICK))
        except SpecError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(leases) == 1
    assert len(refused) == 5
    leases[0].release()


def test_a_dead_driver_whose_clock_was_ahead_is_replaced(storage: Storage) -> None:
    put(storage, at_s=time.time() + 3600)
    begun_s = time.monotonic()
    lease = Lease(storage, "r", QUICK)
    # it was watched for its time to live
    assert lease.epoch == 4 and time.monotonic() - begun_s >= 0.3
    lease.release()


def test_a_living_driver_whose_clock_is_ahead_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(storage, at_s=time.time() + 3600, ttl_s=300.0)
    gives_signs(monkeypatch, storage, at_s=time.time() + 3600)
    with pytest.raises(SpecError, match="run 'r' is driven by process 4711 on elsewhere"):
        Lease(storage, "r", QUICK)


def test_storage_that_overwrites_is_refused(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers do not know If-None-Match and answer 200."""
    put_always = type(storage).put
    monkeypatch.setattr(
        type(storage), "put", lambda self, key, data, if_absent=False: put_always(self, key, data)
    )
    with pytest.raises(SpecError, match="overwrites what must not be"):
        Lease(storage, "r", QUICK)


class Clock:
    """The lease's clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        own = {"monotonic": lambda: self.now_s, "clock_gettime": lambda clock: self.now_s}
        monkeypatch.setattr("elastic.ledger.lease.time", SimpleNamespace(**vars(time) | own))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


OUTAGE = Times(renew_s=0.05, ttl_s=15.0)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_s3")
def test_a_holder_that_cannot_renew_is_not_certain_before_others_may_take_over_and_has_lost_nothing(
    s3: Storage, proxy: FaultyProxy, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while a request hangs. When storage is back, however much later, it continues under its
    own epoch."""
    lease = Lease(s3, "r", OUTAGE)
    proxy.faults.append(unavailable("lease/", times=12))
    clock.now_s += 10.0
    until(
        lambda: not proxy.faults[0].times and lease.sign.n > 1 and lease.trouble is None,
        "signs after the faults",
    )
    assert lease.certain
    proxy.faults.append(Fault("hang", "", times=10_000))
    until(lambda: proxy.seen[-1].fault == "hang", "a request that hangs")
    last = lease.sign
    clock.now_s += 14.0
    assert lease.certain
    clock.now_s += 0.99
    assert not lease.certain and not lease.lost and lease.sign == last
    clock.now_s += 3600.0
    until(
        lambda: "training and changes of plan continue, the run's end waits" in caplog.text,
        "the word of the outage",
    )
    proxy.faults.clear()
    until(lambda: lease.certain, "certainty")
    assert lease.epoch == last.epoch and lease.sign.n > last.n and not lease.lost
    until(lambda: "answers again" in caplog.text, "the word that it is back")
    assert (
        caplog.text.count("changes of plan continue") == 1
        and caplog.text.count("answers again") == 1
    )
    lease.release()
    after = newest(s3)
    assert after is not None and (after.epoch, after.released) == (last.epoch, True)


class Cut(LocalStorage):
    """A folder that one driver does not reach while `cut` is set; `at_put`, `at_list`: called
    first."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.cut = False
        self.at_put: Callable[[], object] = lambda: None
        self.at_list: Callable[[], object] = lambda: None

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        if self.cut:
            raise OSError(errno.EIO, "Input/output error")
        self.at_list()
        return super().list(prefix, after)

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        if self.cut:
            raise OSError(errno.EIO, "Input/output error")
        self.at_put()
        return super().put(key, data, if_absent)


class Versioned(LocalStorage):
    """As a bucket that keeps versions: a list goes through what was removed, too, and finds none of
    it. `walked`: how many names the lists have gone through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.removed: list[str] = []  # in their order
        self.walked = 0

    def delete(self, key: str) -> None:
        super().delete(key)
        self.removed.append(key)

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        found = super().list(prefix, after)
        self.walked += len(found) + len(self.removed) - bisect_right(self.removed, after)
        return found


def test_a_renewal_of_a_lease_of_weeks_walks_over_no_sign_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    storage = Versioned(tmp_path)
    lease = Lease(storage, "r", Times(renew_s=600.0, ttl_s=1800.0))
    for n in range(1, 1001):
        assert lease._renewed() and lease.sign.n == n
    storage.walked = 0
    assert lease._renewed()
    assert storage.walked <= 2 < 1000 == len(storage.removed) - 1
    put(storage, epoch=2, n=0, ttl_s=0.01)
    assert not lease._renewed(), "a newer epoch is seen as before"
    lease.release()
    storage.walked = 0
    after = Lease(storage, "r", Times(renew_s=600.0, ttl_s=1800.0), patient=True)
    assert storage.walked < 1.5 * len(storage.removed), "one long list"
    assert after.epoch == 3 and storage.list("lease/") == [after.sign.key]
    after.release()


def out_of_reach(root: Path, clock: Clock) -> tuple[Cut, Lease]:
    """A lease whose storage has been away for longer than it lasts."""
    storage = Cut(root)
    lease = Lease(storage, "r", OUTAGE)
    storage.cut = True
    until(lambda: lease.trouble is not None, "the trouble")
    clock.now_s += 100.0
    return storage, lease


def test_one_that_was_taken_over_while_its_storage_was_away_learns_it(
    tmp_path: Path, clock: Clock
) -> None:
    storage, lease = out_of_reach(tmp_path, clock)
    assert not lease.lost and not lease.certain
    put(open_storage(str(tmp_path)), epoch=2, n=0)
    storage.cut = False
    until(lambda: lease.lost, "the word of the other")
    assert not lease.certain
    lease.release()
    assert newest(storage).epoch == 2  # type: ignore[union-attr]


def test_taken_over_between_its_look_and_its_sign_it_is_not_certain_for_a_moment(
    tmp_path: Path, clock: Clock
) -> None:
    storage, lease = out_of_reach(tmp_path, clock)
    was_certain: list[bool] = []
    storage.at_list = lambda: was_certain.append(lease.certain)
    storage.at_put = lambda: put(open_storage(str(tmp_path)), epoch=2, n=0)
    storage.cut = False
    until(lambda: lease.lost, "the word of the other")
    assert not any(was_certain), "it believed in its sign"


def test_who_takes_over_waits_for_a_holder_that_was_heard_again_at_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Cut(tmp_path)
    old = put(storage, at_s=time.time() - 10)
    slept: list[float] = []
    sleep = time.sleep  # sleeps: what the lease waits is what is looked at

    def noted(seconds: float) -> None:
        slept.append(seconds)
        sleep(seconds)  # sleeps: as above

    monkeypatch.setattr(
        "elastic.ledger.lease.time", SimpleNamespace(**vars(time) | {"sleep": noted})
    )

    def heard_again() -> None:
        storage.at_put = lambda: None
        put(storage, n=old.n + 1, ttl_s=0.7)

    storage.at_put = heard_again
    lease = Lease(storage, "r", QUICK)
    assert lease.epoch == 4 and slept[-1] == old.ttl_s
    lease.release()


def test_renewals_go_on_after_what_nobody_thought_of(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_storage(str(tmp_path))
    lease = Lease(storage, "r", OUTAGE)

    def unheard_of(prefix: str = "", after: str = "") -> list[str]:
        raise KeyError(prefix)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "list", unheard_of)
        until(lambda: isinstance(lease.trouble, KeyError), "the trouble")
    n = lease.sign.n
    until(lambda: lease.sign.n > n + 1, "two more signs")
    assert lease.certain
    lease.release()


def test_a_renewal_whose_answer_is_lost_for_good_is_not_anothers(
    s3: Storage, proxy: FaultyProxy
) -> None:
    lease = Lease(s3, "r", Times(renew_s=0.1, ttl_s=600.0))
    until(lambda: lease.sign.n >= 1, "a sign")
    proxy.faults.append(Fault("lost", "PUT .*/lease/", times=5))  # all tries of one renewal
    until(lambda: not proxy.faults[0].times, "the faults")
    n = lease.sign.n
    until(lambda: lease.sign.n > n + 2, "three signs more")
    assert not lease.lost
    lease.release()
    assert newest(s3).released  # type: ignore[union-attr]


def of(key: str, **changes: object) -> bytes:
    """A sign of life of a driver elsewhere that fits its name, but for `changes`."""
    whole = Sign(
        int(key[6:14]),
        int(key[15:23]),
        "elsewhere",
        "other-boot",
        4711,
        1,
        time.time(),
        time.time(),
        0.3,
    )
    return json.dumps({**asdict(whole), **changes}).encode()


STRANGER = "lease/00000900-00000900.json"  # the name of a newer epoch than any
STRANGERS = {
    "another name": ("lease/zzz.json", b"{}"),
    "no digits of ours": (
        "lease/\u0663\u0663\u0663\u0663\u0663\u0663\u0663\u0663-00000000.json",
        b"{}",
    ),
    "a huge epoch": ("lease/99999999-00000000.json", of("lease/99999999-00000000.json")),
    "a longer epoch": ("lease/999999999999-00000000.json", of(STRANGER, epoch=999999999999)),
    "nothing": (STRANGER, b""),
    "no text": (STRANGER, b"\xff\xfe"),
    "deep": (STRANGER, b"[" * 200_000),
    "a list": (STRANGER, b"[]"),
    "too little": (STRANGER, b'{"epoch": 900, "n": 900}'),
    "text for a number": (STRANGER, of(STRANGER, pid="4711")),
    "a number for text": (STRANGER, of(STRANGER, host=4711)),
    "lines for a name": (STRANGER, of(STRANGER, host="a\nb")),
    "a time to live for ever": (STRANGER, of(STRANGER, ttl_s=1e300)),
    "a time that is none": (STRANGER, of(STRANGER, since_s=float("nan"))),
    "a time beyond all calendars": (STRANGER, of(STRANGER, since_s=1e15)),
    "another's name": (STRANGER, of(STRANGER, epoch=901)),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_what_is_no_sign_of_life_ends_no_run_and_keeps_none_from_its_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """At a start, while a driver runs, and at the next start. It is told of once, by its name."""
    key, data = STRANGERS[what]
    storage = open_storage(str(tmp_path))
    storage.put(key, data)
    lease = Lease(storage, "r", QUICK)
    n = lease.sign.n
    until(lambda: lease.sign.n > n + 1, "two more signs")
    assert (lease.epoch, lease.certain, lease.lost, lease.trouble) == (1, True, False, None)
    lease.release()
    after = newest(storage)
    assert after is not None and (after.epoch, after.released) == (1, True)
    assert [repr(key) in record.getMessage() for record in caplog.records] == [True]


def test_links_and_folders_hide_no_driver(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    lease = Lease(storage, "r", QUICK)
    for epoch in range(100, 125):
        (tmp_path / f"lease/{epoch:08d}-00000000.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "lease/00000200-00000000.json").symlink_to("00000200-00000000.json")
    (tmp_path / "lease/00000300-00000000.json").mkdir()
    n = lease.sign.n
    until(lambda: lease.sign.n > n + 1, "two more signs")
    assert lease.certain and newest(storage).epoch == 1  # type: ignore[union-attr]
    with pytest.raises(SpecError, match=f"driven by process {os.getpid()}"):
        Lease(storage, "r", QUICK)
    put(storage, epoch=250, n=0)
    until(lambda: lease.lost, "the word of the newer epoch")


def test_names_that_are_taken_by_what_is_no_sign_of_life_are_left_out(
    tmp_path: Path, clock: Clock
) -> None:
    """Those that the driver would use next; it neither replaces them nor takes them for another
    driver."""
    storage = open_storage(str(tmp_path))
    for key in (
        "lease/00000001-00000000.json",
        "lease/00000002-00000000.json",
        "lease/00000003-00000001.json",
    ):
        storage.put(key, b"garbage")
    lease = Lease(storage, "r", OUTAGE)
    assert lease.epoch == 3 and not lease.attached
    storage.put("lease/00000003-00000006.json", b"garbage")
    until(lambda: lease.sign.n > 7, "signs beyond")
    assert lease.certain and storage.get("lease/00000003-00000006.json") == b"garbage"
    lease.release()


def test_another_driver_of_the_same_epoch_is_none_of_the_strangers(
    tmp_path: Path, clock: Clock
) -> None:
    storage = Cut(tmp_path)
    lease = Lease(storage, "r", OUTAGE)

    def twin() -> None:
        storage.at_put = lambda: None
        put(open_storage(str(tmp_path)), epoch=1, n=lease.sign.n + 1)

    storage.at_put = twin
    until(lambda: lease.lost, "the word of the other")


def test_where_all_epochs_are_gone_through_one_is_told_what_to_remove(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    put(storage, epoch=MOST_EPOCH, n=0, released=True)
    with pytest.raises(
        SpecError, match="epoch 1000000 is there, the last one: remove what is under it"
    ):
        Lease(storage, "r", QUICK)
