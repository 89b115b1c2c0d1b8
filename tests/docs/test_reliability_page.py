"""docs/reliability.md: each test that it names is there."""

from __future__ import annotations

import re

from support.places import ROOT, TESTS

PAGE = (ROOT / "docs" / "reliability.md").read_text()


def test_each_test_that_it_names_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 60 and PAGE.count("::") == len(named)
    texts = {file: (TESTS / file).read_text() for file in {file for file, _ in named}}
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in texts[file]] == []


def test_each_row_but_those_that_are_open_names_one() -> None:
    shown = PAGE.partition("\n## Open problems\n")[0]
    rows = [
        line
        for line in shown.splitlines()
        if line.startswith("| ") and not line.startswith("| what was tried")
    ]
    assert [row for row in rows if "::" not in row] == []


def test_it_is_linked() -> None:
    assert "(docs/reliability.md)" in (ROOT / "README.md").read_text()
