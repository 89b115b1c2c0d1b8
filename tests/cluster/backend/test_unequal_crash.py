"""A worker that gloo has ended since its script and another's were in different calls: the call is
named, by what both had kept in their files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.workers.output import CALLS, file_of
from elastic.cluster.workers.worker_group import BrokenWorker
from elastic.types import Layout, Plan, WorkerFailed, WorkerId
from elastic.worker.process.call_log import CallLog

RANKS = (WorkerId("n1", 0), WorkerId("n1", 1))
PIDS = dict(zip(RANKS, (70, 71), strict=True))
GLOO = "[enforce fail at /a/pair.cc:456] 20 vs 10. Is there a distributed collective mismatch in your code?"


def kept(folder: Path, pid: int, n_calls: int, generation: int = 3) -> None:
    log = CallLog()
    worker = next(worker for worker in PIDS if PIDS[worker] == pid)
    log.keep_in(file_of(folder, str(worker), pid, end=CALLS))
    log.enter(generation)
    log.begin(18)
    for _ in range(n_calls):
        log.add("run.model", sys._getframe())
    log.add("run.backward", sys._getframe())


def failures(folder: Path, died_of: str) -> list[tuple[str, str]]:
    """Of rank 1, which has died."""
    (folder / "n1-1-71.log").write_text(f"Unhandled exception: x. what(): {died_of} /r.so(+1)\n")
    backend: Any = object.__new__(RayBackend)
    backend.run, backend.cluster = SimpleNamespace(logs=str(folder)), None
    backend._plan = Plan(3, Layout(dp_shard=2), RANKS, (4, 4), (4,))
    backend.worker_group = SimpleNamespace(pid=PIDS.__getitem__, end=lambda workers: None)
    backend.provider = SimpleNamespace(ray_id=lambda node_id: None)
    backend.survey = SimpleNamespace(suspect=lambda ids: None)
    backend._end = lambda workers: None
    events = backend._broke(
        BrokenWorker(RANKS[1], "process", "its process is gone", PIDS[RANKS[1]])
    )
    return [(event.kind, event.error) for event in events if isinstance(event, WorkerFailed)]


def test_the_call_is_named(tmp_path: Path) -> None:
    kept(tmp_path, 70, 2)
    kept(tmp_path, 71, 1)
    (program, said), (process, _) = failures(tmp_path, GLOO)
    assert (program, process) == ("program", "process")
    assert said.startswith(f"step 10: rank 0 calls run.model at {__file__}, line ")


@pytest.mark.parametrize("how", ["killed", "the same calls", "no file", "another generation"])
def test_no_line_is_said_where_nothing_is_known(tmp_path: Path, how: str) -> None:
    kept(tmp_path, 70, 2)
    if how != "no file":
        n = 2 if how == "the same calls" else 1
        kept(tmp_path, 71, n, 2 if how == "another generation" else 3)
    found = failures(tmp_path, "out of memory" if how == "killed" else GLOO)
    unlike = [] if how == "killed" else ["mismatch"]
    assert [kind for kind, _ in found] == [*unlike, "process"]
    assert all("20 vs 10. Is there" in said and "pair.cc" not in said for _, said in found[:-1])
    line = f"; its script had come to {__file__}, line "
    assert [line in said for _, said in found[:-1]] == [how == "the same calls"] * len(unlike)
