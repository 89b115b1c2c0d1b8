"""Of a tier that needs few files only these are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.file_marks import may_have, not_in_text
from tiers import SELECTED

TEXTS = {
    "none": "def test_a(): pass",
    "e2e": "pytestmark = pytest.mark.e2e",
    "cases": "from support.cases import meeting",
    "both": "@pytest.mark.e2e\n@pytest.mark.sampled(3)",
}


@pytest.mark.parametrize(
    ("tier", "read"),
    [
        ("unit", {"none", "e2e", "cases", "both"}),
        ("e2e", {"e2e", "both"}),
        ("whole", {"cases", "both"}),
    ],
)
def test_a_file_is_read_where_it_may_have_a_test_of_the_tier(
    tier: str, read: set[str], tmp_path: Path
) -> None:
    assert {name for name in TEXTS if may_have(_written(tmp_path, name), SELECTED[tier])} == read


@pytest.mark.parametrize("selected", ["", "slow", "e2e or slow"])
def test_nothing_is_left_out_by_words_that_name_no_tier(selected: str, tmp_path: Path) -> None:
    assert all(may_have(_written(tmp_path, name), selected) for name in TEXTS)


def test_a_marker_that_a_file_gets_from_elsewhere_is_named(tmp_path: Path) -> None:
    file = _written(tmp_path, "e2e")
    assert (
        not_in_text([(file, "e2e"), (file, "slow"), (_written(tmp_path, "cases"), "whole")]) == []
    )
    (said,) = not_in_text([(file, "whole"), (file, "whole")])
    assert said.startswith("test_e2e.py: a test is marked whole, which does not stand in its text")


def _written(folder: Path, name: str) -> Path:
    file = folder / f"test_{name}.py"
    file.write_text(TEXTS[name])
    return file
