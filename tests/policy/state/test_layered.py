"""A mapping with layers is a mapping, and the ones before it stay what they were."""

from __future__ import annotations

from collections.abc import Mapping, Set
from random import Random

from elastic.policy.state import layered
from elastic.policy.state.layered import (
    GONE,
    less,
    with_entries,
    with_entry,
    with_member,
    with_members,
    without_entry,
    without_members,
)


def test_it_has_what_a_dict_has_after_each_change() -> None:
    random = Random(3)
    plain: dict[int, int] = {}
    found: Mapping[int, int] = {}
    before: list[tuple[Mapping[int, int], dict[int, int]]] = []
    for i in range(400):
        key = random.randrange(60)
        before.append((found, dict(plain)))
        if random.random() < 0.7:
            plain[key], found = i, with_entry(found, key, i)
        else:
            plain.pop(key, None)
            found = without_entry(found, key)
        assert found == plain and len(found) == len(plain) and (key in found) == (key in plain)
    assert all(then == copied for then, copied in before), "one that was there before has changed"


def test_an_entry_more_copies_the_root_of_the_size() -> None:
    n = 4096
    found: Mapping[int, int] = dict.fromkeys(range(n), 0)
    copied = 0
    for i in range(n):
        base = found
        found = with_entry(found, i, 1)
        assert isinstance(found, layered.Layered)
        copied += len(found._above) or len(found._base)
        assert base is not found
    assert copied < 3 * n * n**0.5
    assert found == dict.fromkeys(range(n), 1)


def test_a_set_has_what_a_frozenset_has_after_each_change() -> None:
    random = Random(5)
    plain: frozenset[int] = frozenset(range(20))
    found: Set[int] = plain
    for _ in range(300):
        member = random.randrange(40)
        if random.random() < 0.5:
            plain, found = plain | {member}, with_member(found, member)
        else:
            plain, found = plain - {member}, without_members(found, [member])
        assert found == plain and plain == found and len(found) == len(plain)
        assert found >= plain and not found >= plain | {99} and found | {99} == plain | {99}
        assert plain & found == plain and found - {member} == plain - {member}
        assert (member in found) == (member in plain) and hash(found) == hash(
            without_members(with_member(found, 99), [99])
        )


def test_many_entries_at_once_are_many_one_by_one() -> None:
    random = Random(7)
    plain: dict[int, int] = {}
    found: Mapping[int, int] = {}
    for i in range(200):
        entries: dict[int, object] = {
            random.randrange(90): GONE if random.random() < 0.4 else i
            for _ in range(random.choice([1, 3, 9, 40]))
        }
        before, copied = found, dict(plain)
        for key, value in entries.items():
            if value is GONE:
                plain.pop(key, None)
            else:
                plain[key] = i
        found = with_entries(found, entries)
        assert found == plain and len(found) == len(plain) and before == copied
        assert set(found) == set(plain)
    members = with_members(frozenset({1}), range(2, 40))
    assert members == frozenset(range(1, 40))
    assert without_members(members, range(5, 60)) == frozenset(range(1, 5))


def test_less_is_a_plain_copy_in_the_same_order() -> None:
    before = {1: "a", 2: "b", 3: "c"}
    found = less(before, 2)
    assert list(found.items()) == [(1, "a"), (3, "c")] and 2 in before
    assert less(before, 9) is before
