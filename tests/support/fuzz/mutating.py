"""Inputs made wrong: by accident (a flipped bit, a lost end), by force (bytes, splices), by meaning
(other values of JSON or YAML)."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import yaml

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, 1e300,
    5e-324, float("inf"), float("nan"), "", "auto", "\0", "a\nb", "../..", "1e999", "nan", "\ud800",
    "x" * 5000, [], {}, [[]], {"": None}, "2026-13-45", -(2**63), 1e-300, "0x10", "1_000", "1e3",
    "\u202e", "e\u0301", "\uff11\uff10", "\U0001f600", "\u2028", "${HOME}", "~", "%s{0}", "*", "!!int 3",
]  # fmt: skip
TOKENS = [
    b"null",
    b"1e999",
    b"-1",
    b"NaN",
    b"Infinity",
    b"[" * 300,
    b"{" * 300,
    b'"',
    b"\\ud800",
    b"\\u0000",
    b"\n",
    b"\n\n",
    b"\0",
    b"\xff",
    b"&a [*a]",
    b"*a",
    b"<<: *a",
    b"? ",
    b": ",
    b"- ",
    b"!!binary x",
    b"9" * 5000,
    b"}",
    b"]",
    b'"crc":"00000000"',
    b'"v":2',
    b"..",
    b"/",
    b"2026-13-45",
    b"!!timestamp 1",
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"\xef\xbb\xbf",
    b"\r",
    b"\xe2\x80\xae",
    b"\xc3\x28",
    b"%TAG ! tag:x,1:\n---\n",
    b"---\n",
    b"...\n",
    b"!",
    b"&",
    b"*",
    b"|\n",
    b">-\n",
]
# before a value of YAML
TAGS = [
    "!!int", "!!float", "!!str", "!!bool", "!!null", "!!binary", "!!timestamp", "!!set", "!!omap",
    "!!pairs", "!!seq", "!!map", "!!merge", "!other", "!!python/name:os.system",
    "!!python/object/apply:os.system", "!<tag:yaml.org,2002:int>", "!", "&a", "*a", "&a *a", "&a [*a]",
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


class Twice(dict[str, Any]):
    """One of its keys is written twice, with another value the second time."""

    again: tuple[str, Any] = ("", None)

    def items(self) -> Any:
        return [*super().items(), self.again]


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes such keys."""


Dumper.add_representer(
    Twice, lambda dumper, twice: dumper.represent_mapping("tag:yaml.org,2002:map", twice.items())
)


def changed(value: Any, chance: random.Random) -> Any:
    """Plain data with another value somewhere, or with a key more, less, twice, or under another
    name."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        return _changed_keys(value, chance)
    if isinstance(value, list) and value and chance.random() < 0.85:
        at = chance.randrange(len(value))
        kind = chance.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value + [value[at]] * chance.choice((1, 3))
        if kind == 2:
            return chance.sample(value, len(value))
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    return twisted(value, chance) if chance.random() < 0.5 else chance.choice(HOSTILE)


def _changed_keys(value: dict[Any, Any], chance: random.Random) -> Any:
    key, other = chance.choice(list(value)), chance.choice(list(value))
    kind = chance.randrange(12)
    if kind == 0:
        return {k: v for k, v in value.items() if k != key}
    if kind == 1:
        new = chance.choice(["", "kind", "v", "folder", str(key) + "x", str(key).upper()])
        return {**value, new: chance.choice(HOSTILE)}
    if kind == 2:  # to where another is
        return {**value, key: value[other], other: value[key]}
    if kind == 3:
        twice = Twice(value)
        twice.again = key, changed(value[key], chance)
        return twice
    return {**value, key: changed(value[key], chance)}


def twisted(value: Any, chance: random.Random) -> Any:
    """Another type or size of nearly the same."""
    near: list[Any] = [[value], {"a": value}, str(value), bool(value), _deep(value, chance)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        near += [
            -value,
            value + 1,
            value - 1,
            value * 10**18,
            value // 3,
            f" {value}",
            f"{value}\n",
        ]
    if isinstance(value, str):
        near += [f"{value} ", value.upper(), value[::-1], f"{value}\0", value * 100, value[:-1]]
    if isinstance(value, dict):
        near += [list(value.items()), list(value), list(value.values())]
    if isinstance(value, list):
        near += [dict.fromkeys(map(str, value)), value * 50]
    return chance.choice(near)


def _deep(value: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((2, 20, 99, 101, 150))):
        value = {"a": value} if chance.random() < 0.5 else [value]
    return value


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


def as_yaml(data: bytes, value: Any, chance: random.Random) -> bytes:
    """With another meaning: its lines, or `value`, which is what they mean, in either style."""
    kind = chance.randrange(3)
    if kind == 0:
        return yaml_lines(data, chance)
    for _ in range(chance.choice((1, 1, 2, 3))):
        value = changed(value, chance)
    if kind == 1:
        return json.dumps(value, default=str).encode()  # which is YAML
    # what stands in two places becomes an alias
    try:
        text: str = yaml.dump(value, Dumper=Dumper, default_flow_style=False, sort_keys=False)
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value, default=str).encode()
    return yaml_lines(text.encode(), chance) if chance.random() < 0.3 else text.encode()


def yaml_lines(data: bytes, chance: random.Random) -> bytes:
    """Lines that are there twice, are gone, are indented otherwise, and values with a tag, an
    anchor or an alias."""
    lines = data.decode().split("\n")
    for _ in range(chance.choice((1, 1, 2, 3))):
        at, kind = chance.randrange(len(lines)), chance.randrange(7)
        key, colon, rest = lines[at].partition(": ")
        if kind == 0:
            lines.insert(chance.randrange(len(lines) + 1), lines[at])
        elif kind == 1 and len(lines) > 1:
            del lines[at]
        elif kind == 2:
            lines[at] = " " * chance.choice((1, 2, 4)) + lines[at]
        elif kind == 3:
            lines[at] = lines[at].lstrip()
        elif kind == 4 and not colon:
            lines[at] += f" {chance.choice(TAGS)}"
        elif kind == 5:
            lines[at] = f"{key}{colon or ': '}{json.dumps(chance.choice(HOSTILE))}"
        else:
            lines[at] = f"{key}{colon}{chance.choice(TAGS)} {rest}"
    return "\n".join(lines).encode()
