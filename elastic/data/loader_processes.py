"""Loader processes: each opens the job's data for itself, and reads the batches that it is asked
for.

A process ends when its parent does: its pipe then has no other end. `python -m
elastic.data.loader_processes FD` is the process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from elastic.data.batches import Unread, collated, stack_arrays
from elastic.data.budget import Microbatch
from elastic.data.sample_draws import SampleDraws
from elastic.errors import ProgramError
from elastic.types import Job

GOODBYE_S = 2.0
LOOK_S = 1.0


class LoaderLost(OSError):
    """A loader process is gone. What it was reading is not: another one reads it."""


class Reader:
    """One loader process, which opens the job's data. `load` may be called from any thread, one at
    a time; a process that is gone is started over by the next call. Raises LoaderLost, or Unread
    where the dataset raised."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def load(self, parts: Sequence[Microbatch], step: int) -> list[dict[str, Any]]:
        """The batch of each of these, for the step after `step` others, as arrays (or tensors,
        where the dataset gives tensors that NumPy has no type for)."""
        with self._lock:
            if self._closed:
                raise LoaderLost("the loader processes have been ended")
            if self._pipe is None:
                self._start()
            assert self._pipe is not None
            try:
                self._pipe.send_bytes(pickle.dumps((list(parts), step), 5))
                answer = pickle.loads(self._pipe.recv_bytes())
            except (EOFError, OSError) as error:
                raise LoaderLost(self._told()) from error
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def close(self) -> None:
        """For good; frees a `load` that waits."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        pipe, process, self._pipe, self._process = self._pipe, self._process, None, None
        if process is not None:
            process.kill()  # it keeps nothing
            process.wait()
        if pipe is not None:
            pipe.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        paths = [path for path in sys.path if path]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "elastic.data.loader_processes", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), env=environment
        )
        theirs.close()
        ours.send_bytes(pickle.dumps(self._job, 5))
        self._pipe = ours

    def _told(self) -> str:
        """What became of the process."""
        process = self._process
        if process is None:
            return "the loader processes were ended while they read a batch"
        with suppress(subprocess.TimeoutExpired):
            process.wait(GOODBYE_S)
        code, pid = process.poll(), process.pid
        self._drop()
        if code is None:
            return f"loader process {pid} has closed its pipe while it read a batch"
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        more = (
            "; was the node out of memory? (fewer data.loader_workers, less data.prefetch_mb)"
            if code == -9
            else ""
        )
        return f"loader process {pid} {how} while it read a batch{more}"


class Readers:
    """`n` loader processes for one worker, over all its generations."""

    def __init__(self, job: Job, n: int) -> None:
        self.each = tuple(Reader(job) for _ in range(n))

    def close(self) -> None:
        for reader in self.each:
            reader.close()


def readers_of(job: Job) -> Readers | None:
    """As many as the job asks for; None = the worker reads for itself. Raises ProgramError where no
    other process can."""
    n = job.data.loader_workers
    if n and job.script and not job.data.train:
        raise ProgramError(
            "data.loader_workers: the dataset stands in the script, which other processes do not "
            "run; take 0, or data.train"
        )
    keep = Job(folder=job.folder, program=job.program, seed=job.seed, data=job.data)
    return Readers(keep, n) if n else None


# ----------------------------------------------------------------------------------- in the process


def _dataset(job: Job) -> Any:
    """Without torch where the job names its data."""
    from elastic.data.open_datasets import dataset_of
    from elastic.program import Program, load_program

    if job.data.train:
        nothing = Program(model=_nothing, optimizer=_nothing, dataset=None, loss=_nothing)
        return dataset_of(nothing, job)
    return dataset_of(load_program(job.program), job)


def _nothing(*arguments: Any) -> None:
    """Stands where a Program has functions that no loader calls."""


def _collate(items: list[Any]) -> dict[str, Any]:
    if "torch" not in sys.modules:
        return collated(items, stack_arrays)
    from elastic.data.collate import collate

    found: dict[str, Any] = {}
    for key, value in collate(items).items():
        try:
            found[key] = value.numpy()
        except TypeError:  # bfloat16
            found[key] = value
    return found


def _serve(pipe: Connection) -> None:
    job = pickle.loads(pipe.recv_bytes())
    dataset, problem, draws = None, Unread(None, ""), SampleDraws(job.seed)
    try:
        dataset = _dataset(job)
    except Exception as error:  # noqa: BLE001 - a boundary: the answer to whatever is asked for
        problem = Unread.of(None, error)
    while True:
        parts, step = pickle.loads(pipe.recv_bytes())
        answer: Any = problem
        if dataset is not None:
            try:
                answer = [draws.batch(dataset, part, _collate, step=step) for part in parts]
            except Unread as error:
                answer = Unread(error.sample, error.text)
        pipe.send_bytes(pickle.dumps(answer, 5))


def _leave_with(parent: int) -> None:
    """A parent that was killed says no goodbye, and a dataset may hang."""
    gone = threading.Event()
    while not gone.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(0)


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_leave_with, args=(os.getppid(),), daemon=True).start()
    try:
        _serve(Connection(fd))
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone, or is done


if __name__ == "__main__":
    from elastic.data import loader_processes

    loader_processes.main(int(sys.argv[1]))
