"""A shell in a folder of its own, and the promise that no process of it outlives the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.e2e.shell import Shell, children
from support.waiting import until


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    mark = f"mark-{tmp_path.name}-{id(tmp_path)}"
    made = Shell(tmp_path, {"ELASTIC_TEST_MARK": mark})
    yield made
    made.end()
    try:
        until(lambda: not children(mark), "the end of all processes that the test started")
    finally:
        for pid in children(mark):  # a test that failed leaves nothing to the next one
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
