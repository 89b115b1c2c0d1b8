"""Inputs made wrong: by accident (a flipped bit, a lost end), by force (bytes, splices), by meaning
(other values of JSON or YAML)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e300,
    5e-324, float("inf"), float("nan"), "", "auto", "\0", "a\nb", "../..", "1e999", "nan", "\ud800",
    "x" * 5000, [], {}, [[]], {"": None}, "2026-13-45",
]  # fmt: skip
TOKENS = [
    b"null", b"1e999", b"-1", b"NaN", b"Infinity", b"[" * 300, b"{" * 300, b'"', b"\\ud800",
    b"\\u0000", b"\n", b"\n\n", b"\0", b"\xff", b"&a [*a]", b"*a", b"<<: *a", b"? ", b": ", b"- ",
    b"!!binary x", b"9" * 5000, b"}", b"]", b'"crc":"00000000"', b'"v":2', b"..", b"/",
    b"2026-13-45", b"!!timestamp 1",
]  # fmt: skip


def accident(data: bytes, chance: random.Random) -> bytes:
    """One bit is another, or the end is missing."""
    if not data:
        return data
    if chance.random() < 0.2:
        return data[: chance.randrange(len(data))]
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def forced(data: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Some accidents, insertions, repetitions and parts of other inputs."""
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 8, 64, 512)))
        kind = chance.randrange(5)
        if kind == 0:
            data = accident(data, chance)
        elif kind == 1:
            data = data[:at] + chance.choice(TOKENS) + data[at:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:end] + data[at:end] * chance.choice((1, 2, 16)) + data[end:]
        else:
            other = chance.choice(others)
            data = data[:at] + other[chance.randrange(len(other) + 1) :]
    return data[: 1 << 20]


def changed(value: Any, chance: random.Random) -> Any:
    """Plain data with another value somewhere, or with a key more or less."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        kind = chance.randrange(8)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {
                **value,
                chance.choice(["", "kind", "v", "folder", str(key) + "x"]): chance.choice(HOSTILE),
            }
        return {**value, key: changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        kind = chance.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value + [value[at]] * chance.choice((1, 3))
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    return chance.choice(HOSTILE)


def as_json(data: bytes, chance: random.Random) -> bytes:
    """With another meaning, one of its lines or all of it."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        lines[at] = json.dumps(
            changed(json.loads(lines[at]), chance), separators=(",", ":")
        ).encode()
    except ValueError:
        return forced(data, [data], chance)
    return b"\n".join(lines)


def as_yaml(value: Any, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = changed(value, chance)
    return json.dumps(value, default=str).encode()  # which is YAML
