"""One driver per run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.storage.faulty_proxy import Fault, FaultyProxy, unavailable

from elastic.errors import SpecError
from elastic.ledger.holder import Machine, started
from elastic.ledger.lease import Lease, Sign, Times, newest
from elastic.storage import Storage, open_storage

QUICK = Times(renew_s=0.05, ttl_s=600.0)


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path))
    found: Storage = request.getfixturevalue("s3")
    return found


def put(storage: Storage, **changes: object) -> Sign:
    """A sign of life of a driver on another machine."""
    sign = replace(Sign(3, 7, "elsewhere", "other-boot", 4711, 1, time.time() - 100, time.time(), 0.3), **changes)  # type: ignore[arg-type]
    storage.put(sign.key, json.dumps(asdict(sign)).encode())
    return sign


def test_a_second_driver_is_refused_by_name_and_the_epoch_grows(storage: Storage) -> None:
    first = Lease(storage, "r", QUICK)
    assert (first.epoch, first.attached) == (1, False)
    with pytest.raises(SpecError, match=f"run 'r' is driven by process {os.getpid()} on .* since 20"):
        Lease(storage, "r", QUICK)
    first.release()
    second = Lease(storage, "r", QUICK)
    assert (second.epoch, second.attached) == (2, False)
    second.release()


def test_the_lease_is_renewed_by_new_objects_only(storage: Storage) -> None:
    lease = Lease(storage, "r", QUICK)
    deadline = time.monotonic() + 60
    while lease.sign.n < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


def test_one_that_is_patient_waits_for_a_driver_elsewhere_that_was_heard_of_just_now(storage: Storage) -> None:
    put(storage, at_s=time.time(), ttl_s=0.3)
    with pytest.raises(SpecError, match="driven by process 4711 on elsewhere"):
        Lease(storage, "r", QUICK)
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


def test_a_driver_whose_clock_is_behind_still_lives(storage: Storage) -> None:
    old = put(storage, at_s=time.time() - 1000, ttl_s=300.0)
    timer = threading.Timer(0.05, lambda: put(storage, n=old.n + 1, at_s=time.time() - 1000, ttl_s=300.0))
    timer.start()
    with pytest.raises(SpecError, match="elsewhere"):
        Lease(storage, "r", QUICK)
    timer.join()


def test_a_living_process_of_this_machine_that_was_held_up_is_refused(storage: Storage) -> None:
    """The machine stood still for longer than its time to live; it gives its next sign now."""
    me = {"boot": Machine.here().boot, "pid": os.getpid(), "started": started(os.getpid())}
    old = put(storage, at_s=time.time() - 1000, ttl_s=300.0, **me)
    timer = threading.Timer(0.05, lambda: put(storage, n=old.n + 1, ttl_s=300.0, **me))
    timer.start()
    with pytest.raises(SpecError, match="elsewhere"):
        Lease(storage, "r", QUICK)
    timer.join()


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
    deadline = time.monotonic() + 60
    while not lease.lost:
        assert time.monotonic() < deadline
        time.sleep(0.01)
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
    assert lease.epoch == 4 and time.monotonic() - begun_s >= 0.3  # it was watched for its time to live
    lease.release()


def test_a_living_driver_whose_clock_is_ahead_is_refused(storage: Storage) -> None:
    old = put(storage, at_s=time.time() + 3600, ttl_s=300.0)
    timer = threading.Timer(0.1, lambda: put(storage, n=old.n + 1, at_s=time.time() + 3600, ttl_s=300.0))
    timer.start()
    with pytest.raises(SpecError, match="run 'r' is driven by process 4711 on elsewhere"):
        Lease(storage, "r", QUICK)
    timer.join()


def test_storage_that_overwrites_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers do not know If-None-Match and answer 200."""
    put_always = type(storage).put
    monkeypatch.setattr(type(storage), "put", lambda self, key, data, if_absent=False: put_always(self, key, data))
    with pytest.raises(SpecError, match="overwrites what must not be"):
        Lease(storage, "r", QUICK)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_s3")
def test_a_holder_that_cannot_renew_lets_go_before_others_may_take_over(
    s3: Storage, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a request hangs, and it gets on when storage is back in time. The clock is the test's."""
    now_s = [1000.0]
    monkeypatch.setattr("elastic.ledger.lease.time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now_s[0]}))
    times = Times(renew_s=0.05, ttl_s=15.0)
    lease = Lease(s3, "r", times)
    proxy.faults.append(unavailable("lease/", times=12))
    now_s[0] += 10.0
    until(lambda: not proxy.faults[0].times and lease.sign.n > 1 and lease._since_s is None)
    assert not lease.lost
    proxy.faults.append(Fault("hang", "", times=10_000))
    until(lambda: proxy.seen[-1].fault == "hang")
    last = lease.sign
    now_s[0] += 14.0
    assert not lease.lost
    now_s[0] += 0.99
    assert lease.lost and lease.sign == last
    proxy.faults.clear()
    lease.release()


def test_a_renewal_whose_answer_is_lost_for_good_is_not_anothers(s3: Storage, proxy: FaultyProxy) -> None:
    lease = Lease(s3, "r", Times(renew_s=0.1, ttl_s=600.0))
    until(lambda: lease.sign.n >= 1)
    proxy.faults.append(Fault("lost", "PUT .*/lease/", times=5))  # all tries of one renewal
    until(lambda: not proxy.faults[0].times)
    n = lease.sign.n
    until(lambda: lease.sign.n > n + 2)
    assert not lease.lost
    lease.release()
    assert newest(s3).released  # type: ignore[union-attr]


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
