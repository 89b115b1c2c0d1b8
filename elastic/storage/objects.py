"""What every object storage has in common: objects of a bucket whose names begin with a prefix,
read by several ranges at once. Nothing outside the prefix is read, written or removed."""

from __future__ import annotations

import io
import re
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, BinaryIO, ClassVar, Self, cast

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from elastic.errors import SpecError, StorageFailed
from elastic.storage.interface import TEMPORARY, Sizes, Storage, T, checked

RANGE_BYTES = 8 << 20  # of one request of a large read
N_THREADS = 8  # parts and ranges that travel at once


@dataclass(frozen=True)
class Patience:
    """How long a fault is met by asking again: a random wait of 0 .. first_s, 0 .. 2 first_s, ...
    up to most_s each time."""

    attempts: int = 10
    total_s: float = 120.0
    first_s: float = 0.2
    most_s: float = 10.0
    connect_s: float = 5.0
    read_s: float = 30.0

    def tries(
        self, may_pass: Callable[[BaseException], bool], attempts: int | None = None
    ) -> Retrying:
        """Calls what it is given, as often as a fault may pass. `attempts`: instead of its own."""
        return Retrying(
            stop=stop_after_attempt(attempts or self.attempts) | stop_after_delay(self.total_s),
            wait=wait_random_exponential(multiplier=self.first_s, max=self.most_s),
            retry=retry_if_exception(may_pass),
            reraise=True,
        )


DEFAULT = Patience()


class WrongBytes(Exception):
    """An answer does not hold what it should: fewer bytes, or another digest. Asked again."""


def check_whole(data: bytes, n_bytes: int, crc32: str | None) -> None:
    """Of an object that was read whole: its length, and the digest that was stored with it. Raises
    WrongBytes."""
    if len(data) != n_bytes:
        raise WrongBytes(f"{n_bytes} bytes were announced, {len(data)} came")
    if crc32 is not None and crc32 != f"{zlib.crc32(data):08x}":
        raise WrongBytes(f"its CRC-32 is {zlib.crc32(data):08x}, stored with it is {crc32}")


class PartsFile(io.RawIOBase):
    """What `create` gives to write to: a small file goes in one piece, another in parts, several at
    once."""

    def __init__(self) -> None:
        self._part, self._n_bytes = bytearray(), 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            room = self._part_bytes() - len(self._part)
            self._part += view[at : at + room]
            at += room
            if len(self._part) == self._part_bytes():
                self._send()
        self._n_bytes += len(view)
        return len(view)

    @abstractmethod
    def finish(self) -> None:
        """The object is there when this returns. Raises FileExistsError where it must not replace
        another."""

    @abstractmethod
    def abandon(self) -> None:
        """Removes the parts that were sent, as far as can be."""

    @abstractmethod
    def _part_bytes(self) -> int:
        """Size of the part that is being filled."""

    @abstractmethod
    def _send(self) -> None:
        """Takes the part, which is whole or the last one, and begins another."""


