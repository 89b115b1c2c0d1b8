"""The example of docs/capacity.md is what the simulator says."""

from __future__ import annotations

import re
from dataclasses import replace

from support.places import ROOT
from support.sim.market import SLOW, play

from elastic.sim.scripted_faults import Fault

PAGE = ROOT / "docs" / "capacity.md"


def test_the_example_of_the_page() -> None:
    faults = [Fault(3000.0, "drought", pool="spot", lasts_s=3600.0)]
    faults += [Fault(3100.0 + k, "notice", k, 120.0, only="spot") for k in range(4)]
    run = play(faults, delays=replace(SLOW, work_s=60.0), steps=800, durable_every="auto")
    said = {
        f"{line.at_s / 60:.0f} min  {line.decision.reason}"
        for line in run.journal.lines
        if line.decision
    }
    page = PAGE.read_text()
    quoted = re.findall(r"^(\d+ min)  (.+)$", page, re.MULTILINE)
    assert len(quoted) == 5
    for when, text in quoted:
        assert any(one.startswith(when) and text in one for one in said), text
    assert f"after {run.hours * 60:.0f} minutes and ${run.state.usd:.2f}" in page
