"""`elastic why`: a week on one screen, what repeats as one line, filters."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.sim.market import SLOW, play, weather

from elastic.cli.command_line import main
from elastic.ledger.journal import Line, write_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import why_lines
from elastic.observe.accounting.accounts import account
from elastic.observe.diagnosis import doctor
from elastic.observe.diagnosis.verdicts import RunVerdict
from elastic.observe.reporting.report_page import page
from elastic.observe.reporting.run_seen import seen_of, seen_of_run
from elastic.observe.run_view import View, view_of
from elastic.observe.why_lines import MOST, Wanted
from elastic.storage import open_storage
from elastic.types import PlanEntered

DAY_S = 86400.0


@pytest.fixture(scope="module")
def week_lines() -> list[Line]:
    """Six days on a spot market, until the budget is spent; a step takes four minutes."""
    slow = replace(SLOW, work_s=960.0)
    run = play(weather(3, 168.0), delays=slow, steps=9000, budget_usd=600.0)
    return run.journal.lines


@pytest.fixture(scope="module")
def week(week_lines: list[Line]) -> View:
    return view_of(week_lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of some hours."""
    made = tmp_path_factory.mktemp("runs") / "hours"
    made.mkdir()
    lines = play(weather(5, 12.0), steps=120).journal.lines
    (made / "journal.jsonl").write_text("".join(write_line(line) + "\n" for line in lines))
    return made


def said(view: View) -> list[str]:
    told = why_lines.story(view, view.notes)
    return [row.text for row in why_lines.short(view, told, len(view.notes))]


def test_one_screen_tells_the_story_of_a_week(week: View) -> None:
    assert week.at_s - week.started_at_s > 4 * DAY_S and len(week.notes) > 2000
    lines = said(week)
    text = "\n".join(lines)
    assert 10 < len(lines) <= MOST + 2
    assert "stopped at step" in lines[0] and "plans entered" in lines[0] and "$" in lines[0]
    assert "times: pool spot has no further node: no capacity, last at" in text
    assert "times: new plans (notice)" in text and "times: new plans (loss)" in text
    assert "is almost spent" in lines[-2] and "--all" in lines[-1]


@pytest.mark.slow
def test_what_it_cost_and_what_to_change_stand_above_the_story(
    folder: Path, week_lines: list[Line]
) -> None:
    rows = [row.text for row in why_lines.summary(seen_of(week_lines), ())]
    assert re.fullmatch(
        r"cost: goodput 9\d % of the paid GPU time, .*\d % wasted progress.*, "
        r"\$\d+\.\d\d \(\d+ %\) less than the same training on on-demand nodes",
        rows[0],
    )
    assert re.fullmatch(
        r"to change: budget_usd: \$600.00 was enough for 1,\d+ of 9,000 steps; at this pace all of "
        r"them cost about \$\d,\d+",
        rows[1],
    )
    html = page(seen_of(week_lines), ())
    assert "<b>The budget</b>: $600.00 was enough for" in html
    assert "Nothing else took a noticeable part of the run's time." in html
    found = RunVerdict("data", 0.2, 1.0, "steps waited", "data.loader_workers: 4")
    hours = seen_of_run(RunFolder.of(open_storage(folder)))
    rows = [row.text for row in why_lines.summary(hours, (found,))]
    assert rows[1] == f"to change: {found.line}"
    assert why_lines.summary(hours, ())[1].text == "to change: nothing stands out"


def test_doctor_counts_no_echoes_and_names_the_budget_that_ended_a_run(week: View) -> None:
    checks = {check.name: check for check in doctor.run_troubles(week)}
    failed = [note.text for note in week.notes if note.kind == "WorkerFailed"]
    own = [text for text in failed if "(collective)" not in text]
    assert checks["worker failures"].found.startswith(f"{len(own)}, the last at step")
    assert 0 < len(own) < len(failed)
    assert checks["budget"].verdict == "look" and "raise budget_usd" in checks["budget"].hint
    assert [*checks][:2] == ["phase", "budget"]


def test_who_drives_it_no_more_is_told(week: View) -> None:
    view = replace(week, state=replace(week.state, phase="running", stop=None))
    assert ": running at step" in why_lines.head(view)
    assert ": interrupted at step" in why_lines.head(view, driven=False)


def test_what_is_folded_is_counted(week: View) -> None:
    told = why_lines.story(week, week.notes)
    n = sum(note.kind == "RequestFailed" for note in week.notes)
    assert sum(one.n for one in told if one.kind == "RequestFailed") == n > 100
    entered = sum(note.kind == "PlanEntered" for note in week.notes)
    assert sum(one.n for one in told if one.kind == "PlanEntered") == entered


