"""What has read a journal, written down so that the next reader continues from there: plain data
with its checksum, for the same user and the same code. Nothing in it is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from elastic.config.fingerprint import digest_of_code
from elastic.errors import SpecError
from elastic.ledger.journal import built, crc_of, plain

T = TypeVar("T")


def code() -> str:
    """Of all that makes something of a journal: what another version has kept says nothing."""
    return digest_of_code("types", "config", "planner", "policy", "ledger", "observe")


def text_of(kept: Any) -> bytes:
    """Of a dataclass with `code`."""
    text = json.dumps(plain(kept), separators=(",", ":")).encode()
    return crc_of(text).encode() + b"\n" + text


def write(file: Path, text: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}")
    half.write_bytes(text)
    half.replace(file)


def read(file: Path, kind: type[T]) -> T | None:
    """None = this user has kept nothing there with code like this."""
    try:
        mine = file.stat().st_uid == os.getuid()
        return of_text(file.read_bytes(), kind) if mine else None
    except OSError:
        return None


def of_text(text: bytes, kind: type[T]) -> T | None:
    """None = it is not whole, or of other code."""
    try:
        crc, _, plainly = text.partition(b"\n")
        if crc_of(plainly).encode() != crc:
            return None
        data = json.loads(plainly)
        return built(kind, data) if data["code"] == code() else None
    except (ValueError, KeyError, TypeError, SpecError):
        return None
