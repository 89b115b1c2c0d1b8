"""Storage that answers nothing for longer than the driver's lease: the run trains on, and continues
where storage is back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.storage.faulty_proxy import Fault, FaultyProxy, slow_down
from support.waiting import until

from elastic.ledger.journal import read
from elastic.ledger.lease import Times
from elastic.storage.s3 import S3Storage
from elastic.types import NodePrepared, PlanEntered, StepDone, WorkerFailed

AWAY_S, THROTTLED_S = 20.0, 10.0
STEPS = 150
pytestmark = [pytest.mark.e2e, pytest.mark.whole]


def events(journal: Path, kind: type) -> list[tuple[float, Any]]:
    lines = read(journal) if journal.is_file() else []
    return [
        (at_s, event) for line in lines for at_s, event in line.events if isinstance(event, kind)
    ]


def step(journal: Path) -> int:
    return max((event.step for _, event in events(journal, StepDone)), default=0)


def answers_nothing(proxy: FaultyProxy, process: subprocess.Popen[str], meanwhile: Any) -> None:
    """For AWAY_S; `meanwhile` is called once the lease has expired."""
    since_s = time.monotonic()
    proxy.faults.append(Fault("hang", "", times=1 << 30))
    until(lambda: time.monotonic() - since_s > Times().ttl_s + 1.0, what="the end of the lease")
    assert process.poll() is None, process.communicate()
    meanwhile()
    until(lambda: time.monotonic() - since_s > AWAY_S, what="the end of the outage")
    assert process.poll() is None, process.communicate()
    proxy.faults.clear()


@pytest.mark.parametrize("a_worker_dies", [False, True])
def test_an_embedded_run_outlives_an_outage_longer_than_its_lease(
    shell: Shell, s3: S3Storage, proxy: FaultyProxy, a_worker_dies: bool
) -> None:
    program = str(PROGRAMS / "tiny_slow.py")
    name = shell.job(steps=STEPS, storage=s3.uri, durable_every=5, peer_every=4, program=program)
    journal = shell.root / "elastic_runs" / "away" / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "away", "--json")
    before: list[int] = []

    def meanwhile() -> None:
        before.append(step(journal))
        if a_worker_dies:
            os.kill(events(journal, NodePrepared)[-1][1].pids[0], signal.SIGKILL)

    try:
        until(
            lambda: any("commit.json" in key for key in s3.list("away/checkpoints/")),
            what="the first checkpoint",
        )
        began = step(journal)
        answers_nothing(proxy, process, meanwhile)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    found = last_line(out)
    assert (found["outcome"], found["steps"], found["samples_exact"]) == ("succeeded", STEPS, True)
    assert before[0] > began, "it trained on while storage was away"
    assert "Traceback" not in err and "training continues" in err and "answers again" in err, err
    generations = {event.generation for _, event in events(journal, PlanEntered)}
    assert (len(generations) > 1) == a_worker_dies
    code, out, _ = shell.here("replay", f"{s3.uri}/away", "--json")
    assert code == 0 and '"identical": true' in out
    code, out, err = shell.here("checkpoint", "verify", f"{s3.uri}/away", "--json")
    assert code == 0, err


def test_ten_seconds_of_throttling_are_weather(
    shell: Shell, s3: S3Storage, proxy: FaultyProxy
) -> None:
    """From the first checkpoint on every request is told to slow down."""
    program = str(PROGRAMS / "tiny_slow.py")
    name = shell.job(steps=STEPS, storage=s3.uri, durable_every=5, peer_every=4, program=program)
    journal = shell.root / "elastic_runs" / "slow" / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "slow", "--json")
    try:
        until(
            lambda: any("commit.json" in key for key in s3.list("slow/checkpoints/")),
            what="the first checkpoint",
        )
        began, since_s = step(journal), time.monotonic()
        proxy.clear()
        proxy.faults.append(slow_down("", 1 << 30))
        until(lambda: time.monotonic() - since_s > THROTTLED_S, what="the end of the throttling")
        assert process.poll() is None, process.communicate()
        refused, later = sum(seen.fault == "error" for seen in proxy.seen), step(journal)
        proxy.faults.clear()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    found = last_line(out)
    assert (found["outcome"], found["steps"], found["samples_exact"]) == ("succeeded", STEPS, True)
    assert refused > 5 and later > began, "it trained on while storage throttled"
    assert "Traceback" not in err
    assert [event.generation for _, event in events(journal, PlanEntered)] == [1]
    code, out, err = shell.here("checkpoint", "verify", f"{s3.uri}/slow", "--json")
    assert code == 0 and STEPS in {item["step"] for item in json.loads(out)}, err


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_data_whose_storage_throttles_is_waited_for(
    shell: Shell, s3: S3Storage, proxy: FaultyProxy, loader_workers: int
) -> None:
    """Beyond what one request is retried: the run has its state in memory all the while."""
    s3.put("rows", b"x" * 512)
    shell.environment["ELASTIC_TEST_ROWS"] = s3.uri
    more = {"program": str(PROGRAMS / "tiny_stored.py"), "data": {"loader_workers": loader_workers}}
    name = shell.job(steps=60, durable_every=20, peer_every=4, **more)
    journal = shell.root / "elastic_runs" / "data" / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "data", "--json")
    try:
        until(lambda: step(journal) >= 10, what="the first steps")
        proxy.faults.append(slow_down("rows", 1 << 30))
        failed = "two generations that could not read"
        until(
            lambda: len({e.generation for _, e in events(journal, WorkerFailed)}) > 1, what=failed
        )
        assert process.poll() is None, process.communicate()
        proxy.faults.clear()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, (out, err)
    found = last_line(out)
    assert (found["outcome"], found["steps"], found["samples_exact"]) == ("succeeded", 60, True)
    told = [event for _, event in events(journal, WorkerFailed) if event.kind != "collective"]
    assert {event.kind for event in told} == {"storage"}
    assert any("the dataset failed at sample " in event.error for event in told), told
    resumed = [plan for plan in found["transitions"] if plan["generation"] > 1]
    assert resumed and {plan["source"] for plan in resumed} <= {"live", "peer"}, resumed
    assert all(plan["steps_lost"] == 0 for plan in resumed) and "Traceback" not in err
