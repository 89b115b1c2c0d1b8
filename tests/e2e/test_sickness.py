"""A worker that stalls though its process answers; rank 0 and silent data corruption are in
test_stories.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import events, job, plans, run, went_on_as_if_nothing_happened

from elastic.ledger.journal import Line
from elastic.sim.replay import replay
from elastic.types import Abort, DrillAsked, Silent

pytestmark = pytest.mark.whole


def at_s(lines: list[Line], kind: type) -> float:
    """When the first such event came."""
    return next(at for line in lines for at, event in line.events if isinstance(event, kind))


@pytest.mark.parametrize("rank", [3, 4])
def test_the_worker_that_stands_still_is_named_and_left_behind(tmp_path: Path, rank: int) -> None:
    """One GPU of a node: its own process answers, the others wait for it in a collective."""
    drill = [{"at_step": 30, "stall": f"rank:{rank}", "gpu": rank % 2}]
    folder = job(
        tmp_path, 60, drill, layout={6: "dp_shard=3,tp=2", 5: "dp_shard=5", 4: "dp_shard=4"}
    )
    summary, lines = run(folder)
    went_on_as_if_nothing_happened(summary, lines, 60)
    silent = events(lines, Silent)
    assert [e.worker for e in silent] == [plans(lines)[0].ranks[rank]], silent
    assert "has not come to collective" in silent[0].why and "in stand" in silent[0].why
    killed = [
        a.kill
        for line in lines
        if line.decision
        for a in line.decision.actions
        if isinstance(a, Abort)
    ]
    assert (silent[0].worker,) in killed
    lost = next(t for t in summary["transitions"] if t["cause"] == "loss")
    assert lost["pause_s"] < 40, "not that of the group's own timeout"
    named_s = at_s(lines, Silent) - at_s(lines, DrillAsked)
    print(
        f"rank {rank}: named {named_s:.1f} s after the drill, pause {lost['pause_s']:.1f} s: "
        f"{silent[0].why}"
    )
    assert replay(lines).identical
