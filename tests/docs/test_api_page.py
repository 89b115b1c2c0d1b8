"""docs/api.md is what the package exports, as its docstrings say it."""

from __future__ import annotations

import inspect

import pytest
from support.docs import api_reference
from support.docs.api_reference import PAGE, entry, missing, of, page, signature


def test_the_page_is_that_of_the_package() -> None:
    assert PAGE.read_text() == page(), "python tests/support/docs/api_reference.py writes it anew"


def test_every_exported_name_is_there_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not missing()
    names = [name for _, _, names in api_reference.SECTIONS for name in names]
    assert not [name for name in names if not inspect.getdoc(of(name))]
    monkeypatch.setattr(api_reference, "SECTIONS", ())
    assert "Program" in missing()


def test_a_signature_shows_defaults_and_what_is_given_by_name() -> None:
    def made(a: int, b: str = "x", *, c: object = object) -> None: ...

    assert signature("made", made) == "made(a: int, b: str = 'x', *, c: object = object)"
    assert ".stop(" not in entry("Layout") and "### Layout" in entry("Layout")
    mixture = entry("MixtureOfExperts")
    assert "from elastic.models.experts import MixtureOfExperts" in mixture
    assert "    top_k: int," in mixture and ".forward" not in mixture
