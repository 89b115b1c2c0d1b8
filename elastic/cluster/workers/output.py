"""What a worker process prints, Python or not: into a file of its own, of bounded size; the lines
of rank 0 to the driver too.

The file stands at file descriptors 1 and 2 themselves, so that the last words of a process that
crashes are in it.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from elastic.config.masking import masked_text
from elastic.ledger.run_folder import OF_NODE
from elastic.text import LOG_MARK
from elastic.version import check_own

FILE_BYTES = 16 << 20  # then the file becomes FILE.1, in place of an older one
# in a run's folder, and those that are written: nodes join and leave for months
FILES_KEPT, LOGS_BYTES = 256, 2 << 30
PRUNED, PRUNE_EVERY_S = ".pruned", 3600.0
CALLS = ".calls"  # how the name of a file ends that has what a script calls
TELL_BYTES = 64 << 10  # told at once; of more only the newest part
LAST_LINES, WORDS_MOST = 3, 400  # of a process that is gone: how many are told, characters of all
CRASH_BYTES = 64 << 10  # in which a crash is looked for
# what C++ threw (as Ray writes it, with the stack behind it), or what Python's fault handler wrote,
# with the innermost frames of the thread at fault
CRASH = re.compile(
    r"Unhandled exception: .*?what\(\): (.*?)(?: /\S+\.so\S*\(|$)"
    r"|(Fatal Python error: .*(?:\n+(?:Current )?[Tt]hread .*(?:\n  File .*){1,2})?)",
    re.MULTILINE,
)


class Output:
    """Takes standard output and standard error of this process, from here on. Raises OSError where
    the file cannot be made at first; later troubles with it (a full disk, a folder that somebody
    clears) cost output and nothing else."""

    def __init__(self, folder: str, worker: str) -> None:
        self.path = file_of(folder, worker, os.getpid())
        make_folder(self.path.parent)
        prune(self.path.parent)
        self._lock = threading.Lock()
        self._file = -1  # also at 1 and 2, unless the program has put something else there
        self._tells = False
        self._told_bytes = 0  # up to where the file was told
        self._left: tuple[str, ...] = ()  # lines of a generation that is over, not told yet
        self._begin_file(f"the output continues in {self.path}")

    def begin(self, text: str, tells: bool) -> None:
        """A generation begins: said in the file; `tells`: from here on `take` gives what is
        printed."""
        with self._lock:
            self._left += self._lines()
            self._told_bytes, self._tells = os.fstat(self._file).st_size, tells
        _say(text)

    def take(self) -> tuple[str, ...]:
        """Whole lines that were printed since the last call, where they are to be told: on a
        terminal, in the log of a cluster's job. Secrets are masked; the file has what was
        printed."""
        with self._lock:
            lines, self._left = self._left + self._lines(), ()
            with suppress(OSError):  # retried at the next call
                self._renew()
            return lines

    def _renew(self) -> None:
        """A new file for one that is full, or that somebody has removed."""
        state = os.fstat(self._file)
        if not state.st_nlink:
            make_folder(self.path.parent)
            self._begin_file(f"{self.path} was removed")
        elif state.st_size > FILE_BYTES:
            os.replace(self.path, f"{self.path}.1")
            self._begin_file(f"{self.path}.1 is full")

    def _begin_file(self, why: str) -> None:
        file = open_log(self.path)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        _say(why)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._told_bytes = file, 0

    def _lines(self) -> tuple[str, ...]:
        try:
            n_bytes = os.fstat(self._file).st_size
            if not self._tells or n_bytes <= self._told_bytes:
                return ()
            begin = max(self._told_bytes, n_bytes - TELL_BYTES)
            found = os.pread(self._file, n_bytes - begin, begin)
        except OSError:
            return ()
        if len(found) < TELL_BYTES:  # else a line without an end, which is reported in parts
            found = found[: found.rfind(b"\n") + 1]
        n_missed = begin - self._told_bytes
        missed = [f"... {n_missed:,} bytes are in {self.path} only"] if n_missed else []
        self._told_bytes = begin + len(found)
        texts = found.decode(errors="replace").split("\n")
        # a bar's last state
        lines = (
            text.rstrip("\r").rpartition("\r")[2] for text in (texts if texts[-1] else texts[:-1])
        )
        return (*missed, *(masked_text(line) for line in lines if not line.startswith(LOG_MARK)))


def file_of(folder: str | Path, worker: str, pid: int, *, end: str = ".log") -> Path:
    """What a process of the worker has printed, or (`CALLS`) what the script in it calls. Processes
    of several hosts may have one pid, and write into one folder."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", worker)
    return Path(folder, f"{name}-{pid}{end}")


