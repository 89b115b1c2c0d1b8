"""Rank 0 lives by its connections and says nothing any more: stopped, or on a host that hangs."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.waiting import until
from support.worker.torchrun import SLOW, command, job, losses, ranks_of, started

from elastic.config.job import load_job
from elastic.types import FailureKind, WorkerFailed, WorkerId
from elastic.worker.hosting.served_session import Said
from elastic.worker.standalone.rank_link import EndOfRun, SignOfLife, StandaloneResult
from elastic.worker.standalone.standalone_run import (
    ALIVE_EVERY_S,
    StandaloneOptions,
    StandaloneRun,
    _live,
)

ME = WorkerId("node-0", 1)
RANK_1 = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500"}  # fmt: skip
SAID = "rank 0 has given no sign of life for 700 s (orphan_lease_s): its process is stopped"


@dataclass
class Link:
    """What rank 0 says, one after the other; then it is silent, and nobody has hung up."""

    words: list[Any]
    waited_s: list[float] = field(default_factory=list)

    def poll(self, wait_s: float) -> bool:
        self.waited_s.append(wait_s)
        return bool(self.words)

    def recv(self) -> Said:
        return Said(0, self.words.pop(0))


def followed(folder: Path, link: Link, failure: WorkerFailed | None = None) -> Any:
    """Rank 1, and how its run has ended."""
    spec = load_job(job(folder, orphan_lease_s=700.0))
    run = StandaloneRun(spec, StandaloneOptions(storage=str(folder / "runs")), RANK_1)
    run._failure = failure
    meeting = SimpleNamespace(links=(link,), worker=ME)
    return run, run._followed(cast(Any, meeting), cast(Any, SimpleNamespace(closed=True)))


def test_the_others_leave_a_rank_0_that_is_stopped(tmp_path: Path) -> None:
    link = Link([SignOfLife(), SignOfLife()])
    run, ended = followed(tmp_path, link)
    assert ended.outcome == "failed" and ended.reason.startswith(SAID)
    assert link.waited_s == [700.0] * 3, "from each sign of life anew"
    assert not run.peer_is_gone, "who else would say it"


def test_while_it_gives_signs_of_life_its_word_is_waited_for(tmp_path: Path) -> None:
    result = StandaloneResult("tiny", "succeeded", "all 12 steps are done", 12)
    _, ended = followed(tmp_path, Link([*[SignOfLife()] * 5, EndOfRun(result)]))
    assert ended == result


@pytest.mark.parametrize(("kind", "own"), [("program", True), ("collective", False)])
def test_what_has_failed_here_before_is_said_unless_it_comes_of_that(
    tmp_path: Path, kind: FailureKind, own: bool
) -> None:
    failure = WorkerFailed(ME, 1, kind, "it waited in vain")
    _, ended = followed(tmp_path, Link([]), failure)
    assert (ended.reason == "it waited in vain") is own
    assert ended.reason.startswith(SAID) is not own


def test_rank_0_gives_signs_of_life_to_all_that_are_there() -> None:
    given: list[Any] = []
    waits = iter([False, False, True])

    def gone(word: Any) -> None:
        raise OSError("handle is closed")

    def wait(seconds: float) -> bool:
        assert seconds == ALIVE_EVERY_S < 700.0 / 10
        return next(waits)

    others = [SimpleNamespace(send=gone), SimpleNamespace(send=given.append)]
    _live(cast(Any, others), cast(Any, SimpleNamespace(wait=wait)))
    assert given == [SignOfLife()] * 2


@pytest.mark.whole
def test_torchrun_ends_when_its_rank_0_is_stopped(tmp_path: Path) -> None:
    folder = job(tmp_path, program=str(SLOW), steps=100_000, durable_every=0, orphan_lease_s=5.0)
    log = tmp_path / "log"
    with started(command(2, folder), log) as process:
        until(lambda: 3 in losses(log.read_text()) or process.poll() is not None, log.read_text)
        os.kill(ranks_of(process.pid)[0], signal.SIGSTOP)
        assert process.wait(300) == 1
    assert f"failed (rank 1): {SAID.replace('700', '5')}" in log.read_text()
