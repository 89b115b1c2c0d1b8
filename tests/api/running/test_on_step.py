"""A callback reaches the run by whichever way it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic.api.running import entry
from elastic.api.running.options import Options


@pytest.mark.parametrize("options", [None, Options(run_name="r")])
def test_the_callback_of_run_is_that_of_its_options(
    options: Options | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Options] = []

    def ran(folder: str, options: Options) -> Any:
        found.append(options)
        return SimpleNamespace(run="r", outcome="succeeded", signal=0)

    monkeypatch.setattr(entry, "run_folder", ran)

    def told(row: dict[str, Any]) -> None:
        raise AssertionError

    entry.run("a", options=options, on_step=told)
    entry.run("a", options=Options(on_step=told))
    assert [one.on_step for one in found] == [told, told]
    assert found[0].run_name == (options.run_name if options is not None else None)
