"""docs/job-reference.md is what the model says, and says something of each of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field
from support.docs import job_reference
from support.docs.job_reference import PAGE, Section, Words, missing, page, rows

from elastic.config.strict_model import Strict


def test_the_page_is_that_of_the_model() -> None:
    assert PAGE.read_text() == page(), "python tests/support/docs/job_reference.py writes it anew"


def test_every_key_has_its_row() -> None:
    assert not missing()


def test_every_page_that_a_row_names_is_there() -> None:
    named = {words.page for section in job_reference.SECTIONS for words in section.keys.values()}
    assert not [name for name in named - {""} if not (PAGE.parent / name).is_file()]


class Made(Strict):
    """A model with a key of each sort."""

    n: int = Field(3, gt=0)
    word: str | None = None
    yes: bool = True


def test_a_row_shows_type_range_default_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    section = Section(
        "", "", Made, {"n": Words("how many", "nodes", "state.md"), "yes": Words("x")}
    )
    assert list(rows(section)) == [
        "| `n` | whole number > 0 | 3 | nodes | how many | [state.md](state.md) |",
        "| `yes` | true, false | true |  | x |  |",
    ]
    monkeypatch.setattr(job_reference, "SECTIONS", (section,))
    assert missing() == ["Made.word is on no row"]
    made = Section("", "", Made, dict.fromkeys(("n", "yes", "word", "more"), Words("")))
    monkeypatch.setattr(job_reference, "SECTIONS", (made,))
    assert missing() == ["Made has no more"]


def test_the_page_is_where_it_should_be() -> None:
    assert Path("docs", "job-reference.md") == PAGE.relative_to(PAGE.parents[1])
