"""What is read by ranges, as a file object."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class Ranged(io.RawIOBase):
    """`read_into(offset, view)` fills a view from there on and returns how many bytes there were;
    `size`: of all of it."""

    def __init__(self, read_into: Callable[[int, memoryview], int], size: int) -> None:
        self._read_into, self._size, self._at = read_into, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        n = self._read_into(self._at, view) if len(view) else 0
        self._at += n
        return n
