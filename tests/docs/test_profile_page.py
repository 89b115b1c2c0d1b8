"""What docs/profile.md shows of a profile and of a scaling study is what they print."""

from __future__ import annotations

from typing import Any

from support.docs.pages import blocks

from elastic.observe.profiles.profile_bars import profile_lines, scaling_lines
from elastic.observe.profiles.profile_files import RankParts, mean_parts

MS = 1e-3
RANKS = {
    0: ("fsdp 0/3 tp 0/2", {"compute": 550, "optimizer": 9, "fsdp": 164, "tp": 233, "commit": 21,
                            "data": 0.6, "copies": 2.2, "idle": 27}),
    3: ("fsdp 1/3 tp 1/2", {"compute": 457, "optimizer": 8, "fsdp": 166, "tp": 329, "commit": 18,
                            "data": 0.6, "copies": 2.2, "idle": 28}),
}  # fmt: skip
PLANNED = {"compute": 403, "optimizer": 2.71, "fsdp": 3.48, "tp": 17.6, "commit": 4, "jitter": 5.1}


def profiled() -> dict[str, Any]:
    ranks = [
        RankParts(rank, "", at, (69, 70, 71), sum(parts.values()) * MS,
                  {name: ms * MS for name, ms in parts.items()}, {}, False)
        for rank, (at, parts) in RANKS.items()
    ]  # fmt: skip
    planned = {name: ms * MS for name, ms in PLANNED.items()}
    return {
        "run": "live", "profile_id": "20261125-201708-28a0", "layout": "dp_shard=3,tp=2",
        "folder": "/runs/live/profiles/20261125-201708-28a0",
        "ranks": [one.plain() for one in ranks],
        "total": {
            "step_s": sum(one.step_s for one in ranks) / len(ranks), "parts": mean_parts(ranks),
        },
        "planned": {
            "step_s": sum(planned.values()), "parts": planned, "hardware_known": False,
        },
    }  # fmt: skip


def scaled() -> dict[str, Any]:
    each = {"planned_tokens_per_s": None, "hardware_known": False, "parts": {}}
    first, second = 4662.9, 4351.6
    rows = [
        each | {"workers": 2, "layout": "dp_shard=2", "step_s": 0.659, "tokens_per_s": first,
                "linear_tokens_per_s": first, "efficiency": 1.0},
        each | {"workers": 4, "layout": "pp=2,dp_shard=2", "step_s": 0.706,
                "tokens_per_s": second, "linear_tokens_per_s": 2 * first,
                "efficiency": second / first / 2},
    ]  # fmt: skip
    return {"job": "quickstart", "scale": rows}


def test_the_page_shows_what_is_printed() -> None:
    run, scale = (block.text.splitlines() for block in blocks("profile.md", "text"))
    assert run == profile_lines(profiled())
    assert scale == scaling_lines(scaled())[1:4]