class ObjectStorage(Storage):
    """`scheme://bucket/prefix`."""

    remote: ClassVar[bool] = True
    scheme: ClassVar[str]
    named: ClassVar[str] = "bucket"
    bucket_names: ClassVar[re.Pattern[str]]

    def __init__(self, uri: str, patience: Patience | None = None) -> None:
        start = f"{self.scheme}://"
        bucket, _, prefix = uri.removeprefix(start).partition("/")
        prefix = prefix.rstrip("/")
        if not self.bucket_names.fullmatch(bucket):
            raise SpecError(
                f"{uri}: '{bucket}' is no name of a {self.named}; use {start}{self.named}/prefix"
            )
        if prefix and not _plain(prefix):
            raise SpecError(
                f"{uri}: the prefix must be plain names with '/' between, as in "
                f"{start}{bucket}/team/runs"
            )
        self.bucket, self.prefix = bucket, prefix
        self.uri = f"{start}{bucket}/{prefix}".rstrip("/")
        self._inside = f"{prefix}/" if prefix else ""
        self._patience = patience

    @property
    def patience(self) -> Patience:
        return self._patience or DEFAULT

    def hasty(self, most_s: float) -> Self:
        given, part_s = self.patience, most_s / 2
        waits = {
            name: min(getattr(given, name), part_s)
            for name in ("total_s", "most_s", "connect_s", "read_s")
        }
        return type(self)(self.uri, replace(given, **waits))

    # -------------------------------------------------------------------------------------- reading

    def read(self, key: str, offset: int, length: int) -> bytearray:
        out = bytearray(max(0, length))
        n = self.read_into(key, offset, memoryview(out))
        return out[:n] if n < len(out) else out

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        name, view = self._name(key), buffer.cast("B")
        if len(view) <= RANGE_BYTES:
            return self._range(name, offset, view)[0] if view else 0

        def job(at: int) -> Callable[[], tuple[int, str]]:
            return lambda: self._range(name, offset + at, view[at : at + RANGE_BYTES])

        found = self.each([job(at) for at in range(0, len(view), RANGE_BYTES)])
        if len({etag for n, etag in found if n}) > 1:
            raise StorageFailed(
                f"{self.uri_of(key)}: it was replaced while it was read; read it again"
            )
        return sum(n for n, _ in found)

    def size(self, key: str) -> int:
        return self._head(key)[0]

    def modified_s(self, key: str) -> float:
        return self._head(key)[1]

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str = "") -> Sizes:
        if "/" in prefix:
            checked(prefix.rpartition("/")[0])
        found = {
            name[len(self._inside) :]: (n_bytes, modified_s)
            for page in self._listed(self._inside + prefix)
            for name, n_bytes, modified_s in page
        }
        return {key: found[key] for key in sorted(found) if _plain(key)}

    def each(self, jobs: Iterable[Callable[[], T]]) -> Sequence[T]:
        futures = [start(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        finally:
            settle(futures)

    def free_bytes(self) -> int | None:
        return None

    # ------------------------------------------------------------------------- writing and removing

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        upload = self._upload(self._name(key), if_absent)
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.abandon()
            raise

    def delete_folder(self, key: str = "") -> None:
        inside = f"{self._name(key)}/" if key else self._own()
        for page in self._listed(inside):
            self._remove(inside, [name for name, _, _ in page])

    # ------------------------------------------------------------------------------------- requests

    def _name(self, key: str) -> str:
        return self._inside + checked(key)

    def _own(self) -> str:
        """The prefix, where everything under it is ours. Raises SpecError for a whole bucket."""
        if not self._inside:
            raise SpecError(
                f"{self.uri}: a whole {self.named} is never emptied or cleaned; name a prefix, as "
                f"in {self.uri}/run"
            )
        return self._inside

    @abstractmethod
    def _upload(self, name: str, if_absent: bool) -> PartsFile: ...

    @abstractmethod
    def _head(self, key: str) -> tuple[int, float]:
        """Bytes, and when it was written."""

    @abstractmethod
    def _range(self, name: str, offset: int, view: memoryview) -> tuple[int, str]:
        """One ranged read: bytes that there were, and the ETag of the object that they are from."""

    @abstractmethod
    def _listed(self, start: str) -> Iterator[Sequence[tuple[str, int, float]]]:
        """Pages of the objects whose names begin so: name, bytes, when it was written."""

    @abstractmethod
    def _remove(self, inside: str, names: Sequence[str]) -> None:
        """All of them begin with `inside`."""


def _plain(key: str) -> bool:
    """Not a folder mark or another name that this storage would never write."""
    return all(
        part not in ("", ".", "..") and not part.startswith(TEMPORARY) for part in key.split("/")
    )


def start(job: Callable[[], T]) -> Future[T]:
    return _pool().submit(job)


def settle(futures: Iterable[Future[Any]]) -> None:
    """None of them runs when this returns: nothing is written into a caller's memory after its call
    has ended."""
    wait([future for future in futures if not future.cancel()])


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(N_THREADS, thread_name_prefix="objects")
