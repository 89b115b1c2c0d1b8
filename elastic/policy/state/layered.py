"""A mapping that is never changed in place, of which one with another entry costs the root of its
size, not all of it.

What each of thousands of workers says when a generation ends is one event, and each event makes a
new State.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

LEAST = 8  # entries above: a small mapping is copied whole no more often
_GONE: Any = object()


class Layered(Mapping[K, V], Generic[K, V]):
    """`base` with the few newest changes above it; when these are more than the root of its size,
    they become a new base."""

    __slots__ = ("_above", "_base")

    def __init__(self, base: Mapping[K, V], above: Mapping[K, V] | None = None) -> None:
        self._base, self._above = base, above or {}

    def __getitem__(self, key: K) -> V:
        value = self._above[key] if key in self._above else self._base[key]
        if value is _GONE:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[K]:
        yield from (key for key in self._base if self._above.get(key) is not _GONE)
        yield from (key for key in self._above if key not in self._base)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


def with_entry(of: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """`of` with this entry."""
    base, above = (of._base, of._above) if isinstance(of, Layered) else (of, {})
    above = {**above, key: value}
    if len(above) <= max(LEAST, len(base) ** 0.5):
        return Layered(base, above)
    whole = {**base, **above}  # keeps the hashes: those of workers are counted in Python
    for gone in [k for k, v in above.items() if v is _GONE]:
        del whole[gone]
    return Layered(whole)


def without_entry(of: Mapping[K, V], key: K) -> Mapping[K, V]:
    """`of` without this entry."""
    if key not in of:
        return of
    base, above = (of._base, of._above) if isinstance(of, Layered) else (of, {})
    if key not in base:
        return Layered(base, {k: v for k, v in above.items() if k != key})
    return with_entry(of, key, _GONE)
