"""What every object storage has in common: objects of a bucket whose names begin with a prefix,
read by several ranges at once. Nothing outside the prefix is read, written or removed."""

from __future__ import annotations

import io
import re
import secrets
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, BinaryIO, ClassVar, Self, cast

from elastic.errors import InternalError, SpecError, StorageFailed, StorageRefused
from elastic.storage.interface import TEMPORARY, Sizes, Storage, T, checked
from elastic.storage.storage_faults import Patience, StorageFault, WrongBytes, check_whole

RANGE_BYTES = 8 << 20  # of one request of a large read
N_THREADS = 8  # parts and ranges that travel at once
N_IN_FLIGHT = 4  # parts of one upload
DEFAULT = Patience()


@dataclass(frozen=True)
class Looked:
    """What an object's server says of it. `marks`: stored with it by its writer."""

    n_bytes: int
    modified_s: float
    marks: Mapping[str, str]


class AlreadyThere(Exception):
    """The object is there already, and must not be replaced."""


@dataclass(frozen=True)
class WholeObject:
    """What is put in one piece."""

    data: bytes | bytearray
    marks: dict[str, str]
    if_absent: bool


class ObjectStorage(Storage):
    """`scheme://bucket/prefix`. A kind of it says how its client asks for one thing (what takes a
    `client` is one request) and what the client's errors mean; the rest is here."""

    remote: ClassVar[bool] = True
    scheme: ClassVar[str]
    named: ClassVar[str] = "bucket"
    bucket_names: ClassVar[re.Pattern[str]]
    faults: ClassVar[tuple[type[Exception], ...]]  # what its client raises
    repeats: ClassVar[bool]  # the client asks again by itself, unseen
    # metadata: who wrote the object; the CRC-32 of one put in one piece
    marks: ClassVar[tuple[str, str]] = ("elastic-writer", "elastic-crc32")

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

    def get(self, key: str) -> bytes:
        name = self._name(key)

        def get(client: Any) -> bytes:
            data, found = self._get(client, name)
            check_whole(data, found.n_bytes, found.marks.get(self.marks[1]))
            return data

        return self._ask(name, "reading", get)

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
        return self._look(key).n_bytes

    def modified_s(self, key: str) -> float:
        return self._look(key).modified_s

    def exists(self, key: str) -> bool:
        try:
            self._look(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "", after: str = "") -> list[str]:
        return [*self._sizes(prefix, after)]

    def sizes(self, prefix: str = "") -> Sizes:
        return self._sizes(prefix)

    def _sizes(self, prefix: str, after: str = "") -> Sizes:
        if "/" in prefix:
            checked(prefix.rpartition("/")[0])
        found = {
            name[len(self._inside) :]: (n_bytes, modified_s)
            for page in self._listed(self._inside + prefix, after and self._inside + after)
            for name, n_bytes, modified_s in page
        }
        return {key: found[key] for key in sorted(found) if key > after and _plain(key)}

    def each(self, jobs: Iterable[Callable[[], T]]) -> Sequence[T]:
        futures = [start(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        finally:
            settle(futures)

    def free_bytes(self) -> int | None:
        return None

    # ------------------------------------------------------------------------- writing and removing

    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        return self._put(self._name(key), data, if_absent)

    @contextmanager
    def create(self, key: str, if_absent: bool = False) -> Iterator[BinaryIO]:
        upload = self._upload(self._name(key), if_absent)
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.abandon()
            raise

    def delete(self, key: str) -> None:
        self._drop(self._name(key))

    def delete_folder(self, key: str = "") -> None:
        inside = f"{self._name(key)}/" if key else self._own()
        for page in self._listed(inside):
            if names := [name for name, _, _ in page]:
                assert all(name.startswith(inside) for name in names)
                self._remove(inside, names)

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

    def where(self, name: str) -> str:
        return f"{self.scheme}://{self.bucket}/{name}"

    def _ask(
        self, name: str, operation: str, request: Callable[[Any], T], *, attempts: int | None = None
    ) -> T:
        """`request(client)`, repeated as long as a fault may pass, and once with a new client where
        the credentials do not count any more. `name`: key or prefix, for messages. Raises
        FileNotFoundError, StorageRefused, StorageFailed; what the request raises that is no fault
        of its client passes through."""
        where, n_asked, renewed = self.where(name), 0, False
        told: tuple[type[Exception], ...] = (StorageRefused, StorageFailed)
        ours: tuple[type[Exception], ...] = (WrongBytes, *self.faults)

        def fault_of(error: Exception) -> StorageFault:
            if isinstance(error, WrongBytes):
                return StorageFault("damaged", str(error), again=True)
            return self._fault(error, where)

        def may_pass(error: BaseException) -> bool:
            nonlocal n_asked, renewed
            if isinstance(error, told) or not isinstance(error, ours):
                return False
            fault = fault_of(error)
            n_asked += fault.n_asked
            if fault.stale and not renewed:
                renewed = True
                self._forget_clients()
                return True
            return fault.again

        tries = self.patience.tries(may_pass, attempts)
        try:
            return tries(lambda: request(self._client()))
        except told:
            raise
        except ours as error:
            seconds = float(tries.statistics.get("delay_since_first_attempt", 0.0))
            asked = f"asked {n_asked} times in {seconds:.0f} s"
            fault = fault_of(error)
            if fault.stale:
                self._forget_clients()
            raise fault.told(where, operation, asked) from error

    def _drop(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(name, "removing", lambda client: self._delete(client, name))

    def _remove(self, inside: str, names: Sequence[str]) -> None:
        """All of them begin with `inside`."""
        self.each([partial(self._drop, name) for name in names])

    def _look(self, key: str) -> Looked:
        name = self._name(key)
        return self._ask(name, "looking", lambda client: self._head(client, name))

    def _range(self, name: str, offset: int, view: memoryview) -> tuple[int, str]:
        """One ranged read: bytes that there were, and the ETag of the object that they are from."""
        return self._ask(
            name, "reading", lambda client: self._fill(client, name, view, offset=offset)
        )

    def _put(self, name: str, data: bytes | bytearray, if_absent: bool) -> bool:
        """One request. False: `if_absent`, and the object was there and is not what an earlier try
        of this call wrote, the answer to which was lost."""
        writer, n_tries = secrets.token_hex(8), 0
        marks = dict(zip(self.marks, (writer, f"{zlib.crc32(data):08x}"), strict=True))
        whole = WholeObject(data, marks, if_absent)

        def put(client: Any) -> bool:
            nonlocal n_tries
            n_tries += 1
            try:
                self._write(client, name, whole)
            except AlreadyThere:
                seldom = n_tries == 1 and not self.repeats
                return not seldom and self._writer(client, name) == writer
            return True

        return self._ask(name, "writing", put)

    def _writer(self, client: Any, name: str) -> str:
        """Who wrote the object; '' = it is not there, or nobody has said so."""
        try:
            return self._head(client, name).marks.get(self.marks[0], "")
        except self.faults as error:
            if self._fault(error, name).kind != "absent":
                raise
            return ""

    @abstractmethod
    def _client(self) -> Any:
        """Raises `_no_client`."""

    def _no_client(self, why: str) -> StorageRefused:
        """Before anything was asked: settings of this machine are wrong."""
        return StorageRefused(
            f"{self.scheme}://{self.bucket}: no connection can be set up: {' '.join(why.split())}"
        )

    @abstractmethod
    def _forget_clients(self) -> None:
        """The next one reads the credentials anew."""

    @abstractmethod
    def _fault(self, error: Exception, where: str) -> StorageFault:
        """Of one of `faults`."""

    @abstractmethod
    def _head(self, client: Any, name: str) -> Looked: ...

    @abstractmethod
    def _get(self, client: Any, name: str) -> tuple[bytes, Looked]: ...

    @abstractmethod
    def _fill(self, client: Any, name: str, view: memoryview, *, offset: int) -> tuple[int, str]:
        """See `_range`; raises WrongBytes where the answer is not what was asked for."""

    @abstractmethod
    def _write(self, client: Any, name: str, whole: WholeObject) -> None:
        """Raises AlreadyThere."""

    @abstractmethod
    def _upload(self, name: str, if_absent: bool) -> Upload: ...

    @abstractmethod
    def _delete(self, client: Any, name: str) -> None: ...

    @abstractmethod
    def _listed(self, start: str, after: str = "") -> Iterator[Sequence[tuple[str, int, float]]]:
        """Pages of the objects whose names begin so: name, bytes, when it was written. `after`: a
        name up to which none need be listed; '' = all are."""


class Upload(io.RawIOBase):
    """What `create` gives to write to: a small file goes in one piece, another in parts, several at
    once. Memory: the parts in flight and one more."""

    attempts: ClassVar[int | None] = None  # of its end; None: as of other requests

    def __init__(self, storage: ObjectStorage, name: str, if_absent: bool) -> None:
        self._storage, self._name, self._if_absent = storage, name, if_absent
        self._part, self._n_bytes, self._n_parts = bytearray(), 0, 0
        self._marks = {storage.marks[0]: secrets.token_hex(8)}

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._n_bytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view):
            whole = self._part_bytes(self._n_parts + 1)
            room = whole - len(self._part)
            self._part += view[at : at + room]
            at += room
            if len(self._part) == whole:
                self._take()
        self._n_bytes += len(view)
        return len(view)

    def finish(self) -> None:
        """The object is there when this returns. Raises FileExistsError where it must not replace
        another."""
        if not self._n_parts:
            if not self._storage._put(self._name, self._part, self._if_absent):
                raise FileExistsError(f"{self._storage.where(self._name)}: it is there already")
            return
        if self._part:
            self._take()
        self._wait()
        self._ask(self._end, self.attempts)

    @abstractmethod
    def abandon(self) -> None:
        """Removes the parts that were sent. Where that fails too, `clean_unfinished` finds them
        later."""

    @abstractmethod
    def _part_bytes(self, number: int) -> int:
        """Size of the n-th part, from 1."""

    @abstractmethod
    def _send(self, part: bytearray) -> None:
        """Waits while too many are in flight."""

    def _wait(self) -> None:
        """All parts have arrived when this returns."""

    @abstractmethod
    def _complete(self, client: Any) -> None:
        """Makes them an object."""

    def _take(self) -> None:
        """Sends the part, which is whole or the last one, and begins another."""
        if self._if_absent:
            raise InternalError(
                f"storage key '{self._name}': what must not replace another is at most "
                f"{self._part_bytes(1)} bytes"
            )
        part, self._part, self._n_parts = self._part, bytearray(), self._n_parts + 1
        self._send(part)

    def _end(self, client: Any) -> None:
        """Where the answer to a try was lost, the object itself says whether it went through."""
        try:
            self._complete(client)
        except self._storage.faults:
            if self._storage._writer(client, self._name) not in self._marks.values():
                raise

    def _ask(self, request: Callable[[Any], T], attempts: int | None = None) -> T:
        return self._storage._ask(self._name, "writing", request, attempts=attempts)


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
