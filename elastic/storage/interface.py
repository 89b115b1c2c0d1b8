"""What a run's storage can do: keys -> bytes under one URI.

A file appears whole or not at all. Keys are relative paths with '/'; they cannot leave the storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO, ClassVar, TypeVar

from elastic.errors import SpecError

T = TypeVar("T")
Sizes = dict[str, tuple[int, float]]  # key -> bytes, and when it was written

TEMPORARY = ".tmp-"  # how names of unfinished files begin; no key may hold such a part


class Storage(ABC):
    """A place for files. `uri` means the same in every process that can reach it."""

    remote: ClassVar[bool] = False  # True: every call is a request that is paid for; look seldom
    uri: str

    def uri_of(self, key: str) -> str:
        return f"{self.uri}/{key}"

    def hasty(self, most_s: float) -> Storage:
        """The same storage; a request that it does not answer fails after about `most_s`, where
        requests can be given up."""
        return self

    @abstractmethod
    def get(self, key: str) -> bytes:
        """All bytes of `key`. Raises FileNotFoundError."""

    def read(self, key: str, offset: int, length: int) -> bytearray:
        """Bytes offset .. offset+length; fewer when the file ends before. Raises
        FileNotFoundError."""
        out = bytearray(max(0, min(length, self.size(key) - offset)))
        n = self.read_into(key, offset, memoryview(out))
        return out[:n] if n < len(out) else out

    @abstractmethod
    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` from `offset` on; returns the bytes that there were. Raises
        FileNotFoundError."""

    def read_parts(
        self, key: str, offset: int, buffer: memoryview, *, took: Callable[[memoryview], object]
    ) -> int:
        """Like `read_into`; hands every part of `buffer` to `took`, in order, once it is filled
        (and still in the cache)."""
        n = self.read_into(key, offset, buffer)
        took(buffer[:n])
        return n

    def forget(self, key: str) -> None:
        """What is read of `key` from now on comes from storage itself, not from this host's memory,
        where that can be said."""
        return

    @abstractmethod
    def size(self, key: str) -> int:
        """In bytes. Raises FileNotFoundError."""

    @abstractmethod
    def modified_s(self, key: str) -> float:
        """When it was written, in seconds since 1970 on the storage's clock. Raises
        FileNotFoundError."""

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    @abstractmethod
    def put(self, key: str, data: bytes, if_absent: bool = False) -> bool:
        """Writes `key` in one piece. False: `if_absent` and it was there (of several writers
        exactly one gets True)."""

    @abstractmethod
    def create(self, key: str, if_absent: bool = False) -> AbstractContextManager[BinaryIO]:
        """A file to write to; it appears under `key` when the block ends, and not at all when the
        block raises."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders directly under this storage, sorted."""

    @abstractmethod
    def list(self, prefix: str = "", after: str = "") -> list[str]:
        """Keys that start with `prefix`, sorted; a prefix may end inside a name. `after`: only
        those that sort behind it; where storage can, it looks at no others."""

    def sizes(self, prefix: str = "") -> Sizes:
        """Like `list`, with what `size` and `modified_s` say of each key. Keys that are removed
        meanwhile are left out."""
        found: Sizes = {}
        for key in self.list(prefix):
            with suppress(FileNotFoundError):
                found[key] = (self.size(key), self.modified_s(key))
        return found

    def each(self, jobs: Iterable[Callable[[], T]]) -> Sequence[T]:
        """What the jobs give, in their order; several run at once where answers are waited for. A
        job asks for one key."""
        return [job() for job in jobs]

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes `key`; one that is not there is no error."""

    @abstractmethod
    def delete_folder(self, key: str = "") -> None:
        """Removes everything under `key`, what interrupted writers left there included; '' = the
        whole storage."""

    def is_written_to(self, key: str) -> bool:
        """Is a file under `key` being written that `list` does not show yet? False where nobody can
        see that."""
        return False

    @abstractmethod
    def clean_unfinished(self, older_than_s: float) -> int:
        """Removes what interrupted writers left under this storage, if it was begun that long ago;
        returns how many."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """What can still be written; None = not limited by this storage."""


def checked(key: str) -> str:
    """Raises SpecError for a key that would leave the storage or is a temporary name."""
    parts = key.split("/")
    if (
        any(part in ("", ".", "..") or part.startswith(TEMPORARY) for part in parts)
        or "\0" in key
        or "\\" in key
    ):
        raise SpecError(
            f"storage key '{key}': it must be a relative path of plain names, as in "
            "checkpoints/a.json"
        )
    return key
