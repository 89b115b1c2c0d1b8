"""The files of one place in a fixed order, read by ranges: a folder or one file, also in
object storage through the node's cache.

What is kept in memory is their names and sizes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from elastic.data.progress import gets_on
from elastic.data.sources.block_cache import BlockCache, Remote
from elastic.data.sources.ranged_file import Ranged
from elastic.errors import SpecError
from elastic.storage import Storage, open_storage

LEFT_OUT = ("site-packages", "dist-packages", "__pycache__")  # folders that are not entered
CHUNK_BYTES = 8 << 20  # of reading from the beginning to the end


@dataclass(frozen=True, eq=False)
class Files:
    """`root`: a local folder; else `storage`, read through `cache`. `unreadable`: what is there and
    cannot be opened."""

    root: Path | None
    storage: Storage | None
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    changed_s: tuple[float, ...]
    cache: BlockCache | None = None
    unreadable: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    def opened(self, n: int) -> Ranged:
        """The n-th of them as a file object."""

        def read_into(offset: int, view: memoryview) -> int:
            data = self.read(n, offset, len(view))
            view[: len(data)] = data
            return len(data)

        return Ranged(read_into, self.sizes[n])

    def uri(self, n: int) -> str:
        return (
            str(self.root / self.names[n])
            if self.root is not None
            else f"{self._storage.uri_of(self.names[n])}"
        )

    @cached_property
    def digest(self) -> str:
        """Of where they are, their names, sizes and times of change."""
        found = hashlib.sha256(str(self.root or self._storage.uri).encode())
        for name, size, changed_s in zip(self.names, self.sizes, self.changed_s):
            found.update(f"|{name}|{size}|{changed_s}".encode("utf-8", "surrogateescape"))
        return found.hexdigest()[:32]

    def read(self, n: int, offset: int, length: int) -> bytes:
        """Bytes offset .. offset+length of file `n`; fewer when it ends before. Raises SpecError
        when it has become shorter."""
        wanted = max(0, min(length, self.sizes[n] - offset))
        if self.root is None:
            assert self.cache is not None
            return self.cache.read(
                Remote(self._storage, self.names[n], self.sizes[n], self.changed_s[n]),
                offset,
                wanted,
            )
        try:
            data = _pread(self.root / self.names[n], offset, wanted)
        except FileNotFoundError as error:
            raise SpecError(
                f"{self.uri(n)}: it is gone; data must not change under a run"
            ) from error
        if len(data) != wanted:
            raise SpecError(
                f"{self.uri(n)}: it is shorter than the {self.sizes[n]} bytes that it had when "
                "the run began; data must not change under a run"
            )
        return data

    def chunks(self, n: int) -> Iterator[bytes]:
        """File `n` from its beginning to its end."""
        for offset in range(0, self.sizes[n], CHUNK_BYTES):
            yield self.read(n, offset, CHUNK_BYTES)
            gets_on()

    def only(self, keep: Sequence[int]) -> Files:
        """Some of them, in the order of `keep`."""
        names, sizes = tuple(self.names[i] for i in keep), tuple(self.sizes[i] for i in keep)
        times = tuple(self.changed_s[i] for i in keep)
        return Files(self.root, self.storage, names, sizes, times, self.cache, self.unreadable)

    @property
    def _storage(self) -> Storage:
        assert self.storage is not None
        return self.storage


def files_at(
    where: str | Path,
    pattern: str,
    cache: BlockCache | None = None,
    *,
    leave_out: tuple[str, ...] = LEFT_OUT,
) -> Files:
    """The files under a folder that match `pattern` (see `find_files`), or the one file that
    `where` is; object storage likewise.

    Raises SpecError when there is none.
    """
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        found = _remote(text, pattern, cache or BlockCache(), leave_out=leave_out)
    else:
        found = _local(
            Path(text.removeprefix("file://")).expanduser().absolute(), pattern, leave_out
        )
    if not found.names and found.unreadable:
        raise SpecError(
            f"{where}: none of {len(found.unreadable)} files can be read; first: "
            f"{found.unreadable[0]}"
        )
    if not found.names:
        raise SpecError(
            f"{where}: no file matches '{pattern}', or the folder cannot be read; nothing to "
            "train on"
        )
    return found


def _local(root: Path, pattern: str, leave_out: tuple[str, ...]) -> Files:
    if root.is_file():
        root, names = root.parent, [root.name]
    elif root.is_dir():
        names = find_files(root, pattern, leave_out)
    else:
        raise SpecError(f"{root}: no such folder or file")
    kept, sizes, times, unreadable = [], [], [], []
    for name in names:
        try:
            at = os.stat(root / name)
            if not os.access(root / name, os.R_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            unreadable.append(f"{name} ({error.strerror})")
            continue
        kept.append(name)
        sizes.append(at.st_size)
        times.append(at.st_mtime)
    return Files(root, None, tuple(kept), tuple(sizes), tuple(times), None, unreadable)


def _remote(uri: str, pattern: str, cache: BlockCache, *, leave_out: tuple[str, ...]) -> Files:
    above, _, name = uri.rstrip("/").rpartition("/")
    if not above.endswith("/"):  # not a whole bucket
        storage = open_storage(above)
        try:
            return _listed(storage, {name: (storage.size(name), storage.modified_s(name))}, cache)
        except FileNotFoundError:
            pass  # a folder, then
    storage, regex = open_storage(uri), as_regex(pattern)
    found = {
        key: at
        for key, at in storage.sizes().items()
        if regex.fullmatch(key) and not set(key.split("/")[:-1]) & set(leave_out)
    }
    return _listed(storage, found, cache)


def _listed(storage: Storage, found: dict[str, tuple[int, float]], cache: BlockCache) -> Files:
    names = tuple(sorted(found))
    sizes = tuple(found[name][0] for name in names)
    return Files(None, storage, names, sizes, tuple(found[name][1] for name in names), cache)


def _pread(path: Path, offset: int, length: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(handle, length, offset)
        while len(data) < length and (
            more := os.pread(handle, length - len(data), offset + len(data))
        ):
            data += more
        return data
    finally:
        os.close(handle)


def as_regex(pattern: str) -> re.Pattern[str]:
    """A glob over '/'-separated relative paths: `**/` any number of folders, `*` and `?` inside one
    name, `{a,b}` one of."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\{[^}]*\})", pattern)
    signs = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(signs.get(part) or _choice(part) for part in parts))


def _choice(part: str) -> str:
    if not part.startswith("{") or not part.endswith("}"):
        return re.escape(part)
    return f"(?:{'|'.join(map(re.escape, part[1:-1].split(',')))})"


def find_files(
    folder: Path, pattern: str = "**/*.py", leave_out: tuple[str, ...] = LEFT_OUT
) -> list[str]:
    """Relative paths, with '/', that match `pattern`, sorted; folders named in `leave_out` are not
    entered."""
    regex, found = as_regex(pattern), []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in leave_out]
        relative = Path(where).relative_to(folder).as_posix()
        prefix = "" if relative == "." else relative + "/"
        found += [prefix + name for name in names if regex.fullmatch(prefix + name)]
    return sorted(found)
