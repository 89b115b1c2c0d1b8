"""Somebody else fills the disk under a run: it trains on, and what it owes is written when there is
room again."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.e2e.shell import PROGRAMS, Shell, last_line
from support.storage.small_disk import mounted
from support.waiting import until

from elastic.ledger.journal import read
from elastic.ledger.lease import Times
from elastic.policy.copies.retention import COPY_TRIES
from elastic.types import CopyFailed, DriverStarted, StepDone, StopAsked

pytestmark = [pytest.mark.e2e, pytest.mark.whole]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "120m") as disk:
        yield disk


def fill(disk: Path) -> Path:
    """To the last byte."""
    waste = disk / "waste"
    with waste.open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return waste


def step(journal: Path) -> int:
    found = [
        event.step
        for line in read(journal)
        for _, event in line.events
        if isinstance(event, StepDone)
    ]
    return max(found, default=0)


@pytest.mark.parametrize("room_again", [True, False])
def test_a_full_disk(shell: Shell, small_disk: Path, room_again: bool) -> None:
    job = {
        "steps": 100,
        "storage": str(small_disk),
        "durable_every": 10,
        "program": str(PROGRAMS / "tiny_slow.py"),
    }
    name = shell.job(**job, orphan_lease_s=900.0 if room_again else 4.0)
    run = small_disk / "full"
    journal = run / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "full", "--json")
    try:
        until(
            lambda: list(run.glob("checkpoints/*/commit.json")) != [], what="the first checkpoint"
        )
        waste = fill(small_disk)
        size = journal.stat().st_size
        if room_again:
            filled_s = time.monotonic()
            until(
                lambda: time.monotonic() - filled_s > Times().ttl_s + 3.0,
                what="the end of the lease",
            )
            assert process.poll() is None, process.communicate()
            assert journal.stat().st_size - size < 4096
            waste.unlink()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert "Traceback" not in err and err.count("No space left on device") >= 1, err
    if room_again:
        assert process.returncode == 0, (out, err)
        found = last_line(out)
        assert (found["outcome"], found["steps"], found["samples_exact"]) == (
            "succeeded",
            100,
            True,
        )
        assert step(journal) == 100
        return
    assert process.returncode == 1, (out, err)
    lines = [line for line in err.splitlines() if line.startswith("elastic: ")]
    assert len(lines) == 1 and "No space left on device" in lines[0], err
    waste.unlink()
    code, out, err = shell.call("run", name, "--run-name", "full", "--json")
    assert code == 0, err
    assert last_line(out)["samples_exact"] is True


def all_of(journal: Path, kind: type) -> list[Any]:
    return [e for line in read(journal) for _, e in line.events if isinstance(e, kind)]


def leave_little(run: Path, disk: Path) -> Path:
    """Once a first checkpoint is stored: there is room for lines of the journal alone."""
    until(lambda: [*run.glob("checkpoints/*/commit.json")] != [], what="the first checkpoint")
    waste = fill(disk)
    with waste.open("ab") as file:
        file.truncate(waste.stat().st_size - (96 << 10))
    return waste


def test_a_disk_without_room_for_the_last_checkpoint(shell: Shell, small_disk: Path) -> None:
    """Lines of the journal still fit. It is tried more often than three times, and no step is done
    twice."""
    name = shell.job(
        steps=20, storage=str(small_disk), durable_every=10,
        program=str(PROGRAMS / "tiny_slow.py"),
    )  # fmt: skip
    run = small_disk / "late"
    journal = run / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "late", "--json")
    events = partial(all_of, journal)

    try:
        waste = leave_little(run, small_disk)
        until(
            lambda: len([e for e in events(CopyFailed) if e.step == 20]) > COPY_TRIES,
            what="more tries than that", within_s=240.0,
        )  # fmt: skip
        waste.unlink()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in err, (out, err)
    assert [e.step for e in events(StepDone)] == [*range(1, 21)]
    assert len(events(DriverStarted)) == 1
    reasons = [line.decision.reason for line in read(journal) if line.decision is not None]
    assert any("and so on for 900 s (orphan_lease_s)" in reason for reason in reasons)


def test_a_stop_while_the_disk_has_no_room_for_its_checkpoint(
    shell: Shell, small_disk: Path
) -> None:
    """It is tried again from memory until there is room, and the run ends with it."""
    name = shell.job(
        steps=100_000, storage=str(small_disk), durable_every=10,
        program=str(PROGRAMS / "tiny_slow.py"),
    )  # fmt: skip
    run = small_disk / "late"
    journal = run / "journal.jsonl"
    process = shell.start("run", name, "--run-name", "late")
    events = partial(all_of, journal)

    try:
        waste = leave_little(run, small_disk)
        process.send_signal(signal.SIGTERM)
        until(lambda: len(events(StopAsked)) > 0, what="the wish to stop")
        n_before = len(events(CopyFailed))
        until(lambda: len(events(CopyFailed)) > n_before + 1, what="a second try", within_s=240.0)
        waste.unlink()
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 3 and "Traceback" not in err, (out, err)
    last = events(StepDone)[-1].step
    assert f"signal SIGTERM; step {last} reached, last checkpoint at step {last}" in err
    reasons = [line.decision.reason for line in read(journal) if line.decision is not None]
    assert any("and so on for 900 s (orphan_lease_s)" in reason for reason in reasons)
    code, out, _ = shell.here("replay", str(run), "--json")
    assert code == 0 and '"identical": true' in out
