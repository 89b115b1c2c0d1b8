"""Scripts run in this process, under the name `__main__`; one that a test leaves within its loop would
still have it, and processes that later tests start would run it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def main_as_before() -> Iterator[None]:
    before = sys.argv, sys.modules["__main__"], list(sys.path)
    yield
    sys.argv, sys.modules["__main__"], sys.path[:] = before
