"""Loader processes: each opens the job's data for itself, or is a copy of the worker that has the
dataset of a script, and reads the batches that it is asked for.

A process ends when its parent does: its pipe then has no other end. `python -m
elastic.data.loader_processes FD` is the process.
"""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from elastic.data import sample_draws
from elastic.data.batches import Unread, collated, stack_arrays
from elastic.data.budget import Microbatch
from elastic.data.sample_draws import SampleDraws
from elastic.errors import ProgramError
from elastic.types import Job
from elastic.version import own_path

GOODBYE_S = 2.0
LOOK_S = 1.0
POLL_S = 0.005


class LoaderLost(OSError):
    """A loader process is gone. What it was reading is not: another one reads it."""


class ReaderProcess(Protocol):
    """What a reader asks of a subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Reader:
    """One loader process, which opens the job's data. `load` may be called from any thread, one at
    a time; a process that is gone is started over by the next call. Raises LoaderLost, or Unread
    where the dataset raised."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._process: ReaderProcess | None = None
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
        self._process = self._started(theirs)
        theirs.close()
        ours.send_bytes(pickle.dumps(self._job, 5))
        self._pipe = ours

    def _started(self, pipe: Connection) -> ReaderProcess:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(own_path()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        module = "elastic.data.loader_processes"
        command = [sys.executable, "-P", "-m", module, str(pipe.fileno())]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(pipe.fileno(),), env=environment
        )

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


class CopiedReader(Reader):
    """One that is a copy of this process, with a dataset that no other process could make: a
    script's."""

    def __init__(self, job: Job, dataset: Any) -> None:
        self._dataset = dataset
        super().__init__(job)

    def _started(self, pipe: Connection) -> ReaderProcess:
        return CopiedProcess(partial(_serve_copied, pipe, self._dataset, os.getpid()))


class CopiedProcess:
    """A copy of this process (fork), as those of a DataLoader of torch are. `run` never returns."""

    def __init__(self, run: Callable[[], None]) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else it would be printed twice
        self._lock = threading.Lock()
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            run()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self._code = os.waitstatus_to_exitcode(status) if pid else None
                except ChildProcessError:  # somebody else has asked for all children
                    self._code = 1
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("a loader process", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Readers:
    """`n` loader processes for one worker, over all its generations."""

    def __init__(self, job: Job, n: int, start: Callable[[Job], Reader] = Reader) -> None:
        self.each = tuple(start(job) for _ in range(n))

    def close(self) -> None:
        for reader in self.each:
            reader.close()


def readers_of(job: Job, dataset: Any) -> Readers | None:
    """As many as the job asks for; None = the worker reads for itself. `dataset`: that the worker
    has opened."""
    n = job.data.loader_workers
    keep = Job(folder=job.folder, program=job.program, seed=job.seed, data=job.data)
    if n and job.script and not job.data.train:
        return Readers(keep, n, partial(CopiedReader, dataset=dataset))
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


def _serve(pipe: Connection, opened: Callable[[Job], Any] = _dataset) -> None:
    job = pickle.loads(pipe.recv_bytes())
    dataset, problem, draws = None, None, SampleDraws(job.seed)
    while True:
        if dataset is None and (problem is None or problem.kind is not ProgramError):
            try:
                dataset = opened(job)
            except Exception as error:  # noqa: BLE001 - a boundary: the answer to what is asked next
                problem = Unread.of(None, error)
        parts, step = pickle.loads(pipe.recv_bytes())
        answer: Any = problem
        if dataset is not None:
            try:
                answer = [draws.batch(dataset, part, _collate, step=step) for part in parts]
            except Unread as error:
                answer = Unread(error.sample, error.text, error.kind)
        pipe.send_bytes(pickle.dumps(answer, 5))


def _leave_with(parent: int) -> None:
    """A parent that was killed says no goodbye, and a dataset may hang."""
    gone = threading.Event()
    while not gone.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(0)


def _serve_until_left(serve: Callable[[], None], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        serve()
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone, or is done


def _serve_copied(pipe: Connection, dataset: Any, parent: int) -> None:
    """In a copy of the process `parent`, of whose threads this one alone is there."""
    try:
        gc.freeze()  # what the parent has left behind is not ended here
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _take_files(pipe.fileno())
        sample_draws.ONE_READS = threading.RLock()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        _serve_until_left(partial(_serve, pipe, lambda job: dataset), parent)
    except BaseException:  # noqa: BLE001 - a boundary: what follows in the stack is the parent's
        traceback.print_exc()
        os._exit(1)


def _take_files(keep: int) -> None:
    """Sockets and pipes stay the parent's, and end with it: here they are empty files, but for
    `keep` and what is printed. What is open for reading is read from a place of its own."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with suppress(OSError):  # that of the list is closed
            mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
            at = None
            if stat.S_ISREG(mode) and not flags & (os.O_WRONLY | os.O_RDWR):
                other, at = os.open(f"/proc/self/fd/{fd}", flags), os.lseek(fd, 0, os.SEEK_CUR)
            elif (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)) and fd > 2 and fd != keep:
                other = os.open(os.devnull, os.O_RDWR)
            else:
                continue
            if at is not None:
                os.lseek(other, at, os.SEEK_SET)
            os.dup2(other, fd, inheritable=False)
            os.close(other)


def main(fd: int) -> None:
    _serve_until_left(partial(_serve, Connection(fd)), os.getppid())


if __name__ == "__main__":
    from elastic.data import loader_processes

    loader_processes.main(int(sys.argv[1]))
