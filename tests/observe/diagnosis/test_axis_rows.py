"""Communication by axis: what is planned beside what a profile has measured, on the page of a report
and in its text."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.observe.bound_runs import GPU, MODEL, BoundRun, evidence_of
from support.observe.html_pages import PageSeen

from elastic.api.diagnose import communicated, diagnosed, step_bytes, step_parts
from elastic.api.show_dashboard import TracedProfiles
from elastic.ledger.journal import write_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe.diagnosis.axis_rows import AxisRow, axis_rows, shown
from elastic.observe.reporting import report
from elastic.storage import LocalStorage
from elastic.types import Layout, RankProfiled

PROFILED = RankProfiled(1, "p1", 0, 19, 1, 100)
RUN = BoundRun().with_(
    hardware=(replace(GPU, link_bytes_per_s=1e9),),
    model=replace(MODEL, n_params=400_000_000),
    layout=Layout(dp_shard=2, tp=2),
)
TRACED = {
    "schema": 1, "rank": 0, "worker": "n0/0", "at": "", "steps": [20], "step_s": 1.0,
    "parts": {"compute": 0.5, "fsdp": 0.3, "tp": 0.12}, "collectives": {"fsdp": 0.6, "tp": 0.12},
    "on_device": True,
}  # fmt: skip


@pytest.fixture
def profiled(tmp_path: Path) -> RunFolder:
    lines = RUN.with_(at_step=((21, (PROFILED,)),)).lines()
    (tmp_path / "journal.jsonl").write_text("".join(write_line(one) + "\n" for one in lines))
    run = RunFolder(LocalStorage(tmp_path), tmp_path)
    run.storage.put("profiles/p1/rank-0.json", json.dumps(TRACED).encode())
    return run


def test_planned_stands_beside_measured(profiled: RunFolder) -> None:
    seen = evidence_of(profiled.lines())
    assert seen.main is not None
    planned, sent = step_parts(seen, seen.main.plan), step_bytes(seen, seen.main.plan)
    rows = {one.axis: one for one in communicated(seen, profiled.storage)}
    assert list(rows) == ["dp_shard", "tp", "all axes"]
    assert rows["dp_shard"] == AxisRow("dp_shard", sent["fsdp"], planned["fsdp"], 0.3, 0.6)
    assert rows["tp"].measured_s == rows["tp"].busy_s == 0.12 and sent["tp"] > 0
    assert (rows["all axes"].measured_s, rows["all axes"].busy_s) == (0.0, 0.0)
    unread = communicated(seen)  # no profile can be read
    assert [(one.measured_s, one.busy_s) for one in unread] == [(None, None)] * 3
    told = TracedProfiles().communication(seen, seen.main.plan, profiled.storage)
    assert told == tuple(rows.values())


def test_bytes_are_known_without_the_hardware() -> None:
    seen = evidence_of(RUN.with_(hardware=()).lines())
    rows = communicated(seen)
    assert [one.planned_s for one in rows] == [None] * 3 and all(one.n_bytes for one in rows)
    assert communicated(evidence_of([])) == ()
    assert shown(rows) == [], "a table of dashes says nothing"


def test_what_sends_nothing_has_no_row() -> None:
    assert axis_rows({}, {}, measured={}, busy={}) == () and shown(()) == []
    (row,) = axis_rows({"tp": 2e6}, {"fsdp": 0.0}, measured={}, busy={})
    assert row.plain() == {
        "axis": "tp", "n_bytes": 2e6, "planned_s": 0.0, "measured_s": None, "busy_s": None
    }  # fmt: skip
    assert shown([row])[1].split() == ["tp", "2.0", "MB", "0", "ms", "-", "-"]
    assert shown([replace(row, axis="all axes")])[1].startswith("end of step "), "it is no sum"


def test_a_report_says_it_as_text_data_and_page(profiled: RunFolder) -> None:
    read = partial(communicated, storage=profiled.storage)
    diagnosis = partial(diagnosed, storage=profiled.storage)
    data, lines = report.write(profiled, None, diagnosis, communication=read)
    at = lines.index("COMMUNICATION")
    assert lines[at + 2].split()[0] == "dp_shard" and "300 ms" in lines[at + 2]
    kept = json.loads((profiled.folder / "report.json").read_text())
    assert kept["communication"] == data["communication"] and len(data["communication"]) == 3
    page = PageSeen((profiled.folder / report.PAGE).read_text())
    assert page.wrong == [] and "What GPUs send each other" in page.text
    assert "as a profile of the run has measured it" in page.text
    _, silent = report.write(profiled)
    assert "COMMUNICATION" not in silent
    assert "What GPUs send" not in PageSeen((profiled.folder / report.PAGE).read_text()).text
