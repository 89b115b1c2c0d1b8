"""Every paid GPU-second in one category; what a transition cost."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.observe import small_run
from support.places import ROOT

from elastic.driver import restored
from elastic.ledger.journal import Line
from elastic.observe import run_view
from elastic.observe.accounting.accounts import CATEGORIES, Account, Books, account
from elastic.policy.state.fold import changes
from elastic.types import (
    Abort,
    Action,
    Copy,
    CopyStored,
    Decision,
    DigestChecked,
    DrillAsked,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    InstancesSeen,
    Layout,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    Plan,
    PlanEntered,
    Pool,
    Quiesced,
    Resume,
    StepDone,
    Stop,
    WorkerFailed,
    WorkerId,
)

POOL = Pool("p", "CPU", 2, "spot", 7.2)  # $0.001 per GPU-second


def start(steps: int = 100, epoch: int = 1, attached: bool = False) -> DriverStarted:
    return DriverStarted(
        "r", epoch, {"steps": steps}, (POOL,), ModelProfile(1, 1, ()), attached=attached
    )


def tick(at_s: float, *events: Event, orders: tuple[Action, ...] = ()) -> Line:
    return Line(
        at_s, 1, tuple((at_s, event) for event in events), Decision(orders, "why" if orders else "")
    )


def plan(number: int, *nodes: str, **resume: Any) -> Plan:
    ranks = tuple(WorkerId(node, k) for node in nodes for k in range(2))
    cause: Any = resume.pop("cause", "start")
    return Plan(
        number,
        Layout(dp_shard=len(ranks)),
        ranks,
        (1,) * len(ranks),
        (1,),
        resume=Resume(**resume),
        cause=cause,
    )


def step(generation: int, n: int, step_time_s: float = 1.0, **values: float) -> StepDone:
    return StepDone(generation, n, 2.0 - n / 100, 50, step_time_s, **values)


def begun(*nodes: str) -> list[Line]:
    """Ready at 10, prepared at 14, entered at 16; two nodes of two GPUs unless told otherwise."""
    nodes = nodes or ("a", "b")
    return [
        tick(0.0, start()),
        tick(10.0, *(NodeReady(Node(n, "p", 2)) for n in nodes)),
        tick(14.0, *(NodePrepared(n) for n in nodes), orders=(EnterPlan(plan(1, *nodes)),)),
        tick(16.0, PlanEntered(1, 0)),
    ]


def gpu_s(found: Account) -> dict[str, float]:
    return {name: round(value, 6) for name, value in found.gpu_seconds.items() if round(value, 6)}


def test_a_plain_run() -> None:
    lines = [*begun(), *(tick(16.0 + n, step(1, n, data_s=0.1, copy_s=0.05)) for n in range(1, 11))]
    lines += [tick(27.0, orders=(Stop("stopped", "x"),))]
    found = account(lines)
    assert gpu_s(found) == {
        "program_startup": 24.0,
        "productive": 34.0,
        "data_loading": 4.0,
        "copy": 2.0,
        "other": 4.0,
    }
    assert sum(found.gpu_seconds.values()) == pytest.approx(17 * 4) and sum(
        found.usd.values()
    ) == pytest.approx(0.068)
    assert found.seconds["waiting_for_capacity"] == pytest.approx(10.0)
    assert sum(found.seconds.values()) == pytest.approx(27.0)
    assert found.totals.goodput == pytest.approx(34 / 68) and found.totals.tokens == 500
    assert found.totals.launch_to_first_step_s == 17.0 and found.totals.final_loss == pytest.approx(
        1.9
    )
    assert tuple(found.gpu_seconds) == CATEGORIES


def test_what_comes_after_the_last_step_of_a_long_job_is_saving() -> None:
    last = int("3000")  # a number of its own, as from a file
    lines = [
        tick(0.0, start(steps=3000)),
        *begun()[1:],
        tick(17.0, step(1, 2999)),
        tick(18.0, step(1, last)),
    ]
    found = account([*lines, tick(20.0, orders=(Stop("succeeded", "x"),))])
    assert gpu_s(found) == {"program_startup": 24.0, "productive": 8.0, "checkpoint_save": 8.0}


def test_a_node_without_a_part_in_the_plan_is_idle_while_others_enter_it() -> None:
    lines = [
        tick(0.0, start()),
        tick(10.0, *(NodeReady(Node(n, "p", 2)) for n in "abc")),
        tick(14.0, *(NodePrepared(n) for n in "abc"), orders=(EnterPlan(plan(1, "a", "b")),)),
        tick(16.0, PlanEntered(1, 0)),
        tick(17.0, step(1, 1)),
    ]
    assert gpu_s(account(lines)) == {
        "program_startup": 24.0 + 8.0,
        "idle_remainder": 4.0 + 2.0,
        "productive": 4.0,
    }


def test_reports_that_come_late_or_early_do_not_become_idle_time() -> None:
    late = [17.0, 18.3, 19.0, 20.2, 21.0]
    lines = [*begun(), *(tick(at_s, step(1, n + 1)) for n, at_s in enumerate(late))]
    found = account(lines)
    assert gpu_s(found) == {"program_startup": 24.0, "productive": 18.8, "between_steps": 1.2}


def test_an_evaluation_is_neither_a_step_nor_other_time() -> None:
    lines = [
        *begun(),
        tick(17.0, step(1, 1)),
        tick(18.0, step(1, 2)),
        tick(48.2, Evaluated(1, 2, {}, 30.0)),
    ]
    found = account([*lines, tick(49.2, step(1, 3)), tick(59.2, Evaluated(1, 3, {}, 10.0))])
    assert gpu_s(found) == {
        "program_startup": 24.0,
        "productive": 12.0,
        "evaluation": 160.0,
        "between_steps": 0.8,
    }
    assert found.totals.goodput == pytest.approx(12 / 196.8)


def lossy(*after: Line) -> list[Line]:
    """Steps 1..6, node b goes at 22.5, is aborted at 23, survivors answer at 23.2, step 4 is
    entered at 24.2."""
    lines = [*begun(), *(tick(16.0 + n, step(1, n)) for n in range(1, 7))]
    resume = {"source": "peer", "step": 4, "generation": 1, "cause": "loss"}
    return lines + [
        tick(22.5, DrillAsked({"kill": "b"})),
        tick(23.0, NodeLost("b"), orders=(Abort(1),)),
        tick(23.2, Quiesced(WorkerId("a", 0), 1, 6), orders=(EnterPlan(plan(2, "a", **resume)),)),
        tick(24.2, PlanEntered(2, 4, {"groups": 0.1, "build": 0.3, "transfer": 0.4}, 1234)),
        tick(27.2, step(2, 5, 3.0)),
        tick(29.2, step(2, 6, 2.0)),
        *after,
    ]


def test_steps_that_are_done_again_are_wasted() -> None:
    found = account(lossy(tick(29.2, orders=(Stop("stopped", "x"),))))
    sums = gpu_s(found)
    # steps 5 and 6, and the broken-off 7th
    assert sums["wasted_progress"] == pytest.approx(2 * 4 + 4)
    assert sums["productive"] == pytest.approx(4 * 4 + 2 * 2 * 2)
    # abort, entering, and the slow first step
    assert sums["reshard"] == pytest.approx(0.2 * 2 + 1.0 * 2 + 1.0 * 2)
    assert sum(sums.values()) == pytest.approx(13 * 4 + 6.2 * 2)
    assert found.totals.steps == 6 and found.totals.tokens == 300


def test_the_row_of_a_transition() -> None:
    found = account(lossy(tick(29.3, DigestChecked(2, True, 10))))
    first, loss = found.transitions
    assert (first.cause, first.pause_s, first.from_layout, first.source) == (
        "start",
        0.0,
        "",
        "fresh",
    )
    assert (loss.generation, loss.cause, loss.at_step, loss.steps_lost) == (2, "loss", 4, 2)
    assert (loss.from_layout, loss.to_layout, loss.source, loss.bytes_moved) == (
        "dp_shard=4",
        "dp_shard=2",
        "peer",
        1234,
    )
    # less one ordinary step of the new generation
    assert loss.pause_s == pytest.approx(27.2 - 22.0 - 2.0)
    phases_s = {
        "detect": 0.5,
        "quiesce": 0.2,
        "groups": 0.1,
        "build": 0.3,
        "transfer": 0.4,
        "probe": 0.0,
        "first_step": 3.0,
    }
    assert loss.phases_s == phases_s
    assert loss.digest_ok is True and first.digest_ok is None


def test_a_lost_step_is_counted_once_also_one_that_was_reported_late() -> None:
    """Step 7 is reported when its generation is aborted already; generation 3 goes back to where
    generation 2 began, which has done no step."""
    resume = {"source": "peer", "step": 4, "generation": 1, "cause": "loss"}
    before = lossy()[:-3]
    lines = [
        *before[:-1],
        tick(23.1, step(1, 7)),
        tick(23.2, Quiesced(WorkerId("a", 0), 1, 7), orders=(EnterPlan(plan(2, "a", **resume)),)),
        tick(24.2, PlanEntered(2, 4)),
        tick(24.3, WorkerFailed(WorkerId("a", 0), 2, "collective", "x"), orders=(Abort(2),)),
        tick(24.4, Quiesced(WorkerId("a", 0), 2, 4), Quiesced(WorkerId("a", 1), 2, 4),
             orders=(EnterPlan(plan(3, "a", **resume)),)),
        tick(25.2, PlanEntered(3, 4)),
        tick(27.2, step(3, 5)),
        tick(29.2, step(3, 6)),
    ]  # fmt: skip
    assert [row.steps_lost for row in account(lines).transitions] == [0, 3, 0]
    assert run_view.view_of(lines).lost == {1: 0, 2: 3, 3: 0}


def test_waiting_for_capacity_is_not_a_part_of_the_transition() -> None:
    lines = [*begun(), tick(17.0, step(1, 1))]
    resume = {"source": "durable", "step": 0, "cause": "loss"}
    lines += [
        tick(18.0, NodeLost("b"), orders=(Abort(1),)),
        tick(18.5, Quiesced(WorkerId("a", 0), 1, 1)),
        tick(50.0, NodeReady(Node("c", "p", 2))),
        tick(53.0, NodePrepared("c"), orders=(EnterPlan(plan(2, "a", "c", **resume)),)),
        tick(56.0, PlanEntered(2, 0)),
    ]
    sums = gpu_s(account(lines))
    assert sums["waiting_for_capacity"] == pytest.approx(34.5 * 2)
    assert sums["checkpoint_restore"] == pytest.approx(3 * 4)
    assert sums["program_startup"] == pytest.approx(6 * 4 + 3 * 2)
    assert account(lines).transitions[0].phases_s["quiesce"] == 0.0


def test_a_live_transition_trains_until_the_boundary_and_its_third_node_idles_before() -> None:
    lines = [*begun("a"), tick(17.0, step(1, 1)), tick(17.0, NodeReady(Node("b", "p", 2)))]
    resume = {"source": "live", "step": 1, "generation": 1, "cause": "growth"}
    lines += [
        tick(17.5, NodePrepared("b"), orders=(EnterPlan(plan(2, "a", "b", **resume)),)),
        tick(18.0, step(1, 2)),
        tick(18.6, PlanEntered(2, 2, {"groups": 0.1}, left_at_s=18.0)),
        tick(19.1, step(2, 3, 0.5)),
        tick(19.6, step(2, 4, 0.5)),
    ]
    sums = gpu_s(account(lines))
    assert sums["productive"] == pytest.approx(2 * 2 + 1.0 * 4)
    # a since the boundary, b since the order
    assert sums["reshard"] == pytest.approx(0.6 * 2 + 1.1 * 2)
    growth = account(lines).transitions[1]
    assert (
        growth.pause_s == pytest.approx(0.6)
        and growth.steps_lost == 0
        and growth.phases_s["quiesce"] == 0.5
    )


def test_nodes_outside_the_plan_idle_and_the_last_copy_is_saving() -> None:
    lines = [tick(0.0, start(steps=2)), *begun("a")[1:]]
    lines += [
        tick(16.0, NodeReady(Node("z", "p", 2)), NodePrepared("z")),
        tick(17.0, step(1, 1)),
        tick(18.0, step(1, 2)),
        tick(19.5, CopyStored(Copy(2, "durable", 1, Layout())), orders=(Stop("succeeded", "x"),)),
        tick(99.0, NodeLost("a", "released")),
    ]
    sums = gpu_s(account(lines))
    assert sums["idle_remainder"] == pytest.approx(3.5 * 2) and sums[
        "checkpoint_save"
    ] == pytest.approx(1.5 * 2)
    assert "other" not in sums


def test_a_stop_that_is_ordered_again_tells_until_when_nodes_were_paid_for() -> None:
    """A plan that was entered while the first one waited for storage had begun the run again."""
    stop = Stop("succeeded", "x")
    lines = [*begun(), tick(17.0, step(1, 1)), tick(18.0, orders=(stop,))]
    lines += [Line(20.0, 1, ((20.0, PlanEntered(1, 1)),)), tick(24.0, orders=(stop,))]
    state, books = restored(lines), account(lines)
    assert state is not None and state.usd == pytest.approx(books.totals.usd)
    assert books.totals.gpu_seconds == pytest.approx((24.0 - 10.0) * 4)
    assert account([*lines, tick(99.0)]).gpu_seconds == books.gpu_seconds


def test_hours_in_which_no_driver_ran_are_no_part_of_the_rate() -> None:
    lines = [*begun(), tick(17.0, step(1, 1)), tick(18.0, step(1, 2))]
    later = 18.0 + 3600
    lines += [
        tick(later, start(2)),
        tick(later + 10, *(NodeReady(Node(n, "p", 2)) for n in "ab")),
        tick(later + 14, *(NodePrepared(n) for n in "ab"), orders=(EnterPlan(plan(2, "a", "b")),)),
        tick(later + 16, PlanEntered(2, 2)),
        tick(later + 17, step(2, 3)),
    ]
    found = account(lines)
    assert found.seconds["not_running"] == pytest.approx(3600)
    assert found.gpu_seconds["not_running"] == 0 and found.seconds["other"] == 0
    assert found.totals.wall_s == pytest.approx(later + 17)
    assert found.totals.tokens_per_s == pytest.approx(found.totals.tokens / (18.0 + 17.0))


def test_every_category_is_defined_on_the_page() -> None:
    page = (ROOT / "docs" / "ledger.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert tuple(rows) == CATEGORIES


def test_machines_that_are_no_nodes_are_on_the_bill() -> None:
    lines = [tick(0.0, start(steps=2)), tick(1.0, InstancesSeen("p", starting=2)), *begun()[1:]]
    lines += [
        tick(17.0, step(1, 1)),
        tick(18.0, step(1, 2), NodeLost("b", "released"), InstancesSeen("p", leaving=1)),
    ]
    lines += [tick(21.0, InstancesSeen("p"), orders=(Stop("succeeded", "x"),))]
    found = account(lines)
    known = [
        tuple(said for said in line.events if not isinstance(said[1], InstancesSeen))
        for line in lines
    ]
    before = account([replace(line, events=events) for line, events in zip(lines, known)])
    assert found.gpu_seconds["program_startup"] - before.gpu_seconds[
        "program_startup"
    ] == pytest.approx(9 * 4)
    assert (
        found.gpu_seconds["waiting_for_capacity"] == 0
        and found.seconds["waiting_for_capacity"] == 1.0
    )
    assert found.totals.usd - before.totals.usd == pytest.approx(0.001 * (9 * 4 + 3 * 2))
    state = restored(lines)
    assert state is not None and state.usd == pytest.approx(found.totals.usd) == pytest.approx(
        sum(found.usd.values())
    )


def test_the_head_is_on_the_bill_while_a_driver_lives() -> None:
    paid = replace(start(steps=2), job={"steps": 2, "head_usd_per_h": 36.0})
    lines = [tick(0.0, paid), *begun()[1:], tick(17.0, step(1, 1)), tick(18.0, step(1, 2))]
    lines += [
        tick(100.0, replace(paid, epoch=2)),
        tick(103.0),
        tick(104.0, orders=(Stop("succeeded", "x"),)),
    ]
    free = [
        replace(
            line,
            events=tuple(
                (at_s, start(2, e.epoch) if isinstance(e, DriverStarted) else e)
                for at_s, e in line.events
            ),
        )
        for line in lines
    ]
    found, before = account(lines), account(free)
    assert found.totals.usd - before.totals.usd == pytest.approx(0.01 * (18.0 + 4.0))
    assert (
        found.usd["head_node"] - before.usd["head_node"] == pytest.approx(0.22)
        and found.gpu_seconds == before.gpu_seconds
    )
    state = restored(lines)
    assert state is not None and state.usd == pytest.approx(found.totals.usd) == pytest.approx(
        sum(found.usd.values())
    )


def test_a_driver_that_died_with_its_cluster_is_not_billed_for_the_gap() -> None:
    lines = [
        *begun("a"),
        tick(17.0, step(1, 1)),
        tick(18.0, step(1, 2)),
        tick(18.5, NodeReady(Node("y", "p", 2))),
    ]
    lines += [
        tick(100.0, start(epoch=2)),
        tick(105.0, NodeReady(Node("a2", "p", 2))),
        tick(106.0, NodePrepared("a2")),
    ]
    lines += [
        tick(106.0, orders=(EnterPlan(plan(2, "a2", source="durable", step=1)),)),
        tick(107.0, PlanEntered(2, 1)),
    ]
    found = account(lines)
    sums = gpu_s(found)
    assert sums["wasted_progress"] == pytest.approx(1 * 2 + 0.5 * 2)
    assert sum(sums.values()) == pytest.approx(8.5 * 2 + 2 * 2)
    assert sum(found.seconds.values()) == pytest.approx(107.0)
    assert [row.generation for row in found.transitions] == [1, 2] and found.totals.steps == 1


@pytest.mark.parametrize(("at_s", "billed_s"), [(40.0, 10.0), (86_430.0, 20.0), (-86_400.0, 0.0)])
def test_the_clock_of_a_driver_that_attaches_is_not_billed(at_s: float, billed_s: float) -> None:
    lines = [
        *begun(),
        tick(30.0, step(1, 1)),
        tick(at_s, replace(start(epoch=2, attached=True), paid_until_s=50.0)),
    ]
    lines += [tick(at_s + 5.0, step(1, 2)), tick(at_s + 6.0, orders=(Stop("stopped", "x"),))]
    found = account(lines)
    assert sum(found.usd.values()) == pytest.approx(4 * 0.001 * (20.0 + billed_s + 6.0))
    assert sum(found.gpu_seconds.values()) == pytest.approx(found.totals.gpu_seconds)
    state = restored(lines)
    assert state is not None and state.usd == pytest.approx(found.totals.usd)


def test_an_empty_journal() -> None:
    found = account([])
    assert (
        sum(found.gpu_seconds.values()) == 0
        and found.totals.goodput == 0
        and found.totals.final_loss is None
    )


def test_a_generation_whose_entering_no_line_tells_of_counts_from_its_first_step() -> None:
    """Its driver died before it wrote that down; steps that the generation did again are wasted."""
    lines = [
        replace(
            line,
            events=tuple(
                (at_s, event)
                for at_s, event in line.events
                if not isinstance(event, PlanEntered) or event.generation == 1
            ),
        )
        for line in lossy()
    ]
    found = account(lines)
    assert found.totals.steps == 6 and found.totals.tokens == 300
    assert [row.generation for row in found.transitions] == [1, 2]
    assert found.transitions[1].steps_lost == 2 and found.transitions[1].at_step == 4


def driverless(*after: Line) -> list[Line]:
    """A driver that attaches after 100 s hears of 100 steps at once."""
    told = [step(1, n) for n in range(1, 101)]
    return [*begun(), tick(116.0, start(epoch=2, attached=True)), tick(116.0, *told), *after]


def test_steps_that_were_trained_while_no_driver_was_there_are_progress() -> None:
    found = account(driverless())
    assert gpu_s(found) == {"program_startup": 24.0, "productive": 400.0}
    half = driverless()[:-1] + [tick(116.0, *(step(1, n) for n in range(1, 41)))]
    assert gpu_s(account(half)) == {
        "program_startup": 24.0, "productive": 160.0, "between_steps": 240.0,
    }  # fmt: skip
    late = [*half, tick(118.0, step(1, 41)), tick(118.0, step(1, 42))]
    assert gpu_s(account(late))["productive"] == 168.0, "of another moment"


def test_such_steps_that_are_undone_are_wasted() -> None:
    again = plan(2, "a", "b", source="peer", step=10, generation=1, cause="loss")
    lines = driverless(
        tick(117.0, WorkerFailed(WorkerId("a", 0), 1, "collective", "x"), orders=(Abort(1),)),
        tick(117.0, orders=(EnterPlan(again),)),
        tick(118.0, PlanEntered(2, 10)),
    )
    found = gpu_s(account(lines))
    assert found["productive"] == pytest.approx(40.0)
    assert found["wasted_progress"] == pytest.approx(360.0 + 4.0), "and the one that was aborted"
    assert sum(found.values()) == pytest.approx(108.0 * 4)
    state = restored(lines)
    assert state is not None and state.usd == pytest.approx(account(lines).totals.usd)


def test_a_checkpoint_that_is_told_among_such_steps_keeps_its_time() -> None:
    stored = CopyStored(Copy(40, "durable", 1, Layout()), stall_s=5.0)
    told = [step(1, n) for n in range(1, 81)]
    found = account([*begun(), tick(116.0, *told[:40], stored, *told[40:])])
    assert gpu_s(found) == {
        "program_startup": 24.0, "productive": 320.0, "checkpoint_save": 20.0,
        "between_steps": 60.0,
    }  # fmt: skip


@pytest.mark.parametrize("keeps", [0, 2])
def test_books_that_are_asked_again_and_again_say_what_the_journal_does(keeps: int) -> None:
    """Also where steps are undone that were added up before; `keeps`: or may be no more."""
    lines, books = [*small_run.lines()], Books(keeps=keeps)
    for n, line in enumerate(lines, start=1):
        for change in changes((line,), books.state):
            books.take(change)
            books.so_far()
        found, whole = books.so_far(), account(lines[:n])
        assert found.totals.tokens == whole.totals.tokens or keeps
        assert found.totals.usd == pytest.approx(whole.totals.usd)
        if not keeps:
            assert found.gpu_seconds == pytest.approx(whole.gpu_seconds)
