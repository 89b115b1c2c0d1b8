"""One driver per run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from elastic.cluster import processes
from elastic.cluster.lease import Lease, Sign, Times, newest
from elastic.errors import SpecError
from elastic.storage import Storage, open_storage

QUICK = Times(renew_s=0.05, ttl_s=0.3)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


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
    deadline = time.monotonic() + 5
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


def test_a_driver_elsewhere_is_replaced_after_expiry(storage: Storage) -> None:
    put(storage, at_s=time.time() - 10)
    lease = Lease(storage, "r", QUICK)
    assert (lease.epoch, lease.attached) == (4, True)
    lease.release()


def test_a_driver_whose_clock_is_behind_still_lives(storage: Storage) -> None:
    old = put(storage, at_s=time.time() - 10)
    timer = threading.Timer(0.05, lambda: put(storage, n=old.n + 1, at_s=time.time() - 10))
    timer.start()
    with pytest.raises(SpecError, match="elsewhere"):
        Lease(storage, "r", Times(renew_s=0.2, ttl_s=0.3))
    timer.join()


def test_a_dead_process_of_this_machine_is_replaced_at_once(storage: Storage) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    put(storage, boot=processes.Place.here().boot, pid=gone.pid, ttl_s=60.0)
    lease = Lease(storage, "r", QUICK)
    assert (lease.epoch, lease.attached) == (4, True)
    lease.release()


def test_a_process_id_that_was_used_again_is_not_the_driver(storage: Storage) -> None:
    put(storage, boot=processes.Place.here().boot, pid=os.getpid(), started=1, ttl_s=60.0)
    lease = Lease(storage, "r", QUICK)
    assert lease.epoch == 4
    lease.release()


def test_a_driver_that_was_replaced_learns_it(storage: Storage) -> None:
    lease = Lease(storage, "r", QUICK)
    put(storage, epoch=2, n=0)
    deadline = time.monotonic() + 5
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
