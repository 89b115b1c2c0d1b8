"""docs/heterogeneous-gpus.md says what the code does."""

from __future__ import annotations

import re

import yaml
from support.places import ROOT

from elastic.config.drill import DrillSpec
from elastic.config.job import JobSpec
from elastic.policy.faults import retries
from elastic.policy.speed import relayout, share_rebalance, speeds

PAGE = (ROOT / "docs" / "heterogeneous-gpus.md").read_text()


def test_the_drills_are_drills() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    drills = [DrillSpec.model_validate(entry) for entry in yaml.safe_load(block)]
    assert {kind for drill in drills for kind in drill.plain()} >= {
        "slow",
        "stall",
        "corrupt",
        "factor",
        "unit_s",
        "jitter",
        "gpu",
    }


def test_the_keys_and_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.M)
    assert dict(rows) == {
        "rebalance": "true",
        "across_zones": "false",
        "check_numbers_every": "auto",
    }
    for key, default in rows:
        assert str(JobSpec.model_fields[key].default).lower() == default


def test_the_numbers() -> None:
    assert (
        share_rebalance.SURE,
        share_rebalance.LASTING,
        share_rebalance.LASTING_S,
        speeds.BAND,
    ) == (0.03, 0.03, 900.0, 0.1)
    assert (
        "still has 3 % less to do" in PAGE
        and "over the last 15\nminutes" in PAGE
        and "10 % for clocks and heat" in PAGE
    )
    assert (share_rebalance.FEW, share_rebalance.ENOUGH) == (
        16,
        24,
    ) and "fewer\nthan 16 steps is made exact once when 24" in PAGE
    assert (relayout.MUCH, relayout.REPLACE_AFTER_S, relayout.MOVES_MOST) == (3.0, 60.0, 3)
    assert "more than 3 times slower for a minute" in PAGE and "At most\nthree such moves" in PAGE
    assert (retries.SILENT_MOST, retries.PROCESS_MOST, speeds.WARM_UP_STEPS) == (2, 3, 4)
    assert (
        "stall three times within an hour" in PAGE
        and "fail four times" in PAGE
        and "of the first four" in PAGE
    )
