"""Whether a transition's layout computes the same, and what is closed for it: in the tables, the
report and the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.observe.small_run import PLANS, lines, step, tick

from elastic.ledger.journal import Journal, Line, parse_line, write_line
from elastic.ledger.run_folder import RunFolder
from elastic.observe import find_runs
from elastic.observe.accounting.accounts import account
from elastic.observe.reporting import report
from elastic.observe.run_tables import status, status_plain
from elastic.observe.run_view import view_of
from elastic.observe.terminal import plain_note
from elastic.observe.why_lines import every
from elastic.storage import open_storage
from elastic.types import (
    DigestChecked,
    DriverStarted,
    EnterPlan,
    Layout,
    PlanEntered,
    Probed,
    Resume,
    StepDone,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
)

WHY = (
    "generation 2, pp=2,dp_shard=2, computes something else than dp_shard=6 at step 4: the loss "
    "is 2.5, it was 2.4"
)
NOTE = "blocks.1.drop draws other numbers in each layout"


def changed(line: Line, **event_of: Any) -> Line:
    """With what the model's profile says."""
    events = [
        (t, replace(e, model=replace(e.model, **event_of)) if isinstance(e, DriverStarted) else e)
        for t, e in line.events
    ]
    return replace(line, events=tuple(events))


def probed() -> list[Line]:
    """The small run, with probes at its notice."""
    found = []
    for line in lines():
        entered = [e for _, e in line.events if isinstance(e, PlanEntered)]
        if entered and entered[0].generation == 2:
            found.append(tick(6.2, Probed(1, 4, 2.4, None, 0.25)))
            found.append(tick(6.4, Probed(2, 4, 2.40001, 2.4, 0.5)))
        found.append(line)
    return found


def rolled_back() -> list[Line]:
    """The transition of the notice is rolled back: the run continues without pp."""
    all_lines = probed()
    at = next(
        i
        for i, line in enumerate(all_lines)
        if any(isinstance(e, PlanEntered) and e.generation == 2 for _, e in line.events)
    )
    failed = [
        WorkerFailed(WorkerId(n, k), 2, "layout", "the loss is 2.5, it was 2.4", 0, 4)
        for n in "ac"
        for k in range(2)
    ]
    instead = replace(
        PLANS[1], generation=3, layout=Layout(dp_shard=4), samples=(2,) * 4, layers=(4,),
        cause="rollback", resume=Resume("peer", 4, 1, Layout(dp_shard=6)), unusable=(("pp", WHY),),
    )  # fmt: skip
    return [
        *all_lines[: at - 1],
        tick(6.4, Probed(2, 4, 2.5, 2.4, 0.5), *failed),
        tick(6.6, actions=(EnterPlan(instead),), reason=f"rolled back: {WHY}"),
        tick(7.0, PlanEntered(3, 4)),
        *(step(7 + n / 2, 4 + n, 3) for n in range(1, 4)),
    ]


def test_a_transition_whose_probe_agreed_is_equal() -> None:
    found = account(probed()).transitions
    assert [t.loss_equal for t in found][:2] == [None, True] and found[1].probe_s == 0.75
    head, first, second, *_ = report.transitions(found)
    assert head.split()[-3:] == ["CONTENT", "LOSS", "PHASES"]
    assert "equal" in second and "equal" not in first


def test_one_that_was_rolled_back_has_a_line_of_its_own() -> None:
    again = [parse_line(write_line(line)) for line in rolled_back()]
    found = account(again).transitions
    assert [(t.generation, t.cause, t.loss_equal) for t in found] == [
        (1, "start", None),
        (2, "notice", False),
        (3, "rollback", None),
    ]
    undone = found[1]
    assert (undone.from_layout, undone.to_layout, undone.at_step, undone.steps_lost) == (
        "",
        "pp=2,dp_shard=2",
        4,
        0,
    )
    assert (undone.bytes_moved, undone.pause_s, undone.digest_ok) == (0, 0.0, None), (
        "it was never entered"
    )
    assert found[2].from_layout == "dp_shard=6"
    assert any("differs" in line for line in report.transitions(found))


def test_steps_that_are_done_again_are_compared() -> None:
    """The small run loses two steps at its last transition, and does them again with the loss that
    they had."""
    found = account(lines()).transitions
    assert [(t.steps_lost, t.loss_equal) for t in found] == [(0, None), (0, None), (2, True)]
    other = [
        replace(line, events=tuple((t, replace(e, train_loss=9.0) if isinstance(e,
        StepDone) and e.generation == 3 else e)
                                   for t, e in line.events))
        for line in lines()
    ]  # fmt: skip
    assert account(other).transitions[-1].loss_equal is None, "nobody has rolled it back"
    for ok, equal in ((True, True), (False, None)):
        at = next(
            i
            for i, line in enumerate(lines())
            if any(isinstance(e, PlanEntered) and e.generation == 3 for _, e in line.events)
        )
        checked = [*lines()[:at], tick(9.4, DigestChecked(2, ok, 10)), *lines()[at:]]
        assert account(checked).transitions[-1].loss_equal is equal, (
            "with wrong content there is nothing to compare with"
        )
        later = [*lines()[:at], tick(9.4, DigestChecked(3, ok, 10)), *lines()[at:]]
        assert account(later).transitions[-1].loss_equal is True, "the steps before it were right"
    for good_step, equal in ((8, True), (6, None)):
        doubted = [
            *lines()[:at],
            tick(9.4, WrongNumbers(2, 8, good_step, (), "why")),
            *lines()[at:],
        ]
        assert account(doubted).transitions[-1].loss_equal is equal, good_step
    drawn = [changed(line, draws=True) for line in lines()]
    assert account(drawn).transitions[-1].loss_equal is None


def test_why_status_and_report_say_what_is_closed(tmp_path: Path) -> None:
    all_lines = [
        changed(line, no_cp="no attention that knows of parts", notes=(NOTE,))
        for line in rolled_back()
    ]
    view = view_of(all_lines)
    assert view.unusable == {"cp": "no attention that knows of parts", "pp": WHY}
    shown = "\n".join(status(view))
    assert (
        WHY in shown
        and "no pp" in shown
        and NOTE in shown
        and status_plain(view)["unusable"] == view.unusable
    )
    told = [row.text for row in every(view, view.notes)]
    assert (
        sum(NOTE in line for line in told) == 1
        and sum("no cp for this model" in line for line in told) == 1
    )
    assert any(WHY in line for line in told)
    assert any(NOTE in plain_note(view, note) for note in view.notes)
    journal = Journal(tmp_path / find_runs.JOURNAL, 1)
    for line in all_lines:
        journal.append(line.at_s, line.events, line.decision)
    journal.close()
    data, text = report.write(RunFolder.of(open_storage(tmp_path)))
    assert data["unusable"] == view.unusable and data["notes"] == [NOTE]
    assert [t["loss_equal"] for t in data["transitions"]] == [None, False, None] and data[
        "transitions"
    ][1]["probe_s"] == 0.75
    assert WHY in "\n".join(text) and NOTE in "\n".join(text)
