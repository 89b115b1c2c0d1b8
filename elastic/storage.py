"""Storage of a run: keys -> bytes under one URI. Local folders; `s3://` is not in this version.

A file appears whole or not at all: it is written under a temporary name beside its place, synced, then renamed (or linked,
where it must not replace another). Keys are relative paths with '/'; they cannot leave the folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from elastic.errors import SpecError

TEMPORARY = ".tmp-"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def open_storage(uri: str | os.PathLike[str]) -> Storage:
    """Storage under a local path or file:// URI. Raises SpecError for a scheme that this version does not have."""
    text = os.fspath(uri)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "s3":
        raise SpecError(f"{text}: object storage (s3://) is not in this version; use a folder that all nodes share")
    if scheme not in ("", "file"):
        raise SpecError(f"{text}: '{scheme}://' is not known; use a folder that all nodes share")
    path = unquote(urlsplit(text).path) if scheme else os.path.expanduser(text)
    if not path:
        raise SpecError(f"storage '{text}' names no folder")
    return Storage(Path(path))


class Storage:
    """A folder. `uri` is its absolute path: it means the same in every process that sees the file system."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)

    def path(self, key: str) -> Path:
        """Where `key` lies. Raises SpecError when it would leave the folder or is a temporary name."""
        parts = key.split("/")
        if any(part in ("", ".", "..") or part.startswith(TEMPORARY) for part in parts) or "\0" in key or "\\" in key:
            raise SpecError(f"storage key '{key}': it must be a relative path of plain names, as in checkpoints/a.json")
        return self.root.joinpath(*parts)

    def uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def get(self, key: str) -> bytes:
        """All bytes of `key`. Raises FileNotFoundError."""
        return self.path(key).read_bytes()

    def read(self, key: str, offset: int, length: int) -> bytearray:
        """Bytes offset .. offset+length; fewer when the file ends before. Raises FileNotFoundError."""
        out = bytearray(max(0, min(length, self.size(key) - offset)))
        n = self.read_into(key, offset, memoryview(out))
        return out[:n] if n < len(out) else out

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` from `offset` on; returns the bytes that there were. Raises FileNotFoundError."""
        n = 0
        with self.path(key).open("rb", buffering=0) as file:
            file.seek(offset)
            while n < len(buffer):
                got = file.readinto(buffer[n:])
                if not got:
                    break
                n += got
        return n

    def size(self, key: str) -> int:
        """Raises FileNotFoundError."""
        return self.path(key).stat().st_size

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        """Writes `key` in one piece. False: `if_absent` and it was there (of several writers exactly one gets True)."""
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
        """A file to write to; it appears under `key` when the block ends, and not at all when the block raises."""
        target = self.path(key)
        target.parent.mkdir(parents=True, exist_ok=True)
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

    def list(self, prefix: str = "") -> list[str]:
        """Keys that start with `prefix`, sorted; a prefix may end inside a name."""
        start = self.path(prefix.rpartition("/")[0]) if "/" in prefix else self.root
        found = []
        for where, _, names in os.walk(start):
            folder = Path(where).relative_to(self.root)
            found += [(folder / name).as_posix() for name in names if not name.startswith(TEMPORARY)]
        return sorted(key for key in found if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Removes `key`; one that is not there is no error."""
        path = self.path(key)
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            _sync_folder(path.parent)

    def delete_folder(self, key: str = "") -> None:
        """Removes everything under `key`, what interrupted writers left there included; '' = the whole storage."""
        folder = self.path(key) if key else self.root
        while folder.exists():
            with suppress(FileNotFoundError):  # somebody else removes it too: look again
                shutil.rmtree(folder)

    def _link(self, temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            raise SpecError(
                f"{self.uri}: this file system has no hard links, which commits need; use another folder"
            ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
