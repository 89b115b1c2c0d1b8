"""The command line called in this process: its exit code, what it printed, and its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.cli.command_line import main


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    code, out, _ = called(capsys, *words, "--json")
    assert code == 0
    return json.loads(out)
