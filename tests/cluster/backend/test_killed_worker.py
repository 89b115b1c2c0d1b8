"""What a run says of a worker process that somebody has killed: who it was and by which signal; what
it printed last stands as that, not as the cause."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.backend.ray_backend import RayBackend
from elastic.cluster.workers.worker_group import UNTOLD, BrokenWorker
from elastic.types import Layout, NodeLoadSeen, Plan, WorkerId

RANKS = (WorkerId("n1", 0), WorkerId("n2", 0))
GONE = f"its process is gone: {UNTOLD}"
LIKE = (
    ", as after SIGKILL by somebody or by the kernel's out-of-memory killer (dmesg on n2 names it), "
    "or after a crash"
)
GIB = 1 << 30


def said(
    folder: Path,
    number: int,
    printed: str = "step 3\nsaved\nstep 4: loss 2.1\n",
    load: NodeLoadSeen | None = None,
) -> str:
    """Of rank 1. `number`: of the signal, as the embedded cluster knows it. `load`: of its node."""
    (folder / "n2-0-71.log").write_text(printed)
    backend: Any = object.__new__(RayBackend)
    backend.run = SimpleNamespace(logs=str(folder))
    backend.cluster = SimpleNamespace(killed_by={71: number}.__getitem__, errors_of=lambda pid: "")
    backend._plan = Plan(3, Layout(dp_shard=2), RANKS, (4, 4), (4,))
    backend.provider = SimpleNamespace(ray_id=lambda node_id: None)
    backend.survey = SimpleNamespace(suspect=lambda ids: None)
    backend._end, backend._loads = lambda workers: None, {}
    if load is not None:
        backend._follow(load)
    (failed,) = backend._broke(BrokenWorker(RANKS[1], "process", GONE, 71))
    assert (failed.worker, failed.kind) == (RANKS[1], "process")
    return str(failed.error)


def test_the_signal_and_the_rank_are_told(tmp_path: Path) -> None:
    assert said(tmp_path, signal.SIGKILL) == (
        'its process (rank 1) was killed by signal 9 (SIGKILL); its last lines: "step 3 | saved | '
        'step 4: loss 2.1"'
    )


@pytest.mark.parametrize(
    ("printed", "behind"), [("", ""), ("step 4\n", '; its last lines: "step 4"')]
)
def test_where_no_signal_is_known_it_is_said_what_ends_a_process_so(
    tmp_path: Path, printed: str, behind: str
) -> None:
    assert said(tmp_path, 0, printed) == GONE + LIKE + behind


def test_how_much_memory_its_host_had_is_said_beside_it(tmp_path: Path) -> None:
    load = NodeLoadSeen("n2", 0.5, GIB // 4, 64 * GIB, GIB)
    seen = "; its host had 256 MiB of 64.0 GiB free when it was last looked at"
    assert said(tmp_path, 0, "", load) == GONE + LIKE + seen


def test_a_crash_that_it_wrote_of_is_told_as_one(tmp_path: Path) -> None:
    crash = "Fatal Python error: Segmentation fault"
    assert said(tmp_path, signal.SIGSEGV, f"step 4\n{crash}\n") == (
        f"its process (rank 1) was killed by signal 11 (SIGSEGV); it wrote: {crash}"
    )
    assert said(tmp_path, 0, f"step 4\n{crash}\n") == f"{GONE}; it wrote: {crash}"
