"""The checkpoints that a restarted script reports by `ray.train.report`, in its run's storage.

`reported/NAME/FOLDER/` has the files of all ranks; `reported/NAME.json`, the marker, is written
last. NAME is the generation and the number of the report: the newest is the last one in order,
whatever a group of an older generation still writes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from elastic.cluster.workers.output import make_folder
from elastic.ledger.run_folder import OF_NODE, key_of
from elastic.storage import LocalStorage, Storage
from elastic.version import check_own
from elastic.worker.hosting.thread_boundary import ThreadBoundary

log = logging.getLogger(__name__)

REPORTED, MARKER = "reported", ".json"
KEPT = 2  # the newest whole ones
HELD = "held"  # locked by each process that may read the copies beside it
PIECE_BYTES = 64 << 20  # that are copied at once
EVERY_S, CLOSE_MOST_S = 30.0, 10.0  # the driver's looks for older ones; its last one


def key_in(generation: int, report: int, folder: str) -> str:
    """Where the files of a checkpoint lie. `report`: its number, counted over the run."""
    return f"{REPORTED}/{generation:08d}-{report:08d}/{folder}"


def report_of(key: str) -> int:
    """The number of the report that has stored it."""
    return int(_name(key).partition("-")[2])


def generation_for(generation: int, newest: str) -> int:
    """By which a group names what it reports: behind the newest one that it has found, also where
    the run's journal was cut and generations are counted anew."""
    return max(generation, int(_name(newest).partition("-")[0]) + 1) if newest else generation


def copies_of(run_uri: str, node_id: str) -> Path:
    """Where a node keeps what it has fetched of them, in a folder for each generation."""
    base = Path(tempfile.gettempdir(), f"{OF_NODE}{os.getuid()}")
    return base / f"{key_of(run_uri)}-{node_id}"


def remove_copies(copies: Path, but: str = "") -> None:
    """All that the node keeps there, or all but those of one generation; nothing where the folder
    is not this user's own."""
    with suppress(OSError):
        check_own(copies.parent)
        if not copies.is_symlink():
            for folder in list(copies.iterdir()) if but else [copies]:
                if folder.name != but:
                    shutil.rmtree(folder, ignore_errors=True)


@cache
def hold(copies: Path) -> int:
    """As long as this process lives no other one takes what the node keeps there for left behind.
    Raises OSError."""
    while True:
        make_folder(copies)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(copies / HELD, flags, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):  # somebody has just removed it
            if os.stat(copies / HELD).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)


def remove_left(copies: Path) -> None:
    """What scripts that were killed have left beside `copies`, of other runs, or by another name of
    this node. Nothing where the folder is not this user's own, no link is followed."""
    with suppress(OSError):
        check_own(copies.parent)
        for held in copies.parent.glob(f"*/{HELD}"):
            if held.parent != copies and not held.parent.is_symlink():
                _remove_unheld(held)


def _remove_unheld(held: Path) -> None:
    with suppress(OSError):
        handle = os.open(held, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody lives
            left = held.parent.with_name(f"left-{held.parent.name}-{os.getpid()}")
            held.parent.rename(left)  # who begins now makes another one
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(handle)


@dataclass(frozen=True)
class ReportedCheckpoints:
    """Those of one run."""

    storage: Storage

    def newest(self) -> str:
        """The key of the newest whole one; '' = there is none."""
        names = _whole(self.storage.list(f"{REPORTED}/"))
        if not names:
            return ""
        marker = json.loads(self.storage.get(f"{REPORTED}/{names[-1]}{MARKER}"))
        return f"{REPORTED}/{names[-1]}/{marker['folder']}"

    def add(self, key: str, folder: Path) -> None:
        """The files of one rank."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                there = f"{key}/{path.relative_to(folder).as_posix()}"
                with path.open("rb") as file, self.storage.create(there) as stored:
                    shutil.copyfileobj(file, stored, PIECE_BYTES)

    def commit(self, key: str) -> None:
        """All ranks have added their files: it is whole, and older ones are removed."""
        name, folder = _name(key), key.rpartition("/")[2]
        self.storage.put(f"{REPORTED}/{name}{MARKER}", json.dumps({"folder": folder}).encode())
        with suppress(OSError):  # the driver does, where the role of workers may not
            self.remove_older(name)

    def remove_older(self, name: str = "") -> None:
        """All before this one, or the newest whole one, but the newest whole ones: groups that were
        killed leave parts. Raises OSError."""
        keys = self.storage.list(f"{REPORTED}/")
        kept = _whole(keys)[-KEPT:]
        for old in sorted({_name(one) for one in keys}.difference(kept)):
            if old < (name or max(kept, default="")):
                self.storage.delete(f"{REPORTED}/{old}{MARKER}")
                self.storage.delete_folder(f"{REPORTED}/{old}")

    def local(self, key: str, copies: Path) -> Path:
        """A folder of this node that has its files: the stored one itself, or a copy below
        `copies`, which all ranks of the node share."""
        if isinstance(self.storage, LocalStorage):
            return self.storage.path(key)
        hold(copies.parent)
        copies.mkdir(parents=True, exist_ok=True)
        whole, folder = copies / _name(key), key.rpartition("/")[2]
        with (copies / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.is_dir():
                for older in copies.iterdir():
                    if older.is_dir():
                        shutil.rmtree(older)
                self._fetch(key, copies / "unfinished" / folder)
                (copies / "unfinished").rename(whole)
        return whole / folder

    def _fetch(self, key: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        for stored, (n_bytes, _) in self.storage.sizes(f"{key}/").items():
            path = folder / stored.removeprefix(f"{key}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for at in range(0, n_bytes, PIECE_BYTES):
                    file.write(self.storage.read(stored, at, min(PIECE_BYTES, n_bytes - at)))


class ReportedRetention:
    """The driver's part, beside the run: its role may remove what that of workers need not."""

    def __init__(self, storage: Storage) -> None:
        self._stored, self._done = ReportedCheckpoints(storage), threading.Event()
        self._thread = threading.Thread(target=self._run, name="reported", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once more at the end, as long as that does not take long."""
        self._done.set()
        self._thread.join(CLOSE_MOST_S)

    def _run(self) -> None:
        boundary = ThreadBoundary(log, "older reported checkpoints are not removed")
        while not self._done.wait(EVERY_S):
            boundary.holds(self._stored.remove_older)
        boundary.holds(self._stored.remove_older)


def _name(key: str) -> str:
    return key.split("/")[1].removesuffix(MARKER)


def _whole(keys: Iterable[str]) -> list[str]:
    """Names of those that have a marker, the newest last."""
    markers = (key for key in keys if key.count("/") == 1 and key.endswith(MARKER))
    return sorted(map(_name, markers))
