"""The token of an embedded cluster: a file for its user alone, and no other token in its place. No
Ray is needed for that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from elastic.cluster.local import cluster_token


def test_each_token_is_new_and_for_its_user_alone(tmp_path: Path) -> None:
    tokens = []
    for name in "ab":
        (tmp_path / name).mkdir()
        cluster_token.write(str(tmp_path / name))
        file = tmp_path / name / cluster_token.FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        tokens.append(file.read_text())
    assert len(set(tokens)) == 2 and all(
        len(token) == 2 * cluster_token.TOKEN_BYTES for token in tokens
    )
    with pytest.raises(FileExistsError):
        cluster_token.write(str(tmp_path / "a"))


def test_the_cluster_s_token_is_the_only_one_and_afterwards_all_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "that of another cluster")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/elsewhere")
    with cluster_token.replaced(cluster_token.environment("/here")):
        assert (
            os.environ["RAY_AUTH_MODE"] == "token"
            and os.environ["RAY_AUTH_TOKEN_PATH"] == "/here/auth_token"
        )
        assert "RAY_AUTH_TOKEN" not in os.environ
    assert (
        os.environ["RAY_AUTH_TOKEN"] == "that of another cluster"
        and os.environ["RAY_AUTH_TOKEN_PATH"] == "/elsewhere"
    )
    assert "RAY_AUTH_MODE" not in os.environ
