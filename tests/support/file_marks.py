"""Which files a tier needs not read: those in whose text none of its markers stands.

Reading a test file imports what it tests. Of 500 files a fifth has tests of the end-to-end tier, and
each process of pytest-xdist reads them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import chain, combinations
from pathlib import Path

from _pytest.mark.expression import Expression

# `sampled` and `support.cases.meeting` make some of a test's cases `whole`
WORDS = {
    "e2e": r"mark\.e2e",
    "whole": r"mark\.whole|mark\.sampled|support\.cases",
    "gpu": r"mark\.gpu",
}


@cache
def marks_in(file: Path) -> frozenset[str]:
    text = file.read_text()
    return frozenset(name for name, words in WORDS.items() if re.search(words, text))


def may_have(file: Path, selected: str) -> bool:
    """Whether a test with some of the file's markers is selected by this `-m` expression. One that
    names other markers than those of the tiers may select anything."""
    names = set(re.findall(r"\w+", selected)) - {"and", "or", "not"}
    if not selected or names - set(WORDS):
        return True
    marks = marks_in(file)
    some = chain.from_iterable(combinations(marks, n) for n in range(len(marks) + 1))
    wanted = Expression.compile(selected)
    return any(wanted.evaluate(lambda name, held=held, **_: name in held) for held in some)


def not_in_text(tests: Iterable[tuple[Path, str]]) -> list[str]:
    """Of (file, marker of a test in it): those that `marks_in` does not find."""
    return sorted(
        {
            f"{file.name}: a test is marked {mark}, which does not stand in its text as {WORDS[mark]}"
            for file, mark in tests
            if mark in WORDS and mark not in marks_in(file)
        }
    )