def test_a_short_run_has_a_line_for_each_plan_with_cause_and_numbers(folder: Path) -> None:
    lines = play([], steps=20).journal.lines
    view = view_of(lines)
    told = why_lines.story(view, view.notes)
    (start,) = (one for one in told if one.kind == "PlanEntered")
    assert start.text.startswith("generation 1 (start): dp_shard=4 on 4 workers")
    assert all(one.n == 1 for one in told)


def test_a_pause_and_steps_that_are_done_again_stand_beside_the_plan(week: View) -> None:
    told = [why_lines._told(week, note) for note in week.notes if note.kind == "PlanEntered"]
    losses = [one for one in told if one is not None and one.key == "plan loss"]
    assert any(one.lost for one in losses) and all(one.pause_s >= 0 for one in losses)
    assert any("step again" in one.text and "paused" in one.text for one in losses)


def test_a_pause_is_as_long_as_the_report_says() -> None:
    lines = play(weather(5, 12.0), steps=120).journal.lines
    found, view = account(lines).transitions, view_of(lines)
    told = {
        event.generation: one.pause_s
        for note in view.notes
        if isinstance(event := note.about, PlanEntered) and (one := why_lines._told(view, note))
    }
    n_steps = Counter(point.generation for point in view.points)
    settled = [one for one in found if n_steps[one.generation] > 1]
    pauses = [one.pause_s for one in settled]
    assert len(pauses) >= 4 and max(pauses) > 1.0
    assert [told[one.generation] for one in settled] == pytest.approx(pauses, abs=0.01)


def test_filters_by_node_kind_and_time(week: View) -> None:
    node = list(week.nodes)[10]
    of_node = why_lines.notes_of(week, Wanted(node=node))
    assert of_node and any(note.kind == "PlanEntered" for note in of_node)
    assert all(note.kind == "PlanEntered" or node in note.text for note in of_node)
    # spot-1 is not spot-10
    first = why_lines.notes_of(week, Wanted(node="spot-1", kind="notice"))
    assert {note.text.split()[2] for note in first} <= {"spot-1"}
    kinds = {note.kind for note in why_lines.notes_of(week, Wanted(kind="notice"))}
    assert kinds and kinds <= {"Notice", "NoticeWithdrawn", "NodeWarned"}
    late = why_lines.notes_of(week, Wanted(since_s=7200.0, until_s=3600.0))
    assert all(week.at_s - 7200 <= note.at_s <= week.at_s - 3600 for note in late)
    assert len(late) < len(why_lines.notes_of(week, Wanted(since_s=7200.0))) < len(week.notes)


def test_times_after_two_days_have_the_day(week: View) -> None:
    assert why_lines.when(week, week.started_at_s + 3725) == "1:02:05"
    assert why_lines.when(week, week.started_at_s + 3 * DAY_S + 3725) == "3d 01:02"


def test_every_line_has_the_time_that_the_story_has(week: View) -> None:
    note = next(one for one in week.notes if one.at_s > week.started_at_s + 3600)
    (row,) = why_lines.every(week, [note])
    assert row.text.split("  step ")[0].strip() == why_lines.when(week, note.at_s)
    week.at_s, before = week.started_at_s + 3599, week.at_s
    (row,) = why_lines.every(week, [note])
    week.at_s = before
    assert row.text.startswith(f"{note.at_s - week.started_at_s:8.1f} s  step {note.step}")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--node", "nobody"], "--node nobody: no node of this run"),
        (["--kind", "weather"], "--kind weather: must be one of plan, notice, loss"),
    ],
)
def test_a_filter_that_nobody_knows_is_one_line(
    folder: Path, words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(folder), *words]) == 2
    told = capsys.readouterr().err
    assert wrong in told and told.count("\n") == 1


def test_json_has_all_decisions_and_all_has_all_lines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"at_s", "step", "kind", "text"} == set(data[0])
    assert main(["why", str(folder), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(data) and sum("=> " in line for line in lines) == sum(
        one["kind"] == "Decision" for one in data
    )
    assert main(["why", str(folder), "--json", "--last", "3", "--kind", "decision"]) == 0
    assert [one["kind"] for one in json.loads(capsys.readouterr().out)] == ["Decision"] * 3
    assert main(["why", str(folder)]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 40 and "\x1b" not in short


def test_on_a_terminal_lines_are_cut_to_its_width(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["why", str(folder)]) == 0
    colored = capsys.readouterr().out
    lines = re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()
    assert 3 < len(lines) <= 40 and all(len(line) <= 80 for line in lines) and "\x1b" in colored


def test_a_time_that_is_none_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["why", str(folder), "--since", "yesterday"])
    assert ended.value.code == 2 and "'yesterday' must be a time" in capsys.readouterr().err
