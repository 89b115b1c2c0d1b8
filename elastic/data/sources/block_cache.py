"""A cache on the node's own disk: remote files in blocks, read once per node, and what is built
from data once.

<folder>/blocks/ab/<digest of the file>-<number>   bytes of a block, then their 8-byte xxh3 sum
<folder>/built/<name>/                             an index or tokenized text, and the sizes of its
                                                   files; not counted, removed by hand
<folder>/built/.<name>-<8 digits>/                 being built; swept once its builder is gone
                                                   (nobody holds its lock)
<folder>/locks/                                    between the node's processes; a builder that
                                                   makes progress touches its own

A block is checked when a process first reads it; one that is cut off or altered is fetched again.
Where the blocks exceed `limit_bytes`, those that were not used for the longest time go. Where the
files do not fit, one miss of WHOLE_EVERY brings a block, and one that asks for half of it or more
does while there is room; the others bring only what is asked for.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from elastic.data.progress import gets_on, heard_by
from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.version import user_cache

LOG = logging.getLogger(__name__)
FOLDER, LIMIT_BYTES = "ELASTIC_CACHE", 20 << 30
BLOCK_BYTES = 4 << 20
SUM_BYTES = 8
RANGE_BYTES, WHOLE_EVERY = 64 << 10, 64
# blocks that a process remembers as checked, or as many of BLOCK_BYTES as the limit holds
CHECKED_MOST = 1 << 18
N_LOCKS = 64  # blocks share them
USED_EVERY_S = 60.0  # how exactly the last use of a block is noted
ROOM = 0.9  # of the limit that is left when blocks had to go
FULL_S = 60.0  # after the disk was full nothing is kept that is not worth its fetch
OLD_S = 3600.0  # unfinished files of this age belong to nobody
WAIT_S = 0.1  # between looks at another process that builds
SIZES = "sizes.json"  # of what is built: written last
UNFINISHED = re.compile(r"\.(.+)-[0-9a-f]{8}")
LOCK_MOST_S, LOCK_LOOK_S = 150.0, 0.02  # storage is retried for 120 s


@dataclass(frozen=True)
class Remote:
    """A file of a storage, as it was when it was found."""

    storage: Storage
    key: str
    n_bytes: int
    modified_s: float

    @property
    def digest(self) -> str:
        return hashlib.sha256(
            f"{self.storage.uri_of(self.key)}|{self.n_bytes}|{self.modified_s}".encode()
        ).hexdigest()[:32]


class BlockCache:
    """See the module. Any number of threads and processes of a node may use one folder. Raises
    SpecError where it cannot be."""

    def __init__(self, folder: str | Path | None = None, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = Path(folder or default_folder()).expanduser().absolute()
        self.limit_bytes, self.wanted_bytes = limit_bytes, 0
        if limit_bytes < BLOCK_BYTES:
            raise SpecError(
                f"cache {self.folder}: a limit of {limit_bytes} bytes holds no block of "
                f"{BLOCK_BYTES}"
            )
        # name of a block -> inode that was found right; the last used
        self._checked: OrderedDict[str, int] = OrderedDict()
        self._counted, self._missed = False, 0
        self._full_until_s = 0.0  # the disk was full: by this process's clock
        self._last = ("", 0, b"")  # range that was fetched: digest of its file, first byte, bytes
        try:
            for name in ("blocks", "built", "locks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(
                f"cache {self.folder}: {error.strerror}; name a folder on the node's disk "
                f"({FOLDER})"
            ) from error

    # --------------------------------------------------------------------------------------- blocks

    def expect(self, n_bytes: int) -> None:
        """Files of that size are read by this process for a long time, in any order."""
        self.wanted_bytes += n_bytes

    @property
    def fits(self) -> bool:
        """Is there room for what was said to be read?"""
        return self.wanted_bytes <= self.limit_bytes

    def read(self, file: Remote, offset: int, length: int) -> bytes:
        """Bytes offset .. offset+length of a file; fewer when it ends before. Raises what its
        storage raises."""
        end = min(offset + length, file.n_bytes)
        parts = []
        while offset < end:
            number, skip = divmod(offset, BLOCK_BYTES)
            n = min(end - offset, BLOCK_BYTES - skip)
            parts.append(self._part(file, number, skip, n=n))
            offset += n
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, file: Remote, number: int, skip: int, *, n: int) -> bytes:
        digest = file.digest
        path = self.folder / "blocks" / digest[:2] / f"{digest}-{number}"
        found = self._from_disk(path, _block_bytes(file, number), skip, n=n)
        if found is None and not self.fits:
            found = self._range(file, number, skip, n=n)
        if found is not None:
            return found
        with self._lock(f"block-{(int(path.name[:8], 16) ^ number) % N_LOCKS}"):
            # another process was quicker
            found = self._from_disk(path, _block_bytes(file, number), skip, n=n)
            if found is None:
                data = self._fetched(file, number * BLOCK_BYTES, _block_bytes(file, number))
                self._keep(path, data)
                found = data[skip : skip + n]
        return found

    def _range(self, file: Remote, number: int, skip: int, *, n: int) -> bytes | None:
        """Without its block; None = the whole one is to be kept. What is full stays as it is: each
        miss in place of what was not used for the longest time would leave little of it until that
        is read again. Where it follows on the last one, twice as much is fetched: a file may be
        read in small pieces from its beginning to its end."""
        digest, at, n_block = file.digest, number * BLOCK_BYTES, _block_bytes(file, number)
        offset = at + skip
        of, first, data = self._last
        follows = of == digest and first <= offset <= first + len(data)
        if not follows or offset + n > first + len(data):
            self._missed += 1
            if self._missed % WHOLE_EVERY == 0 or (2 * n >= n_block and self._has_room(n_block)):
                return None
            ahead = 2 * len(data) if follows else 0
            first = offset - skip % RANGE_BYTES
            n_ranges = -(-max(offset + n - first, ahead) // RANGE_BYTES)
            stop = min(first + n_ranges * RANGE_BYTES, at + n_block)
            data = self._fetched(file, first, stop - first)
            self._last = digest, first, data
        return data[offset - first : offset - first + n]

    def _from_disk(self, path: Path, n_block: int, skip: int, *, n: int) -> bytes | None:
        try:
            handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            at = os.fstat(handle)
            if at.st_size != n_block + SUM_BYTES:
                LOG.warning(
                    "%s: %d bytes, should be %d; read again", path, at.st_size, n_block + SUM_BYTES
                )
                return None
            if self._checked.get(path.name) != at.st_ino:
                whole = os.pread(handle, n_block + SUM_BYTES, 0)
                if _sum(whole[:-SUM_BYTES]) != whole[-SUM_BYTES:]:
                    LOG.warning("%s: its checksum is wrong; read again", path)
                    return None
                found = whole[skip : skip + n]
            else:
                found = os.pread(handle, n, skip)
            now_s = time.time()
            if now_s - at.st_mtime > USED_EVERY_S:
                os.utime(handle, (now_s, now_s))
            self._checked.pop(path.name, None)
            self._checked[path.name] = at.st_ino
            if len(self._checked) > max(CHECKED_MOST, self.limit_bytes // BLOCK_BYTES):
                self._checked.popitem(last=False)
            return found
        finally:
            os.close(handle)

    def _fetched(self, file: Remote, offset: int, wanted: int) -> bytes:
        data = bytes(file.storage.read(file.key, offset, wanted))
        gets_on()
        if len(data) != wanted:
            raise SpecError(
                f"{file.storage.uri_of(file.key)}: it is shorter than the {file.n_bytes} bytes "
                "that it had when the run began; data must not change under a run"
            )
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        temporary = path.parent / f".{secrets.token_hex(8)}"
        with self._full_disk_costs_time():
            try:
                path.parent.mkdir(exist_ok=True)
                temporary.write_bytes(data + _sum(data))
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            self._make_room(len(data) + SUM_BYTES)

    @contextmanager
    def _full_disk_costs_time(self) -> Iterator[None]:
        """And nothing else: what is written inside is left out."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._full_until_s = time.monotonic() + FULL_S
            LOG.warning(
                "%s: %s; what does not fit is read again each time", self.folder, error.strerror
            )

    # ------------------------------------------------------------------------------------ the limit

    def _make_room(self, n_bytes: int) -> None:
        with self._lock("bytes"):
            total = (
                self._total() + n_bytes
                if self._counted
                else sum(size for _, size, _ in self._blocks())
            )
            self._counted = True
            if total > self.limit_bytes:
                total = self._evict()
            (self.folder / "bytes").write_text(str(total))

    def _has_room(self, n_bytes: int) -> bool:
        """For a block, so that none has to go."""
        full = time.monotonic() < self._full_until_s
        return not full and self._total() + n_bytes + SUM_BYTES <= ROOM * self.limit_bytes

    def _total(self) -> int:
        try:
            return int((self.folder / "bytes").read_text())
        except (FileNotFoundError, ValueError):
            return sum(size for _, size, _ in self._blocks())

    def _blocks(self) -> list[tuple[float, int, Path]]:
        """Last use in seconds, bytes and place of each block."""
        found = []
        for shelf in os.scandir(self.folder / "blocks"):
            for entry in os.scandir(shelf.path):
                with suppress(FileNotFoundError):
                    at = entry.stat()
                    found.append((at.st_mtime, at.st_size, Path(entry.path)))
        return found

    def _evict(self) -> int:
        blocks, now_s = sorted(self._blocks()), time.time()
        total = sum(size for _, size, _ in blocks)
        for used_s, size, path in blocks:
            unfinished = path.name.startswith(".")
            if (total > ROOM * self.limit_bytes and not unfinished) or (
                unfinished and now_s - used_s > OLD_S
            ):
                path.unlink(missing_ok=True)
                self._checked.pop(path.name, None)
                total -= size
        return total

    # --------------------------------------------------------------------------- what is built once

    def once(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder built/<name>; where it is not there as it was left, `build` fills it, in one
        of the node's processes while the others wait."""
        folder = self.folder / "built" / name
        with self._turn(name) as lock:
            if not _is_whole(folder):
                self._sweep(name)
                temporary = folder.with_name(f".{name}-{secrets.token_hex(4)}")
                temporary.mkdir()
                try:
                    with heard_by(lambda: os.utime(lock)):
                        build(temporary)
                    (temporary / SIZES).write_text(json.dumps(_sizes(temporary)))
                    shutil.rmtree(folder, ignore_errors=True)
                    temporary.rename(folder)
                finally:
                    shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _sweep(self, mine: str) -> None:
        """What processes left half-built that were killed: nobody holds the lock of its name.
        `mine` is held by the caller."""
        for path in (self.folder / "built").iterdir():
            found = UNFINISHED.fullmatch(path.name)
            if found is None:
                continue
            with self._opened(f"built-{found[1]}") as handle:
                if found[1] == mine or _locked(handle):
                    shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _turn(self, name: str) -> Iterator[int]:
        """The lock of what is built by that name. While another process builds it and makes
        progress, so does this one."""
        with self._opened(f"built-{name}") as handle:
            touched = os.fstat(handle).st_mtime_ns
            while not _locked(handle):
                time.sleep(WAIT_S)
                before, touched = touched, os.fstat(handle).st_mtime_ns
                if touched != before:
                    gets_on()
            yield handle

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Who holds it longer than storage is asked for is stopped, or hangs: the others continue
        without it, which costs what is read twice, and no more."""
        with ExitStack() as held:
            with self._full_disk_costs_time():
                handle = held.enter_context(self._opened(name))
                self._wait_for(handle, name)
            yield

    def _wait_for(self, handle: int, name: str) -> None:
        until_s = time.monotonic() + LOCK_MOST_S
        while not _locked(handle):
            if time.monotonic() > until_s:
                LOG.warning(
                    "%s/locks/%s has been held for %.0f s: not waited for",
                    self.folder,
                    name,
                    LOCK_MOST_S,
                )
                return
            time.sleep(LOCK_LOOK_S)

    @contextmanager
    def _opened(self, lock: str) -> Iterator[int]:
        handle = os.open(self.folder / "locks" / lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            yield handle
        finally:
            os.close(handle)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file in it, by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != SIZES)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _is_whole(folder: Path) -> bool:
    """Does it hold what its builder has left? More may have come."""
    try:
        left = json.loads((folder / SIZES).read_text())
    except (OSError, ValueError):
        return False
    return bool(left.items() <= _sizes(folder).items())


def _locked(handle: int) -> bool:
    """Takes the lock, unless another holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def default_folder() -> str:
    return str(user_cache(FOLDER))


def _block_bytes(file: Remote, number: int) -> int:
    return min(BLOCK_BYTES, file.n_bytes - number * BLOCK_BYTES)


def _sum(data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(data)
