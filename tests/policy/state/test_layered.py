"""A mapping with layers is a mapping, and the ones before it stay what they were."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from elastic.policy.state import layered
from elastic.policy.state.layered import with_entry, without_entry


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
