"""What the view makes of a journal, also of one that is still written."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from threading import Timer
from threading import enumerate as enumerate_threads

import pytest
from rich.console import Console
from support.observe.odd_runs import two_phases
from support.observe.small_run import JOB, PLANS, POOLS, T0, lines, plan, step, tick
from support.waiting import until

from elastic.ledger.journal import Journal, Line
from elastic.observe import event_messages, run_tables, terminal
from elastic.observe.accounting.accounts import account
from elastic.observe.diagnosis import doctor
from elastic.observe.event_messages import drill, first_line
from elastic.observe.picture_parts import pools_table
from elastic.observe.plans.layout_drawing import draw, letters
from elastic.observe.reporting import report
from elastic.observe.reporting.loss_plot import save_loss
from elastic.observe.run_view import PACE_POINTS, View, view_of
from elastic.observe.terminal import LivePicture, Terminal, progress_line, start_line
from elastic.policy.state.fold import changes
from elastic.text import duration, size
from elastic.types import (
    Copy,
    CopyFailed,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NodesMute,
    PlanEntered,
    RequestFailed,
    RequestNodes,
    Resume,
    StepDone,
    Stop,
)


def test_view_of_a_whole_run() -> None:
    view = view_of(lines())
    assert (view.state.run, view.phase, view.step, view.steps, view.saved_step) == (
        "tiny-1",
        "succeeded",
        12,
        12,
        12,
    )
    assert {name: node.status for name, node in view.nodes.items()} == {
        "a": "lost",
        "b": "draining",
        "c": "prepared",
    }
    assert view.plan == PLANS[2]
    assert view.evaluations == {12: {"validation_loss": 4.9}}
    assert not any(view.wanted.values())


def test_a_driver_that_is_cut_off_is_told_of_while_it_is() -> None:
    begun = [*lines()[:-1], Line(99.0, 9, ((99.0, NodesMute(3, 92.0)),))]
    view = view_of(begun)
    assert view.notes[-1].text == (
        "none of the 3 other hosts has answered for 7 s: the driver's own is cut off, no node "
        "counts as lost for that"
    )
    said = ("network", "no other host has answered the driver's for 0:07")
    assert said in [*run_tables.standing(view)]
    assert run_tables.status_plain(view)["driver_cut_off_s"] == 7.0
    again = DriverStarted("tiny-1", 2, JOB, POOLS, ModelProfile(4, 1000, ()), attached=True)
    over = Line(104.0, 9, ((104.0, NodesMute(3, 92.0, "10.0.0.2 answers again")),))
    for last in (over, Line(104.0, 10, ((104.0, again),))):
        view = view_of([*begun, last])
        assert "network" not in dict(run_tables.standing(view))
        assert run_tables.status_plain(view)["driver_cut_off_s"] is None
    assert view_of([*begun, over]).notes[-1].text == (
        "10.0.0.2 answers again: no other host had answered the driver's for 0:12"
    )


def test_a_checkpoint_that_was_skipped_has_not_failed() -> None:
    view = view_of(
        [
            *lines(),
            Line(99.0, 9, ((99.0, CopyFailed(3, 12, "no space", skipped=False)),)),
            Line(99.0, 9, ((99.0, CopyFailed(3, 12, "one is being written", skipped=True)),)),
        ]
    )
    assert (view.copies_failed, view.copies_skipped) == (1, 1)
    assert view.notes[-1].text.startswith("no checkpoint of step 12, it is skipped")


def test_the_curve_counts_each_step_once() -> None:
    view = view_of(lines())
    assert [p.step for p in view.curve()] == list(range(1, 13))
    assert {p.step: p.generation for p in view.curve()}[7] == 3
    assert len(view.points) == 14


def test_steps_taken_back_leave_the_curve_at_once() -> None:
    view = view_of(line for line in lines() if line.at_s <= T0 + 9.5)
    assert view.step == 6
    assert view.curve()[-1].step == 6


def test_the_curve_shows_the_steps_that_the_last_state_comes_of() -> None:
    """A checkpoint of step 8 of generation 2 is committed after generation 3 has gone back to step
    6, and is resumed from."""
    late = plan(4, ("c",), Layout(tp=2), cause="loss", resume=Resume("durable", 8, 2))
    before = [line for line in lines() if line.at_s < T0 + 11]
    assert {
        event.step
        for line in before
        for _, event in line.events
        if isinstance(event, StepDone) and event.generation == 3
    } == {7, 8}
    more = [
        tick(11, actions=(EnterPlan(late),), reason="c has failed"),
        tick(12, PlanEntered(4, 8)),
        step(12.5, 9, 4),
    ]
    assert {p.step: p.generation for p in view_of([*before, *more]).curve() if p.step > 6} == {
        7: 2,
        8: 2,
        9: 4,
    }


def test_a_step_that_was_undone_leaves_the_curve_also_where_nobody_wrote_down_that_it_was_trained_again() -> (
    None
):
    """Generation 3 goes back to step 6; its driver dies before it writes down any step of it, and
    generation 4 resumes from its step 8: steps 7 and 8 of generation 2 were undone."""
    before = [line for line in lines() if line.at_s < T0 + 9.9]
    assert [p.step for p in view_of(before).points if p.generation == 3] == []
    late = plan(4, ("c",), Layout(tp=2), cause="loss", resume=Resume("peer", 8, 3))
    more = [
        tick(11, actions=(EnterPlan(late),), reason="c has failed"),
        tick(12, PlanEntered(4, 8)),
        step(12.5, 9, 4),
    ]
    assert [p.step for p in view_of([*before, *more]).curve()] == [1, 2, 3, 4, 5, 6, 9]
    unentered = [
        *before,
        tick(11, actions=(EnterPlan(late),), reason="c has failed"),
        step(12.5, 9, 4),
    ]
    assert [p.step for p in view_of(unentered).curve()] == [1, 2, 3, 4, 5, 6, 9], (
        "nor is that it was entered"
    )


def test_an_older_copy_that_is_committed_late_is_not_the_newest() -> None:
    def stored(at_s: float, step: int, generation: int) -> Line:
        return tick(
            at_s,
            CopyStored(
                Copy(step, "durable", generation, Layout(tp=2), uri=f"/copies/{step}"), seconds=0.3
            ),
        )

    assert view_of([*lines(), stored(14, 10, 3)]).saved_step == 12
    assert view_of([*lines(), stored(14, 10, 4)]).saved_step == 10, (
        "the run went back and saved again"
    )


def test_rates() -> None:
    view = view_of(lines())
    assert view.tokens_per_s() == 2048
    assert view_of(line for line in lines() if line.at_s <= T0 + 8.5).eta_s() == 4 * 0.5


def test_what_lies_between_steps_is_in_the_eta() -> None:
    """Steps of half a second, two seconds apart: they evaluate, or wait for storage."""
    slow = [*lines()[:4], *(step(4 + 2.0 * n, n, 1) for n in range(1, 5))]
    assert view_of(slow).eta_s() == pytest.approx(8 * 2.0)
    at_once = [*lines()[:4], *(step(6.0, n, 1) for n in range(1, 5))]
    assert view_of(at_once).eta_s() == 8 * 0.5
    assert view_of(slow[:5]).eta_s() == 11 * 0.5


@pytest.mark.parametrize("kept", [None, 20])
def test_one_evaluation_moves_the_eta_by_its_share(kept: int | None) -> None:
    """Of a thousand steps of half a second each 200th is evaluated for a minute: what is told does
    not jump behind it. Who follows a run forgets its first points."""
    view, told, at_s = View(), list[float](), 4.0
    start = DriverStarted("tiny-1", 1, {**JOB, "steps": 2000}, POOLS, ModelProfile(4, 1000, ()))
    for line in (tick(0, start), *lines()[1:4]):
        view.add(line)
    for n in range(1, 1801):
        at_s += 0.5
        view.add(step(at_s, n, 1))
        at_s += 60.0 * (n % 200 == 0)
        if kept is not None:
            del view.points[:-kept]
        eta_s = view.eta_s()
        assert eta_s is not None
        told.append(eta_s / (2000 - n))
    assert max(told[:200]) == pytest.approx(0.5)
    assert all(0.5 + 0.3 * 0.6 < each < 0.5 + 0.3 * 2.1 for each in told[200:])
    assert all(0.5 + 0.3 * 0.75 < each < 0.5 + 0.3 * 1.34 for each in told[1000:])
    assert len(view.pace) <= PACE_POINTS


def test_the_pace_is_of_the_running_generation() -> None:
    """And of its later half: how slow it began is no news."""
    view = view_of([*lines()[:4], *(step(4 + 9.0 * n, n, 1) for n in range(1, 5))])
    for n in range(5, 12):
        view.add(step(40 + 0.5 * (n - 4), n, 1))
    assert view.eta_s() == 0.5


def test_a_spent_budget_is_weighed_by_the_phases_of_the_job() -> None:
    """Fifty steps of 1 and fifty of 10: all cost eleven times what the first half did."""
    half = two_phases()[:-12]
    usd = view_of(half).state.usd
    stop = tick(54.0, actions=(Stop("stopped", "the budget is spent"),))
    said = run_tables.spent_early(view_of([*two_phases(budget_usd=usd)[:-12], stop]))
    assert said.endswith(f"at this pace all of them cost about ${11 * usd:,.0f}")


def test_what_is_counted_is_named() -> None:
    assert view_of(lines()).unit == view_of([]).unit == "tokens"
    of_samples = [
        replace(
            line,
            events=tuple(
                (at, replace(e, tokens=8) if isinstance(e, StepDone) else e)
                for at, e in line.events
            ),
        )
        for line in lines()
    ]
    view = view_of(of_samples)
    assert view.unit == "samples" and "16 samples/s" in progress_line(view)
    data = report.summary(view, account(of_samples))
    assert (data["unit"], data["tokens"]) == ("samples", 96)
    assert any("12, 96 samples in" in line for line in report.text(view, account(of_samples), data))


def test_notes_tell_event_and_reason() -> None:
    texts = [note.text for note in view_of(lines()).notes]
    assert "notice: node b (spot) will be preempted in 30 s" in texts
    assert "b goes in 30 s: 6 -> 4 workers" in texts
    assert "node a (spot) was lost: its process is gone" in texts
    assert (
        "generation 2 started at step 4: pp=2,dp_shard=2 on 4 workers, source: live GPUs, 4.0 kB "
        "moved" in texts
    )
    assert "checkpoint of step 12 (2.5 MB, 0.30 s)" in texts


def test_a_node_that_was_given_back_is_not_lost() -> None:
    before = [
        *lines()[:3],
        tick(3.2, NodeLost("a", "released")),
        tick(3.3, RequestFailed("spot", "r", "no capacity: 2 of 2 in use", coming=2)),
    ]
    view = view_of(before)
    assert [view.status(view.nodes[name]) for name in "ab"] == ["released", "prepared"]
    assert [row.split()[-1] for row in run_tables.nodes(view)[1:]] == [
        "released",
        "prepared",
        "prepared",
    ]
    assert run_tables.status_plain(view)["nodes"][0]["status"] == "released"
    text = "pool spot has no further node: 2 of 2 in use; 2 nodes of it still starting"
    assert view.notes[-1].text == text
    view = view_of(
        [
            *before,
            tick(3.4, NodeReady(view.nodes["a"])),
            tick(3.5, NodeLost("a", "its process is gone")),
        ]
    )
    assert view.status(view.nodes["a"]) == "lost"


def test_nodes_that_are_not_asked_for_any_more_are_not_shown_as_wanted() -> None:
    asked = RequestNodes("spot", 2, "s9")
    before = [*lines()[:3], tick(3.2, actions=(asked,))]
    assert view_of(before).wanted == {"spot": 2}
    refused = tick(3.3, RequestFailed("spot", "s9", "no capacity"))
    assert not any(view_of([*before, refused]).wanted.values())
    withdrawn = tick(3.3, actions=(replace(asked, count=0),))
    assert not any(view_of([*before, withdrawn]).wanted.values())


def test_nodes_stay_in_view_when_the_state_has_forgotten_them() -> None:
    gone = [f"n{k}" for k in range(40)]
    more = [NodeReady(Node(name, "spot", 2)) for name in gone]
    lost = [NodeLost(name, "released") for name in gone]
    view = view_of([*lines()[:3], tick(3.2, *more), tick(3.3, *lost)])
    assert len(view.state.nodes) < 40 and list(view.nodes)[-40:] == gone
    assert {view.status(view.nodes[name]) for name in gone} == {"released"}


def test_lines_of_a_driver_that_lost_its_lease_are_not_shown() -> None:
    view = view_of(lines())
    view.state = replace(view.state, epoch=2)
    assert view.add(lines()[9]) == []
    assert len(view.points) == 14


def test_a_second_driver_keeps_the_curve() -> None:
    view = view_of(lines()[:8])
    job = lines()[0].events[0][1]
    assert isinstance(job, DriverStarted)
    again = [(T0 + 20, DriverStarted(job.run, 2, job.job, job.pools, job.model))]
    view.add(type(lines()[0])(T0 + 20, 2, tuple(again)))
    assert view.phase == "waiting"
    assert view.started_at_s == T0
    assert len(view.points) == 4
    assert not view.nodes


def test_grid() -> None:
    names = letters(["a", "b", "c"])
    assert draw(PLANS[0], names) == ["[A0] [A1] [B0] [B1] [C0] [C1]"]
    assert draw(PLANS[1], names) == ["stage 0  [A0] [A1]  4 blocks", "stage 1  [C0] [C1]  4 blocks"]
    assert draw(plan(4, ("a", "b"), Layout(dp_shard=2, tp=2)), names) == ["[A0 A1] [B0 B1]"]
    assert letters([str(i) for i in range(28)])["27"] == "B1"


def test_plain_terminal_shows_what_the_journal_is_given(tmp_path: Path) -> None:
    stream = io.StringIO()
    shows, journal = Terminal(stream), Journal(tmp_path / "journal.jsonl", 1)
    journal.hear = [shows.hear]
    shows.start()
    for line in lines():
        journal.append(line.at_s, line.events, line.decision)
    until(lambda: shows.view.phase == "succeeded", "the last line")
    shows.stop()
    journal.close()
    shown = stream.getvalue()
    assert "6.1 s  step 4     notice: node b (spot) will be preempted in 30 s" in shown
    assert "6.1 s  step 4     > b goes in 30 s: 6 -> 4 workers" in shown
    assert "step 12/12  train_loss 4.8000  2,048 tokens/s  tp=2  ETA 0:00" in shown


def test_plain_terminal_is_silent_about_what_an_earlier_driver_showed() -> None:
    stream = io.StringIO()
    shows = Terminal(stream)
    for change in changes(lines()):
        shows.earlier(change)
    shows.start()
    shows.stop()
    assert shows.view.notes == view_of(lines()).notes, "each line counts once"
    assert "notice" not in stream.getvalue()
    assert shows.view.step == 12


def test_a_terminal_of_a_run_of_months_keeps_the_newest_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "LOOK_S", 0.0)
    stream = io.StringIO()
    shows = Terminal(stream)
    shows.hear(lines()[0])
    for n in range(1, 401):
        new = replace(PLANS[0], generation=n)
        shows.hear(tick(n, actions=(EnterPlan(new),), reason=f"for reason {n}"))
        shows.hear(tick(n + 0.3, PlanEntered(n, n - 1)))
        shows.hear(step(n + 0.6, n, n))
        shows.hear(tick(n + 0.7, Evaluated(n, n, {"validation_loss": 1.0 * n})))
        shows._plain()
    view = shows.view
    assert [*view.planned] == [*range(385, 401)] == [*view.orders] == [*view.lost]
    assert [event.generation for _, event in view.entered] == [*range(385, 401)]
    assert len(view.evaluations) == terminal.KEPT == len(view.points)
    assert view.validation_loss == 400.0 and view.orders[400] == "for reason 400"
    assert stream.getvalue().count("started at step") == 400, "each with its layout"


def test_a_terminal_of_a_run_of_months_keeps_the_newest_of_its_lost_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are counted, and how each was gone; the alive ones stay, however old they are."""
    monkeypatch.setattr(terminal, "LOOK_S", 0.0)
    shows = Terminal(io.StringIO())
    for line in lines()[:3]:
        shows.hear(line)
    for n in range(1000):
        name, cause = f"n{n}", "released" if n % 4 else "its process is gone"
        shows.hear(tick(4 + n, NodeReady(Node(name, "spot", 2)), NodeLost(name, cause)))
        shows._plain()
        assert len(shows.view.nodes) <= 3 + 2 * terminal.KEPT_GONE
        assert len(shows.view.released) <= 2 * terminal.KEPT_GONE
    found = list(shows.view.nodes)
    assert found[:3] == ["a", "b", "c"] and found[-1] == "n999"
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(pools_table(shows.view))
    assert re.search(r"spot +spot +2 +750 +250 ", console.export_text())
    console.print(LivePicture(shows.view))
    shown = console.export_text().split("why:")[0]
    assert len(re.findall(r" n\d+ +spot ", shown)) == terminal.N_LOST


