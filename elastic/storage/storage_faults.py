"""Requests to object storage: which faults are met by asking again and for how long, and what a
person is told about the others. Nothing here puts a credential into a message."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_after_delay,
    wait_random_exponential,
)

from elastic.errors import StorageDamaged, StorageFailed, StorageRefused

PASSING_STATUS = (408, 429, 500, 502, 503, 504)
BUSY, DOWN = "the server asks to slow down", "it may be down"


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


class WrongBytes(Exception):
    """An answer does not hold what it should: fewer bytes, or another digest. Asked again."""


@dataclass(frozen=True)
class StorageFault:
    """What an error says. `damaged`: the answer holds other bytes; `failed`: the server does not do
    it now; `refused`: nor later; `unanswered`: no answer, or none that can be read; `unasked`: it
    could not be asked. `again`: asking again may help. `n_asked`: by the client, for this one
    error. `stale`: the client is to be made anew."""

    kind: Literal["absent", "damaged", "failed", "refused", "unanswered", "unasked"]
    text: str = ""
    code: str = ""
    again: bool = False
    operation: str = ""  # as the cloud calls it
    n_asked: int = 1
    stale: bool = False

    def told(self, where: str, operation: str, asked: str) -> Exception:
        """What it means to the caller."""
        did = f"{where}: {self.operation or operation}"
        match self.kind:
            case "absent":
                return FileNotFoundError(f"{where}: not there")
            case "damaged":
                return StorageDamaged(f"{where}: {self.text} ({asked})")
            case "failed":
                return StorageFailed(f"{did} failed ({self.code}; {asked}): {self.text}")
            case "refused":
                return StorageRefused(f"{did} was refused ({self.code}): {self.text}")
            case "unanswered":
                return StorageFailed(f"{where}: no whole answer ({asked}): {self.text}")
        return StorageRefused(f"{where}: {self.text}")


def check_whole(data: bytes, n_bytes: int, crc32: str | None) -> None:
    """Of an object that was read whole: its length, and the digest that was stored with it. Raises
    WrongBytes."""
    if len(data) != n_bytes:
        raise WrongBytes(f"{n_bytes} bytes were announced, {len(data)} came")
    if crc32 is not None and crc32 != f"{zlib.crc32(data):08x}":
        raise WrongBytes(f"its CRC-32 is {zlib.crc32(data):08x}, stored with it is {crc32}")


def expected(found: tuple[int, int], n_whole: int, *, offset: int, length: int) -> int:
    """Bytes that an answer announces which holds first .. end of an object of `n_whole`. Raises
    WrongBytes when that is not the range that was asked for."""
    if found != (offset, min(offset + length, n_whole)):
        raise WrongBytes(
            f"bytes {offset} to {offset + length - 1} were asked for, the answer holds {found[0]} "
            f"to {found[1] - 1} of {n_whole}"
        )
    return found[1] - found[0]