@dataclass(frozen=True)
class LastWords:
    """Of a process that is gone. `crash`: what it has died of, by its own words; '' = it had none.
    `lines`: the last that it printed, whatever they are about."""

    crash: str = ""
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> LastWords:
        """Without secrets of this process, who is not the one that wrote it."""
        text = masked_text(text)
        if crash := CRASH.search(text):
            return cls(crash=" ".join((crash[1] or crash[2]).split()))
        # of a bar its last state; ":actor_name:..." is Ray's
        states = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
        lines = [" ".join(one.split()) for one in states if not one.startswith((LOG_MARK, ":"))]
        return cls(lines=tuple(line for line in lines if line)[-LAST_LINES:])

    def __bool__(self) -> bool:
        return bool(self.crash or self.lines)

    def __str__(self) -> str:
        """To stand behind what is known of its end."""
        if self.crash:
            return f"; it wrote: {self.crash[-WORDS_MOST:]}"
        lines = " | ".join(self.lines)[-WORDS_MOST:]
        return f'; its last lines: "{lines}"' if lines else ""


def last_words(folder: str, worker: str, pid: int) -> LastWords:
    """Of a process whose file is here."""
    try:
        with file_of(folder, worker, pid).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - CRASH_BYTES))
            return LastWords.of(log.read().decode(errors="replace"))
    except FileNotFoundError:
        return LastWords()


def _say(text: str) -> None:
    with suppress(OSError):  # a full disk
        os.write(1, f"{LOG_MARK}{text}\n".encode())


def make_folder(folder: Path) -> None:
    """For logs. Raises OSError; so it does where it stands in a folder that everybody may write and
    is not this user's own."""
    base = folder.parent
    if base.name.startswith(OF_NODE):
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(base)
    folder.mkdir(parents=True, exist_ok=True)


def open_log(path: Path) -> int:
    """To append to; no symbolic link is followed. As long as a process writes it, it is not pruned.
    Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def prune(folder: Path) -> None:
    """Removes the oldest files that nobody writes any more, where they are too many or too large.
    One does so for all, once in PRUNE_EVERY_S: a look at many thousands of files by as many workers
    would take hours."""
    with suppress(OSError):
        mark = os.open(
            folder / PRUNED, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(mark)
            if found.st_size and time.time() - found.st_mtime < PRUNE_EVERY_S:
                return
            os.pwrite(mark, b"1", 0)
            for pattern in ("*.log*", f"*{CALLS}"):
                _prune_all(folder.glob(pattern))
        finally:
            os.close(mark)


def _prune_all(files: Iterable[Path]) -> None:
    found: list[tuple[float, int, Path]] = []
    for file in files:
        with suppress(FileNotFoundError):
            state = file.stat()
            found.append((state.st_mtime, state.st_size, file))
    found.sort(reverse=True)
    until = list(accumulate(n_bytes for _, n_bytes, _ in found))
    for at, (_, _, file) in enumerate(found):
        if at < FILES_KEPT and until[at] <= LOGS_BYTES:
            continue
        with suppress(OSError):
            # to write: NFS and EFS give no exclusive lock of a file that is open to be read
            handle = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                # raises where it is written still
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink()
            finally:
                os.close(handle)
