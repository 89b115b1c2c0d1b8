"""What a bench of many rows has written down is not measured twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulate import Written


def test_an_interrupted_bench_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    first = Written(str(path), 16)
    first.row("a", 1.1, lambda: {"elastic": 1})
    with pytest.raises(KeyboardInterrupt):
        first.row("a", 1.25, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    again, asked = Written(str(path), 16), []
    for times in (1.1, 1.25):
        again.row("a", times, lambda times=times: asked.append(times) or {"elastic": times})
    assert asked == [1.25]
    assert Written(str(path), 16).traces == {
        "a": {"1.1": {"elastic": 1}, "1.25": {"elastic": 1.25}}
    }
    with pytest.raises(SystemExit, match="of 16 starts, not 100"):
        Written(str(path), 100)
