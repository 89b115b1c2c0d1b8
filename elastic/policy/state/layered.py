"""A mapping, and a set, that are never changed in place, of which one with another entry costs the
root of its size, not all of it.

What each of thousands of workers says when a generation ends is one event, and each event makes a
new State.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

LEAST = 8  # entries above: a small mapping is copied whole no more often
GONE: Any = object()


class Layered(Mapping[K, V], Generic[K, V]):
    """`base` with the few newest changes above it; when these are more than the root of its size,
    they become a new base."""

    __slots__ = ("_above", "_base", "_n")

    def __init__(self, base: Mapping[K, V], above: Mapping[K, V], n: int) -> None:
        self._base, self._above, self._n = base, above, n

    def __getitem__(self, key: K) -> V:
        value = self._above[key] if key in self._above else self._base[key]
        if value is GONE:
            raise KeyError(key)
        return value

    def get(self, key: K, default: Any = None) -> Any:
        """Asked for at each step, mostly for what is not there."""
        value = self._above[key] if key in self._above else self._base.get(key, GONE)
        return default if value is GONE else value

    def __contains__(self, key: object) -> bool:
        return self.get(typing.cast(K, key), GONE) is not GONE

    def __iter__(self) -> Iterator[K]:
        yield from (key for key in self._base if self._above.get(key) is not GONE)
        yield from (key for key in self._above if key not in self._base)

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return repr(dict(self))


def with_entry(of: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """`of` with this entry."""
    return _with(of, key, value, n=len(of) + (key not in of))


def _with(of: Mapping[K, V], key: K, value: V, *, n: int) -> Mapping[K, V]:
    base, above = (of._base, of._above) if isinstance(of, Layered) else (of, {})
    above = {**above, key: value}
    if len(above) <= LEAST or len(above) ** 2 <= len(base):
        return Layered(base, above, n)
    whole = {**base, **above}  # keeps the hashes: those of workers are counted in Python
    for gone in [k for k, v in above.items() if v is GONE]:
        del whole[gone]
    return Layered(whole, {}, n)


def with_entries(of: Mapping[K, V], entries: Mapping[K, Any]) -> Mapping[K, V]:
    """`of` with these; without those that are GONE."""
    base, above = (of._base, of._above) if isinstance(of, Layered) else (of, {})
    if len(entries) <= LEAST or len(entries) ** 2 <= len(base):
        for key, value in entries.items():
            of = without_entry(of, key) if value is GONE else with_entry(of, key, value)
        return of
    whole = {**base, **above, **entries}
    for gone in [key for key, value in whole.items() if value is GONE]:
        del whole[gone]
    return Layered(whole, {}, len(whole))


def without_entry(of: Mapping[K, V], key: K) -> Mapping[K, V]:
    """`of` without this entry."""
    if key not in of:
        return of
    base, above = (of._base, of._above) if isinstance(of, Layered) else (of, {})
    if key not in base:
        return Layered(base, {k: v for k, v in above.items() if k != key}, len(of) - 1)
    return _with(of, key, GONE, n=len(of) - 1)


def less(of: Mapping[K, V], key: K) -> Mapping[K, V]:
    """`of` without this entry, where it is changed seldom and read often: copied at once."""
    if key not in of:
        return of
    copy = dict(of)
    del copy[key]
    return copy


class LayeredSet(Set[K], Generic[K]):
    """The keys of such a mapping."""

    __slots__ = ("_of",)

    def __init__(self, members: Iterable[K] = ()) -> None:
        self._of: Mapping[K, None] = dict.fromkeys(members)

    def __contains__(self, member: object) -> bool:
        return member in self._of

    def __iter__(self) -> Iterator[K]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return repr(set(self))


def with_member(of: Set[K], member: K) -> Set[K]:
    """`of` with this one."""
    return _of_keys(with_entry(_keys(of), member, None))


def with_members(of: Set[K], members: Iterable[K]) -> Set[K]:
    """`of` with these."""
    return _of_keys(with_entries(_keys(of), dict.fromkeys(members)))


def without_members(of: Set[K], members: Iterable[K]) -> Set[K]:
    """`of` without these."""
    return _of_keys(with_entries(_keys(of), dict.fromkeys(members, GONE)))


def _keys(of: Set[K]) -> Mapping[K, None]:
    return of._of if isinstance(of, LayeredSet) else dict.fromkeys(of)


def _of_keys(of: Mapping[K, None]) -> LayeredSet[K]:
    found: LayeredSet[K] = LayeredSet()
    found._of = of
    return found
