"""A run whose driver is killed comes back by itself."""

from __future__ import annotations

import os
import signal

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.waiting import until

from elastic.cluster.ray import processes
from elastic.ledger.lease import newest
from elastic.storage import open_storage


# when it is started again: tests/api/running/test_supervise.py; that the next driver goes on where
# the killed one was: test_numbers_told.py
@pytest.mark.e2e
@pytest.mark.whole
def test_a_driver_that_is_killed_is_started_again(shell: Shell) -> None:
    name = shell.job(
        steps=60, layout="dp_shard=1", durable_every=10, program=str(PROGRAMS / "tiny_slow.py")
    )
    folder = shell.root / "elastic_runs" / "one"
    process = shell.start("run", name, "--run-name", "one", "--json", "--supervise")
    try:
        until(
            lambda: list(folder.glob("checkpoints/*/commit.json")) or process.poll() is not None,
            "a checkpoint",
        )
        assert process.poll() is None, process.communicate()[1]
        sign = newest(open_storage(folder))
        assert sign is not None and sign.pid in processes.descendants(process.pid)
        os.kill(sign.pid, signal.SIGKILL)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "the driver was killed by SIGKILL; it is started again in 5 s" in err
    found = last_line(out)
    assert found["steps"] == 60
    assert found["samples_exact"] is True, (
        "also where a copy was there of steps that the killed driver had not written down"
    )
    assert shell.status("one")["phase"] == "succeeded"
