"""Each promise of a scenario that is broken fails the check that is for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.docs.pages import block
from support.places import ROOT

from elastic.ledger.journal import Line
from elastic.observe.accounting.transitions import Transition
from elastic.scenarios import judge, story_checks
from elastic.scenarios.limit import Limit
from elastic.scenarios.play import Played
from elastic.scenarios.scenario import RUN_CHECKS, Act, Nodes, Scenario
from elastic.scenarios.stories import CUT_OFF, FAULTY, LOOP_SCRIPT, MAIN_PATH, SCENARIOS
from elastic.types import (
    Abort,
    Copy,
    CopyStored,
    Decision,
    DrillAsked,
    EnterPlan,
    Event,
    Layout,
    NodePrepared,
    Plan,
    PlanEntered,
    Quarantine,
    Quiesced,
    Resume,
    Silent,
    StepDone,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
)
from elastic.types.admission import Admission

MEASURED = Admission(1.0, 0.0, {}, 1e9, 1 << 30)


def move(generation: int, cause: str, **more: Any) -> Transition:
    source = "peer" if cause == "loss" else "fresh" if cause == "start" else "live"
    made = Transition(
        generation, cause, 10 * generation, 0, 0.3, {}, "a", "b", source, bytes_moved=10,
        digest_ok=True,
    )  # fmt: skip
    return replace(made, **more)


def line(*events: Event, **more: Any) -> Line:
    return Line(1.0, 1, tuple((1.0, event) for event in events), **more)


def ordered(number: int, *nodes: str, cause: str = "start") -> Line:
    ranks = tuple(WorkerId(node, 0) for node in nodes)
    plan = Plan(
        number, Layout(dp_shard=len(nodes)), ranks, (1,) * len(nodes), (4,), 1, Resume("fresh"),
        cause=cause,
    )  # fmt: skip
    return line(decision=Decision((EnterPlan(plan),), "since it must be"))


GOOD = [move(1, "start"), move(2, "loss"), move(3, "growth"), move(4, "notice")]
COPY = CopyStored(Copy(20, "peer", 1, Layout(dp_shard=2)))


def failing(
    monkeypatch: pytest.MonkeyPatch,
    scenario: Scenario,
    moves: Sequence[Transition],
    *,
    lines: Sequence[Line] = (),
    worst: float = 1e-6,
    start_s: float = 10.0,
) -> dict[str, str]:
    """Name of an act's check -> why it fails."""
    books = type("Books", (), {"transitions": tuple(moves)})
    for module in (story_checks, judge):
        monkeypatch.setattr(module, "account", lambda lines: books)
    there = [line(COPY), *lines]
    played = Played(there, [], 3, start_s=start_s)
    found = story_checks._acts(scenario, played, worst)
    return {check.name: check.why for check in found if check.verdict == "fail"}


def changed(cause: str, **more: Any) -> list[Transition]:
    return [replace(one, **more) if one.cause == cause else one for one in GOOD]


def test_a_run_as_it_should_be_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing(monkeypatch, MAIN_PATH, GOOD) == {}


@pytest.mark.parametrize(
    ("moves", "name", "said"),
    [
        (changed("loss", at_step=19), "kill", "steps_before_acknowledged_copy is 1"),
        (changed("loss", source="durable"), "kill", "from_memory is 0"),
        (changed("loss", digest_ok=None), "kill", "content_equal is 0"),
        (changed("growth", steps_lost=1), "growth", "steps_lost is 1"),
        (changed("growth", digest_ok=False), "growth", "content_equal is 0"),
        (changed("notice", steps_lost=1), "notice", "steps_lost is 1"),
        (changed("notice", source="durable"), "notice", "from_memory is 0"),
        (changed("notice", pause_s=10.1), "notice", "pause_vs_start is 1.01"),
    ],
)
def test_each_promise_that_is_broken_fails(
    monkeypatch: pytest.MonkeyPatch, moves: list[Transition], name: str, said: str
) -> None:
    found = failing(monkeypatch, MAIN_PATH, moves, lines=[ordered(2, "a", cause="loss")])
    assert list(found) == [f"main path: {name}"] and said in found[f"main path: {name}"]


def test_losses_of_another_run_and_a_start_that_nobody_saw_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    acts = {act.name for act in MAIN_PATH.acts}
    assert set(failing(monkeypatch, MAIN_PATH, GOOD, worst=6e-4)) == acts
    assert set(failing(monkeypatch, MAIN_PATH, GOOD, start_s=float("nan"))) == acts