def test_the_live_picture(tmp_path: Path) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(LivePicture(view_of(line for line in lines() if line.at_s <= T0 + 8.5)))
    shown = console.export_text()
    assert "8 / 12   (running)" in shown
    assert "stage 1  [C0] [C1]" in shown
    assert "draining 28 s" in shown
    assert "on-demand" in shown
    console.print(LivePicture(view_of([])))  # before the first line


@pytest.mark.parametrize("width", [60, 140])
def test_what_happened_last_is_shown_to_its_end(width: int) -> None:
    long = " ".join(f"reason{i}" for i in range(60))
    seen = view_of([*lines(), tick(14.0, RequestFailed("spot", "r", long))])
    console = Console(width=width, height=90, record=True, file=io.StringIO())
    console.print(LivePicture(seen))
    notes = console.export_text().split("why:")[0]
    assert "reason59" in notes, "it is not cut"
    more = next(line for line in notes.splitlines() if "reason20" in line)
    assert more.strip("│ ") == more[2 + len(terminal.HANGING) :].rstrip("│ "), "under its text"
    assert notes.count("\n") < 60


def test_loss_png(tmp_path: Path) -> None:
    path = save_loss(view_of(lines()), tmp_path / "deep" / "loss.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert save_loss(view_of([]), tmp_path / "empty.png").stat().st_size > 1000


def test_doctor_of_a_run() -> None:
    checks = {check.name: check for check in doctor.run_troubles(view_of(lines()))}
    assert checks["phase"].found == "succeeded at step 12 of 12"
    assert checks["steps trained again"].found == "2"
    assert "its process is gone" in checks["nodes lost"].found


def test_a_script_has_no_last_step() -> None:
    job = {"name": "train", "script": "/train.py", "restarted": True, "pools": JOB.get("pools")}
    start = DriverStarted("train-1", 1, job, POOLS, ModelProfile(0, 0, ()))
    begun = tick(0, start, actions=(EnterPlan(PLANS[0]),))
    view = view_of([begun, tick(1, PlanEntered(1, 0)), step(2, 250, 1)])
    assert doctor.run_troubles(view)[0].found == "running at step 250"
    assert [line.split()[1:] for line in run_tables.status(view) if line.startswith("step ")] == [
        ["250"]
    ]
    assert run_tables.ls([run_tables.Row(view)])[1].split()[2] == "250"


def test_doctor_of_the_machine(tmp_path: Path) -> None:
    checks = {check.name: check for check in doctor.machine(str(tmp_path / "not" / "yet"))}
    assert checks["torch"].verdict == "ok"
    assert checks["ports"].verdict == "ok"
    assert all(check.hint for check in checks.values() if check.verdict != "ok")


def test_words() -> None:
    assert [duration(s) for s in (None, 4.6, 75, 3725)] == ["-", "0:05", "1:15", "1:02:05"]
    assert [size(n) for n in (12, 2_500_000, 3e13)] == ["12 B", "2.5 MB", "30.0 TB"]
    assert first_line("Traceback (most recent call last):\n  x\nValueError: no") == "ValueError: no"
    assert drill({"at_step": 9, "kill": ["a", "b"]}) == "kill a, b (at step 9)"
    assert drill({"kill_driver": True, "at_step": 9}) == "kill_driver (at step 9)"
    assert (
        drill({"kill": "any", "error": "nobody is there"})
        == "kill any: not carried out: nobody is there"
    )


def test_plain_terminal_says_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision to do nothing is no news, but where there has been none for a while."""
    stream = io.StringIO()
    shows = Terminal(stream)
    begun, waits = lines()[0], Decision((), "waiting for workers: 1 of 2")
    shows.hear(replace(begun, decision=waits))
    shows._plain()
    assert "waiting for" not in stream.getvalue()
    monkeypatch.setattr(terminal, "PLAIN_EVERY_S", 0.0)
    shows._plain()
    shows._plain()
    assert stream.getvalue().count("step 0     > waiting for workers: 1 of 2\n") == 1


def test_what_takes_long_at_the_start_is_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is a picture, and of a change's phases."""
    stream = io.StringIO()
    with start_line("nothing", stream), start_line("unseen", None):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(terminal, "START_LEAST_S", 0.0)
    with start_line("the program was read", stream):
        pass
    assert stream.getvalue() == "start: the program was read in 0.0 s\n"
    for after_s, said in ((60.0, ""), (0.0, "start: the program is read ...\n")):
        monkeypatch.setattr(terminal, "DOING_AFTER_S", after_s)
        slow, quiet = io.StringIO(), io.StringIO()
        with start_line("the program was read", slow, doing="the program is read"):
            with start_line("a part of it", quiet):
                until(lambda slow=slow, said=said: slow.getvalue() == said, "it is told", 10)
        assert slow.getvalue().startswith(f"{said}start: the program was read")
        assert "..." not in quiet.getvalue()
        until(lambda: not [t for t in enumerate_threads() if isinstance(t, Timer)], "its end", 10)
    view = view_of(lines())
    prepared = event_messages.of(NodePrepared("a"), view)
    assert prepared == "node a (spot) is prepared: its workers have the program"
    slow = event_messages.of(PlanEntered(2, 5, {"groups": 3.21, "build": 0.4}), view)
    assert slow is not None and slow.endswith(" (it took: groups 3.2 s)")
