"""Errors as their user sees them: frames of the user's files, and the one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import elastic
from elastic.errors import SpecError, alike
from elastic.text import LOG_MARK
from elastic.user_frames import log_text, plainly, user_traceback


def caught(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as found:
        call()
    return found.value


def test_frames_that_are_not_the_users_are_left_out() -> None:
    def mine() -> None:
        try:
            Path(3)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError("seen") from error

    found = caught(lambda: sorted([1], key=lambda one: mine()))
    text = user_traceback(found)
    assert text.count("Traceback (most recent call last):") == 2, "of both errors"
    assert "pathlib" not in text and f'File "{__file__}"' in text
    assert text.endswith("ValueError: seen\n")


def test_the_log_has_the_whole_behind_it() -> None:
    text = log_text(caught(lambda: Path(3)))  # type: ignore[arg-type]
    told = [line for line in text.splitlines() if not line.startswith(LOG_MARK)]
    whole = [line for line in text.splitlines() if line.startswith(LOG_MARK)]
    assert any("pathlib" in line for line in whole) and not any("pathlib" in line for line in told)
    assert told[-1].startswith("TypeError: ") and whole[-1] == f"{LOG_MARK}{told[-1]}"


def test_where_no_frame_is_the_users_all_are_shown() -> None:
    found = caught(lambda: alike(3, ["a"]))  # type: ignore[arg-type]
    assert found.__traceback__ is not None
    trace = found.__traceback__
    while trace.tb_frame.f_code.co_filename == __file__ or "pytest" in str(trace.tb_frame):
        assert trace.tb_next is not None
        trace = trace.tb_next
    text = user_traceback(found.with_traceback(trace))
    assert "errors.py" in text and "difflib.py" in text


def test_an_error_of_ours_that_nobody_catches_ends_with_the_users_frames(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = caught(lambda: elastic.Program(modle=1))  # type: ignore[call-arg]
    sys.excepthook(type(error), error, error.__traceback__)
    told = capsys.readouterr().err
    assert "errors.py" not in told and f'File "{__file__}"' in told
    assert told.splitlines()[-1].startswith("elastic.errors.SpecError: elastic.Program(modle=...)")
    own = caught(lambda: Path(3))  # type: ignore[arg-type]
    sys.excepthook(type(own), own, own.__traceback__)
    assert "pathlib" in capsys.readouterr().err, "of others nothing is left out"


def test_a_hook_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None: ...

    monkeypatch.setattr(sys, "excepthook", mine)
    with pytest.raises(SpecError), plainly(SpecError):
        raise SpecError("wrong")
    assert sys.excepthook is mine