def test_a_transition_too_many_or_too_few_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = failing(monkeypatch, MAIN_PATH, GOOD[:-1])
    assert "a transition by notice was expected" in found["main path: notice"]
    more = [*GOOD, move(5, "growth")]
    found = failing(monkeypatch, MAIN_PATH, more)
    assert list(found) == ["main path: acts"] and "by ['growth']" in found["main path: acts"]
    assert failing(monkeypatch, replace(MAIN_PATH, also=("growth",)), more) == {}


def test_a_copy_that_came_behind_the_plan_is_none_that_it_could_take() -> None:
    later = CopyStored(Copy(24, "peer", 1, Layout(dp_shard=2)))
    lines = [line(COPY), ordered(2, "a", cause="loss"), line(later)]
    assert judge.before_acknowledged(move(2, "loss"), lines) == 0
    assert judge.before_acknowledged(move(3, "loss"), [*lines, ordered(3, "a")]) == 0
    assert judge.before_acknowledged(move(3, "loss", at_step=20), [*lines, ordered(3, "a")]) == 4
    assert judge.before_acknowledged(move(2, "loss"), []) == 21
    undone = [*lines, line(PlanEntered(2, 20)), ordered(3, "a")]
    assert judge.before_acknowledged(move(3, "loss", at_step=20), undone) == 0


def silent(node: str, why: str = "") -> Silent:
    return Silent(WorkerId(node, 0), 1, "step", 3.0, why)


STUCK = "it has not come to collective 4"


@pytest.mark.parametrize(
    ("kind", "lines", "said"),
    [
        ("hang", [line(silent("x"))], ""),
        ("hang", [line(silent("y"))], "x was stopped, and nobody found out; y was blamed"),
        ("hang", [line(silent("x", STUCK))], "nobody found out"),
        ("stall", [line(silent("x", STUCK))], "was not killed"),
        (
            "stall",
            [
                line(silent("x", STUCK)),
                line(decision=Decision((Abort(1, kill=(WorkerId("x", 0),)),), "so")),
            ],
            "",
        ),
        ("stall", [line(silent("x"))], "x stalled, and nobody found out"),
        ("corrupt", [line(WrongNumbers(1, 20, 10, (WorkerId("x", 0),), ""))], ""),
        ("corrupt", [line(WrongNumbers(1, 30, 10, (WorkerId("x", 0),), ""))], "good was step 10"),
        (
            "corrupt",  # a change of nodes came at the very step
            [
                line(Quiesced(WorkerId("y", 0), 1, 20)),
                line(WrongNumbers(2, 30, 10, (WorkerId("x", 0),), "")),
            ],
            "",
        ),
        ("corrupt", [], "x corrupted its results, and nobody found out"),
        (
            "device_error",
            [
                line(WorkerFailed(WorkerId("x", 0), 1, "device", "")),
                line(decision=Decision((Quarantine("x", "uncorrectable ECC error"),), "so")),
            ],
            "",
        ),
        (
            "device_error",
            [line(WorkerFailed(WorkerId("x", 0), 1, "device", ""))],
            "x must be quarantined, and nobody found out",
        ),
    ],
)
def test_whom_it_was_done_to_is_named(kind: str, lines: list[Line], said: str) -> None:
    there = [line(DrillAsked({kind: ["x"]})), *lines]
    found = "; ".join(story_checks.FINDINGS[kind](FAULTY, there))
    assert said in found and bool(said) == bool(found)


def test_an_act_that_nobody_found_out_about_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario("s", "p", (Act("s: hang", "hang=any", "loss"),), Nodes(2, {}))
    asked = line(DrillAsked({"hang": ["x"]}))
    moves = [move(1, "start"), move(2, "loss")]
    assert failing(monkeypatch, scenario, moves, lines=[asked, line(silent("x"))]) == {}
    found = failing(monkeypatch, scenario, moves, lines=[asked])
    assert "x was stopped, and nobody found out" in found["s: hang"]
    late = replace(scenario, acts=(Act("s: hang", "hang=any", "loss", pause_most_s=0.2),))
    assert (
        "pause_s is 0.3" in failing(monkeypatch, late, moves, lines=[line(silent("x"))])["s: hang"]
    )


