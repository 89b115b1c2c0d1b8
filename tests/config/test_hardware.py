"""The file of measured hardware: where it is, what comes back, and one line for what is wrong with
it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.config.hardware import (
    PLACE,
    check_writable,
    known_hardware,
    path_of,
    read_hardware,
    write_hardware,
)
from elastic.errors import SpecError
from elastic.ledger.journal import decode, encode
from elastic.types import DriverStarted, HardwareProfile, ModelProfile

MEASURED = HardwareProfile(
    "H100", 9e14, 80 << 30, flop_per_s=(("bfloat16", 7e14),), reached=1.0, launch_s=4e-6,
    measured=("launch_s",), products=((512, 256, 768, 3e14),), crowded=((1, 5e10), (2, 4e10)),
    crowded_bytes=((1, 4e9),), collectives=(("all_gather", 2, 1e-4, 3e-10), ("send", 2, 1e-4,
    2e-10)),
)  # fmt: skip


def test_where_it_is() -> None:
    assert path_of("CPU", {"XDG_CACHE_HOME": "/c"}) == Path("/c/elastic/hardware/CPU.json")
    assert path_of("CPU", {}) == Path.home() / ".cache" / "elastic" / "hardware" / "CPU.json"
    assert path_of("H100", {PLACE: "/h", "XDG_CACHE_HOME": "/c"}) == Path("/h/H100.json")
    assert path_of("H100", {PLACE: "/h/mine.json"}) == Path("/h/mine.json")


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "H100.json"
    write_hardware(path, MEASURED, {"host": "me", "at": "2026-01-01"})
    assert read_hardware(path) == MEASURED
    assert [file.name for file in path.parent.iterdir()] == ["H100.json"]
    data = json.loads(path.read_text())
    assert (data["schema"], data["host"]) == (1, "me")
    data["profile"]["of_a_later_version"] = 3
    del data["profile"]["collectives"]
    path.write_text(json.dumps(data))
    assert read_hardware(path) == replace(MEASURED, collectives=())


def test_only_kinds_that_were_measured_are_known(tmp_path: Path) -> None:
    environment = {PLACE: str(tmp_path)}
    assert known_hardware(["CPU", "H100"], environment) == ()
    write_hardware(path_of("H100", environment), MEASURED, {})
    assert known_hardware(["CPU", "H100", "H100"], environment) == (MEASURED,)
    one = {PLACE: str(tmp_path / "H100.json")}
    assert known_hardware(["CPU"], one) == ()  # that file is of another kind
    assert known_hardware(["H100"], one) == (MEASURED,)


def test_the_journal_keeps_it() -> None:
    start = DriverStarted("r", 1, {}, (), ModelProfile(1, 1, ()), hardware=(MEASURED,))
    assert decode(json.loads(json.dumps(encode(start)))) == start


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "not a hardware profile (JSONDecodeError"),
        ("[]", "not a hardware profile (TypeError"),
        ("{}", "not a hardware profile (KeyError: 'schema')"),
        (
            '{"schema": 1, "profile": {"launch_s": "soon"}}',
            "not a hardware profile (TypeError: launch_s is 'soon')",
        ),
        (
            '{"schema": 1, "profile": {"crowded": 3}}',
            "not a hardware profile (TypeError: crowded is 3)",
        ),
        (
            '{"schema": 1, "profile": []}',
            "not a hardware profile (TypeError: its profile is no keys",
        ),
        (
            '{"schema": 1, "profile": {"launch_s": NaN}}',
            "not a hardware profile (TypeError: launch_s is nan)",
        ),
        (
            '{"schema": 1, "profile": {"crowded": [[1, 2, 3]]}}',
            "not a hardware profile (TypeError: crowded is [[1, 2, 3]])",
        ),
        ('{"schema": 1, "profile": ' + "[" * 100_000, "not a hardware profile (RecursionError"),
        (
            '{"schema": 2, "profile": {}}',
            "was written by a newer version of elastic (schema 2, this one reads 1)",
        ),
    ],
)
def test_one_line_for_a_bad_file(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "CPU.json"
    path.write_text(text)
    with pytest.raises(SpecError) as raised:
        known_hardware(["CPU"], {PLACE: str(tmp_path)})
    assert str(raised.value).startswith(f"{path}: {line}") and "elastic profile JOB" in str(
        raised.value
    )


def test_a_place_that_cannot_be_written_is_found_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "c.json")
    (tmp_path / "file").write_text("")
    for bad in (tmp_path, tmp_path / "file" / "x.json"):
        for writes in (check_writable, lambda path: write_hardware(path, MEASURED, {})):
            with pytest.raises(SpecError, match="give another --out FILE"):
                writes(bad)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]
