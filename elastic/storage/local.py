"""Storage in a folder: a local disk or a file system that nodes share.

A file is written under a temporary name beside its place, synced, then renamed (or linked, where it
must not replace another).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from elastic.errors import SpecError
from elastic.storage.interface import TEMPORARY, Storage, checked

PART_BYTES = 512 << 10  # fits the cache of a core
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStorage(Storage):
    """A folder. `uri` is its absolute path; `root` and `path` exist only here."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.uri = str(self.root)

    def path(self, key: str) -> Path:
        """Where `key` lies. Raises SpecError when it would leave the folder or is a temporary
        name."""
        return self.root.joinpath(*checked(key).split("/"))

    def get(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        return self._fill(key, offset, buffer, part_bytes=len(buffer), took=None)

    def read_parts(
        self, key: str, offset: int, buffer: memoryview, *, took: Callable[[memoryview], object]
    ) -> int:
        return self._fill(key, offset, buffer, part_bytes=PART_BYTES, took=took)

    def _fill(
        self,
        key: str,
        offset: int,
        buffer: memoryview,
        *,
        part_bytes: int,
        took: Callable[[memoryview], object] | None,
    ) -> int:
        n = 0
        with self.path(key).open("rb", buffering=0) as file:
            file.seek(offset)
            while n < len(buffer):
                got = file.readinto(buffer[n : n + part_bytes])
                if not got:
                    break
                if took is not None:
                    took(buffer[n : n + got])
                n += got
        return n

    def forget(self, key: str) -> None:
        with suppress(OSError), self.path(key).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def size(self, key: str) -> int:
        return self.path(key).stat().st_size

    def modified_s(self, key: str) -> float:
        return self.path(key).stat().st_mtime

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        if if_absent and self.exists(key):
            return False
        try:
            with self.create(key, if_absent) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        target = self.path(key)
        _make_folder(target.parent)
        temporary = target.parent / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if if_absent:
                self._link(temporary, target)
            else:
                temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(target.parent)

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir())

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        start = self.path(prefix.rpartition("/")[0]) if "/" in prefix else self.root
        found = []
        for where, _, names in os.walk(start, onerror=_raised):
            folder = Path(where).relative_to(self.root)
            found += [
                (folder / name).as_posix() for name in names if not name.startswith(TEMPORARY)
            ]
        return sorted(key for key in found if key.startswith(prefix) and key > after)

    def delete(self, key: str) -> None:
        path = self.path(key)
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync_folder(path.parent)

    def delete_folder(self, key: str = "") -> None:
        folder = self.path(key) if key else self.root
        while folder.exists():
            with suppress(FileNotFoundError):  # somebody else removes it too: look again
                shutil.rmtree(folder)

    def is_written_to(self, key: str) -> bool:
        found = os.walk(self.path(key), onerror=_raised)
        return any(name.startswith(TEMPORARY) for _, _, names in found for name in names)

    def clean_unfinished(self, older_than_s: float) -> int:
        if not self.root.is_dir():
            return 0
        before_s, n = self._now_s() - older_than_s, 0
        for where, _, names in os.walk(self.root, onerror=_raised):
            for name in names:
                path = Path(where) / name
                with suppress(FileNotFoundError):  # its writer has finished
                    if name.startswith(TEMPORARY) and path.stat().st_mtime < before_s:
                        path.unlink()
                        n += 1
        return n

    def free_bytes(self) -> int | None:
        at = next(path for path in (self.root, *self.root.parents) if path.exists())
        found = os.statvfs(at)
        return found.f_bavail * found.f_frsize

    def _now_s(self) -> float:
        """By the clock that stamps the files here: another host's, where this is its file
        system."""
        probe = self.root / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _link(self, temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno == errno.EEXIST and temporary.stat().st_nlink == 2:
                # on NFS: it was linked, the answer was lost, and the request came again (open(2),
                # O_EXCL)
                return
            if error.errno not in NO_LINKS:
                raise
            raise SpecError(
                f"{self.uri}: this file system has no hard links, which commits need; use another "
                "folder"
            ) from error


def _raised(error: OSError) -> None:
    """Of a folder that is walked through: what cannot be read is not empty. One that is gone is."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _make_folder(folder: Path) -> None:
    """With those above it; each one's name is on the disk before a file in it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
