"""A layout that computes another function: refused before the start where that is known, left
without a step where it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.e2e.runs import SOON_S, events, job, plans, run, went_on_as_if_nothing_happened
from support.e2e.shell import Shell
from support.places import FOREIGN

from elastic.sim.replay import replay
from elastic.types import Probed, WorkerFailed, agree


@pytest.mark.e2e
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("program", "layout", "said"),
    [
        (
            "residual_outside",
            "pp=2",
            "no pp: between layers.0 and layers.1 `forward` adds to the hidden state",
        ),
        ("batchnorm", "dp_shard=2", "no dp: layers.0.norm is a BatchNorm"),
        ("tp_forgets_out", "tp=2", "no tp: tp=2: it "),
        ("stochastic_depth", "dp_shard=2", "they would wait for each other's weights"),
    ],
)
def test_it_is_refused_in_one_line(tmp_path: Path, program: str, layout: str, said: str) -> None:
    shell = Shell(tmp_path)
    pools = [{"name": "spot", "market_type": "spot", "gpus_per_node": 2, "max_nodes": 1}]
    shell.job(program=str(FOREIGN / f"{program}.py"), layout=layout, pools=pools)
    code, _, err = shell.here("run", "tiny", "--json")
    (line,) = [
        line
        for line in err.splitlines()
        if not line.startswith("compares what each layout computes")
    ]
    assert code == 2 and said in line, err


@pytest.mark.e2e
# its halves: tests/worker/session/test_layout_probe.py and tests/sim/test_wrong_layouts.py
@pytest.mark.whole
def test_a_transition_into_such_a_layout_is_taken_back(tmp_path: Path) -> None:
    """A notice leads from sharding into a pipeline that computes something else: no step of it
    counts, none is lost."""
    drill = [
        {"at_step": 10, "wrong_layout": True},
        {"at_step": 14, "notice": "any-spot", "deadline_s": SOON_S},
    ]
    folder = job(tmp_path, 50, drill, layout={6: "dp_shard=6", 4: "pp=2,dp_shard=2"})
    summary, lines = run(folder)
    failed = events(lines, WorkerFailed)
    assert {e.kind for e in failed} == {"layout"} and len({e.step for e in failed}) == 1
    refused = {e.generation for e in failed}
    first, wrong = plans(lines)[:2]
    # the search may take cp before
    right = next(plan for plan in plans(lines)[2:] if plan.generation not in refused)
    assert (wrong.layout.pp, right.layout.pp, right.layout.cp, right.cause) == (2, 1, 1, "rollback")
    assert right.resume.step == failed[0].step and right.resume.generation == first.generation
    rows = {t["generation"]: t for t in summary["transitions"]}
    assert not any(rows[number]["loss_equal"] for number in refused)
    assert (
        rows[right.generation]["loss_equal"] is True and rows[right.generation]["steps_lost"] == 0
    )
    probed = [e for e in events(lines, Probed) if e.expected is not None]
    assert probed and all(agree(e.loss, e.expected, 1e-4) for e in probed)
    assert any(
        "no layout with pp any more" in (line.decision.reason if line.decision else "")
        for line in lines
    )
    assert replay(lines).identical
    # nothing came of them
    summary["transitions"] = [
        row for row in summary["transitions"] if row["generation"] not in refused
    ]
    went_on_as_if_nothing_happened(summary, lines, 50)
