"""What a profile and a scaling study look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.errors import SpecError
from elastic.observe.profiles.profile_bars import (
    PARTS,
    bar,
    planned_parts,
    profile_lines,
    save_scaling,
    scaling_lines,
)
from elastic.observe.profiles.profile_files import RankParts, mean_parts, read_profile
from elastic.storage import LocalStorage
from elastic.worker.profile import trace_parts


def test_every_part_of_a_trace_has_a_letter_of_its_own_and_a_sentence() -> None:
    assert set(PARTS) == set(trace_parts.PARTS)
    assert len({letter for letter, _, _ in PARTS.values()}) == len(PARTS)
    assert all(about for _, _, about in PARTS.values())


def test_a_bar_is_as_long_as_its_share_and_in_order() -> None:
    parts = {"idle": 0.1, "tp": 0.3, "compute": 0.6}
    assert bar(parts, 1.0, 22) == "[CCCCCCCCCCCCtttttt..]"
    assert bar(parts, 2.0, 22) == "[CCCCCCttt.]"
    assert bar({}, 0.0, 22) == "[]"


def rank(number: int, **parts: float) -> RankParts:
    return RankParts(number, f"a/{number}", "", (3, 4), sum(parts.values()), parts, {}, False)


def shown(planned: dict[str, Any] | None) -> list[str]:
    ranks = [rank(0, compute=0.5, tp=0.1), rank(1, compute=0.3, tp=0.3)]
    total = {"step_s": 0.6, "parts": mean_parts(ranks)}
    return profile_lines(
        {
            "run": "r", "profile_id": "p", "layout": "tp=2", "folder": "/r/profiles/p",
            "ranks": [one.plain() for one in ranks], "total": total, "planned": planned,
        }
    )  # fmt: skip


def test_what_was_planned_stands_beside_each_part() -> None:
    parts = {"products": 0.2, "attention": 0.1, "moved": 0.05, "tp": 0.25, "jitter": 0.01}
    planned = {"step_s": 0.61, "parts": planned_parts(parts), "hardware_known": True}
    text = shown(planned)
    rows = {line.split()[1]: line for line in text if " ms" in line and line[1:3] == "  "}
    assert "400 ms  66.7%   350 ms" in rows["compute"]
    assert "200 ms  33.3%   250 ms" in rows["tp"]
    assert "0 ms   0.0%    10 ms" in rows["jitter"]
    assert not any("default hardware" in line for line in text)


def test_of_hardware_that_nobody_has_measured_it_says_so() -> None:
    planned = {"step_s": 0.61, "parts": {"compute": 0.1}, "hardware_known": False}
    assert any("elastic profile JOB does" in line for line in shown(planned))
    assert any(line.startswith("C  compute") and "  -  " in line for line in shown(None))


def study(planned: float | None = 900.0) -> dict[str, Any]:
    row = {
        "layout": "dp_shard=1", "step_s": 0.2, "planned_tokens_per_s": planned,
        "hardware_known": planned is not None, "parts": {"compute": 0.15, "fsdp": 0.05},
    }  # fmt: skip
    return {
        "job": "j",
        "scale": [
            row | {"workers": 1, "tokens_per_s": 1000.0, "linear_tokens_per_s": 1000.0,
                   "efficiency": 1.0},
            row | {"workers": 4, "tokens_per_s": 3000.0, "linear_tokens_per_s": 4000.0,
                   "efficiency": 0.75},
        ],
    }  # fmt: skip


def test_a_scaling_study_is_a_row_and_a_bar_for_each_number_of_workers() -> None:
    lines = scaling_lines(study())
    assert lines[3].split() == ["4", "dp_shard=1", "200", "ms", "3,000", "4,000", "75%", "900"]
    assert [line[:6] for line in lines if "[" in line] == ["   1 [", "   4 ["]
    assert not any("nobody has measured" in line for line in lines)
    assert any("nobody has measured" in line for line in scaling_lines(study(None)))


@pytest.mark.parametrize("planned", [900.0, None])
def test_a_picture_of_it(tmp_path: Path, planned: float | None) -> None:
    file = save_scaling(study(planned), tmp_path / "of" / "it.png")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_profile_of_a_newer_elastic_is_refused(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("profiles/p/rank-0.json", b'{"schema": 2}')
    with pytest.raises(SpecError, match=r"written by a newer elastic \(schema 2\)"):
        read_profile(LocalStorage(tmp_path), "p")
