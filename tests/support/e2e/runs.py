"""Whole runs on the embedded cluster with the tiny program; elastic/scenarios judges them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from support.places import PROGRAMS
from support.reference import train_alone
from support.waiting import SHARE, until

from elastic import api
from elastic.data.order import digest, digest_text, sample_ids
from elastic.ledger.journal import Line, read
from elastic.observe.accounting.accounts import account
from elastic.program import load_program
from elastic.scenarios.check import TOLERANCE
from elastic.scenarios.judge import Undisturbed, before_acknowledged, survivors, wrong
from elastic.scenarios.kept_steps import events, plans
from elastic.types import DrillAsked

PROGRAM = PROGRAMS / "tiny_slow.py"
POOLS = [
    {
        "name": "spot",
        "market_type": "spot",
        "gpus_per_node": 2,
        "usd_per_node_h": 1.0,
        "max_nodes": 2,
        "notice_s": 20,
    },
    {
        "name": "on-demand",
        "market_type": "on-demand",
        "gpus_per_node": 2,
        "usd_per_node_h": 3.0,
        "max_nodes": 1,
    },
]
MARK = "ELASTIC_TEST_RUN"
# names a file: while it is there, the programs of the tests pause longer in each step
SLOW = "ELASTIC_TEST_SLOW"
# the node is left at once (a first transition is given 13 s and two steps); 8 s were too few under
# load
SOON_S = 12
BATCH, SEED, N_SAMPLES = 12, 3, 512  # of the tiny program


def job(folder: Path, steps: int, drill: list[dict[str, Any]], **more: Any) -> Path:
    """A job folder in `folder`."""
    spec = {
        "name": "tiny", "program": str(PROGRAM), "steps": steps, "global_batch": BATCH, "seed": SEED,
        "clip_grad_norm": 1.0, "peer_every": 4, "durable_every": 0, "pools": POOLS,
        "budget_usd": 1000, "drill": drill, "storage": str(folder / "runs"), **more,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return folder


def looks(journal: Path, ended: threading.Event, every_s: float) -> Iterator[list[Line]]:
    """The journal's lines again and again until `ended` is set; seldom where it is long: it is read
    from its start, beside a run that wants the cores."""
    wait_s = every_s
    while not ended.wait(wait_s):
        began_s = time.monotonic()
        yield read(journal) if journal.is_file() else []
        wait_s = max(every_s, (time.monotonic() - began_s) / SHARE)


def not_grown(lines: list[Line]) -> bool:
    """A drill has asked for a node, or cut one off, and no plan with it has been ordered yet."""
    asked = sum("add" in e.drill or "partition" in e.drill for e in events(lines, DrillAsked))
    return asked > sum(plan.cause == "growth" for plan in plans(lines))


@contextmanager
def slow_until_grown(
    journal: Path, slow: Path, awaited: Callable[[list[Line]], bool] = not_grown
) -> Iterator[None]:
    """While the journal says that a node is awaited, steps are slow: however long a node takes to
    start on this machine, the run is still at it. `slow`: the file that the nodes' SLOW names,
    unless they stand already."""
    ended = threading.Event()
    own = SLOW not in os.environ
    file = Path(os.environ.setdefault(SLOW, str(slow)))

    def follow() -> None:
        for lines in looks(journal, ended, 0.1):
            if awaited(lines):
                file.touch()
            else:
                file.unlink(missing_ok=True)

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        file.unlink(missing_ok=True)
        if own:
            del os.environ[SLOW]


@cache
def alone(steps: int) -> tuple[float, ...]:
    program = load_program(PROGRAM)
    return tuple(
        train_alone(program, {"seed": SEED, "global_batch": BATCH, "clip_grad_norm": 1.0}, steps)
    )


def run(folder: Path, name: str = "run") -> tuple[dict[str, Any], list[Line]]:
    """Runs the job to its end; gives its summary and its journal. Nothing that it started is
    left."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[MARK] = mark  # inherited by all that the run starts
    result = api.run(folder, options=api.Options(run_name=name, local=True, show=False))
    lines = read(result.folder / "journal.jsonl")
    said = lambda: f"the end of {[_command(pid) for pid in processes(mark)]}"  # noqa: E731
    until(lambda: not processes(mark), said, 60)
    return result.summary, lines


def processes(mark: str) -> set[int]:
    """Ids of the processes, other than this one, that carry the mark in their environment."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.add(int(name))
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    except OSError:
        return ""


def undisturbed(steps: int) -> Undisturbed:
    """The job of `job()` in one process, without elastic."""
    samples = [sample_ids(N_SAMPLES, BATCH, SEED, step=step) for step in range(steps)]
    digests = [digest_text(digest(ids)) for ids in samples]
    return Undisturbed(alone(steps), digests, TOLERANCE, compared=True)


def went_on_as_if_nothing_happened(summary: dict[str, Any], lines: list[Line], steps: int) -> None:
    """The judge finds nothing wrong, and the run itself says that its samples are exact."""
    found = wrong(lines, undisturbed(steps))
    assert not found, found
    assert summary["samples_exact"] is True


def lost_only_what_no_copy_had(transition: dict[str, Any], lines: list[Line]) -> None:
    """The run continued from memory, at the newest peer replica that stood in the journal when the
    plan was made, or later."""
    assert transition["source"] == "peer"
    (move,) = [m for m in account(lines).transitions if m.generation == transition["generation"]]
    assert before_acknowledged(move, lines) == 0, move


def survivors_kept_their_processes(lines: list[Line], killed: set[str]) -> None:
    """No worker of a node that was never killed was replaced or failed with its process."""
    found = survivors(lines, killed)
    assert found.verdict == "pass", found.why
