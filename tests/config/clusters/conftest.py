"""A user of these tests has made a token."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def made_token(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").touch()
    monkeypatch.setenv("HOME", str(home))