@pytest.mark.parametrize(
    ("plans", "steps", "said"),
    [
        ([("x", "y"), ("y",), ("x", "y")], [1, 2, 3], ""),
        ([("x", "y"), ("y",), ("x", "y")], [1, 2, 1, 3], "a generation that was over"),
        ([("x", "y"), ("x",), ("x", "y")], [1, 2, 3], "the plans that have x: [True, True, True]"),
        ([("x", "y"), ("y",)], [1, 2], "the plans that have x"),
    ],
)
def test_a_node_that_was_cut_off(plans: list[tuple[str, ...]], steps: list[int], said: str) -> None:
    lines = [line(DrillAsked({"partition": ["x"]}))]
    lines += [ordered(i + 1, *nodes) for i, nodes in enumerate(plans)]
    lines += [line(StepDone(n, i, 1.0, 1.0, 1, 0.1)) for i, n in enumerate(steps)]
    found = "; ".join(story_checks._cut_off(CUT_OFF, lines))
    assert said in found and bool(said) == bool(found)


def test_a_node_that_joins_without_being_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    good = replace(MEASURED, link_bytes_per_s=1e6, neighbor="x")
    lines = [line(NodePrepared("x", admission=MEASURED)), ordered(1, "x")]
    failed = failing(monkeypatch, MAIN_PATH, GOOD, lines=[*lines, line(NodePrepared("y"))])
    assert list(failed) == ["main path: growth"]
    assert story_checks._not_measured([*lines, line(NodePrepared("y", admission=good))]) == []
    for admission, said in (
        (None, "y was not measured"),
        (MEASURED, "the link of y was not measured"),
        (replace(good, neighbor="y"), "the link of y was not measured"),
    ):
        assert story_checks._not_measured(
            [*lines, line(NodePrepared("y", admission=admission))]
        ) == [said]


def test_workers_that_were_started_again_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    same, other = NodePrepared("x", (1, 2)), NodePrepared("x", (1, 3))
    dead = WorkerFailed(WorkerId("x", 0), 1, "process", "gone")
    assert judge.survivors([line(same), line(same)], set()).verdict == "pass"
    assert judge.survivors([line(same), line(other)], set()).verdict == "fail"
    assert judge.survivors([line(same), line(other)], {"x"}).verdict == "pass"
    assert judge.survivors([line(same), line(dead)], set()).verdict == "fail"
    moves = [move(1, "start"), move(2, "notice")]
    assert failing(monkeypatch, LOOP_SCRIPT, moves, lines=[line(same), line(same)]) == {}
    found = failing(monkeypatch, LOOP_SCRIPT, moves, lines=[line(same), line(other)])
    assert list(found) == ["driver loss"]


def test_what_is_left_of_a_run_is_told() -> None:
    played = Played([], ["process 7: sleep", "temporary /tmp/x"], 3)
    found = story_checks._left(played)
    assert (found.verdict, found.figures["processes_left"]) == ("fail", 2)
    assert "process 7: sleep; temporary /tmp/x" in found.why


def test_a_strike_at_a_growth_must_lose_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (act,) = [one for s in SCENARIOS for one in s.acts if one.strike and one.strike.on == "growth"]
    scenario = Scenario("s", "p", (act,), Nodes(2, {}))
    moves = [move(1, "start"), move(2, "loss", steps_lost=1)]
    assert "steps_lost is 1" in failing(monkeypatch, scenario, moves)[act.name]


@pytest.mark.slow
def test_the_undisturbed_run_has_the_samples_and_losses_of_one_process() -> None:
    found = story_checks.undisturbed(3, Limit.after(60))
    assert (len(found.losses), len(found.digests), found.phase) == (3, 3, "stopped")
    assert len(set(found.digests)) == 3


def test_every_scenario_is_told_apart_and_says_what_it_promises() -> None:
    names = [name for scenario in SCENARIOS for name in scenario.checks]
    assert len(names) == len(set(names))
    assert all(len(scenario.promise.split()) > 8 for scenario in SCENARIOS)
    known = {*story_checks.FINDINGS, "", "notice", "kill", "add", "kill_driver"}
    kinds = {act.kind for scenario in SCENARIOS for act in scenario.acts}
    assert kinds <= known
    assert Act("a", "kill=any", "loss").kind == "kill"


def test_the_page_of_certify_names_each_scenario_and_each_check() -> None:
    page = (ROOT / "docs" / "certify.md").read_text()
    section = page.partition("\n## The scenarios\n")[2].partition("\n## ")[0]
    for name in (*(scenario.name for scenario in SCENARIOS), *RUN_CHECKS):
        assert f"`{name}`" in section, name


def test_the_entry_of_the_page_is_a_scenario() -> None:
    found = eval(
        block("certify.md", "python", 0), {"Scenario": Scenario, "Act": Act, "Nodes": Nodes}
    )
    assert found.checks[:2] == ("second kill: first", "second kill: second")
    assert all(str(n) in str(found.nodes.layouts[n]) for n in found.nodes.layouts)
    assert max(found.nodes.layouts) == found.nodes.total * found.nodes.workers
