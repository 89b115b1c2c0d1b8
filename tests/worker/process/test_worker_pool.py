"""The processes that tests share: one that has died fails the test in which it did, and no
other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.waiting import until
from support.worker.worker_pool import Call, Pool

from elastic.types import NodePrepared, WorkerId
from elastic.worker.hosting.served_session import Opening, Said
from elastic.worker.process.beat import Beat


class Answers:
    """A worker that is ready at once, and hangs up when it is told to go."""

    def __init__(self, put: Any) -> None:
        self.put, self.opened = put, Opening(0, WorkerId("", 0), {}, "")

    def __call__(self, word: Any) -> None:
        if isinstance(word, Opening):
            self.opened = word
        elif isinstance(word, Call):
            os.closerange(3, 256)
            threading.Event().wait()  # sleeps: for ever, as a process that hangs in its end
        else:
            prepared = ((1, NodePrepared(self.opened.me.node_id)),)
            self.put(Said(self.opened.serial, Beat(prepared, 0, "idle", 0, 0, 0)))


class ReadyPool(Pool):
    served: ClassVar[type] = Answers


@pytest.fixture
def ready() -> Iterator[ReadyPool]:
    pool = ReadyPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("how", ["killed", "killed and seen", "hangs up"])
def test_a_process_that_has_died_is_started_anew_when_the_pool_is_opened(
    ready: ReadyPool, tmp_path: Path, how: str
) -> None:
    workers = ready.open({}, tmp_path)
    ready.stores[1] = None  # a generation runs, and is aborted
    pids = list(ready.pids)
    if how == "hangs up":
        ready.call(workers[0], "go")
    else:
        ready.kill(workers[0])

    def seen() -> bool:
        ready.drain()
        return ready.hosted.processes[0].pipe.closed

    if how != "killed":
        until(seen, "the end of its pipe")
    with pytest.raises(AssertionError, match=r"no answer .*died: \['node0/0'\]"):
        ready.wait(lambda: False, "answer", 0.0)
    ready.open({}, tmp_path)
    assert ready.pids[0] != pids[0] and ready.pids[1] == pids[1]
    assert (
        all(process.is_alive() for process in ready.processes)
        and len(ready.events(NodePrepared)) == 2
    )
