"""Each check that runs on worker processes finds the fault that it is for. Two ranks, real
processes: forks of one that has torch imported, except where a cold start is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.certify.roomy import wrong
from support.worker.forks import FORKS

from elastic.certify.checks import fault_checks, layout_checks, move_checks, speed_checks
from elastic.certify.checks.layout_checks import _groups, groups_bound
from elastic.certify.harness.lab import Lab
from elastic.certify.harness.place import Place
from elastic.certify.tasks import Task, Tasks
from elastic.scenarios.check import Check
from elastic.worker.hosting import session_processes

PLACE = Place("cpu-gloo", 2)


def lab_of(fault: str) -> Lab:
    return Lab(
        PLACE,
        f"support.certify.faulty_sessions:{fault}"
        if fault
        else "elastic.worker.session.session:Session",
    )


def run(task: Task) -> dict[str, Check]:
    done = Tasks(lambda check: None)
    done.run([task], 800.0)
    return {check.name: check for check in done.checks}


def verdicts(found: dict[str, Check]) -> set[str]:
    return {check.verdict for check in found.values()}


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_processes, "get_context", lambda method: FORKS)


def test_groups_that_take_long_fail() -> None:
    most_s = groups_bound(4).most
    assert most_s is not None
    assert 2.0 < most_s < 2.5
    assert groups_bound(64).most == pytest.approx(3 * 11.2)
    assert _groups([0.1, 0.2, 9.0], 4).verdict == "pass"
    assert _groups([0.1, most_s * 1.1, 9.0], 4).verdict == "fail"


@pytest.mark.whole
def test_layouts_abort_and_story_pass_without_a_fault() -> None:
    with lab_of("") as lab:
        found = (
            run(layout_checks.task(lab))
            | run(fault_checks.abort_task(lab))
            | run(fault_checks.story_task(lab))
        )
    folder_is_gone = not Path(lab.folder).exists()
    assert not [text for text in map(wrong, found.values()) if text]
    assert len(found) == 5 + 1 + len(fault_checks.abort_layouts(2)) + 3
    assert found["kill"].figures["steps_before_acknowledged_copy"] == 0
    assert found["notice"].figures["steps_lost"] == found["growth"].figures["steps_lost"] == 0
    assert folder_is_gone


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
class TestFaults:
    @pytest.mark.e2e
    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("fault", ["WrongLoss", "LeavesOutSteps"])
    def test_wrong_losses_and_missing_steps_fail_every_layout(
        self, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layout_checks, "all_layouts", lambda n: fault_checks.layouts(n)[:2])
        with lab_of(fault) as lab:
            found = run(layout_checks.task(lab))
        layouts = [check for name, check in found.items() if name.startswith("layout ")]
        assert {check.verdict for check in layouts} == {"fail"}
        assert len(layouts) == 2
        said = (
            "worst_loss_difference is 0.001"
            if fault == "WrongLoss"
            else "steps [1, 3, 4] were done, not 1 to 4"
        )
        assert all(said in check.why for check in layouts)

    @pytest.mark.whole
    def test_a_slow_abort_fails(self) -> None:
        with lab_of("SlowAbort") as lab:
            found = run(fault_checks.abort_task(lab))
        assert verdicts(found) == {"fail"}
        assert all(
            "freed_s is" in check.why and check.figures["freed_s"] >= 3.0
            for check in found.values()
        )

    @pytest.mark.e2e
    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        ("fault", "failing", "said"),
        [
            ("OtherContent", ("kill", "growth", "notice"), "content_equal is 0"),
            ("KeepsNothing", ("kill",), "hold no whole copy"),
            (
                "OtherFunction",
                ("kill",),
                "layout dp_shard=2 computes another function than the one before",
            ),
            ("WrongLoss", ("kill", "growth", "notice"), "worst_loss_difference is 0.001"),
        ],
    )
    def test_kill_growth_and_notice_find_it(
        self, fault: str, failing: tuple[str, ...], said: str
    ) -> None:
        with lab_of(fault) as lab:
            found = run(fault_checks.story_task(lab))
        assert all(found[name].verdict == "fail" and said in found[name].why for name in failing), (
            found
        )
        assert "pass" not in verdicts(found)

    @pytest.mark.whole
    def test_a_slow_change_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            fault_checks.Story,
            "cold_s",
            property(lambda self: 1e-3, lambda self, value: None),
            raising=False,
        )
        with lab_of("") as lab:
            found = run(fault_checks.story_task(lab))
        assert verdicts(found) == {"fail"}
        assert all("pause_vs_cold_start" in check.why for check in found.values())

    @pytest.mark.whole
    def test_moves_with_other_content_and_slow_moves_fail(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(move_checks, "wire", lambda place, limit: 1000.0)
        with lab_of("OtherContent") as lab:
            (check,) = run(move_checks.task(lab)).values()
        assert check.verdict == "fail"
        assert "content_equal is 0" in check.why
        assert "rate_vs_bare" in check.why

    @pytest.mark.whole
    def test_moves_pass_without_a_fault(self) -> None:
        with lab_of("") as lab:
            (check,) = run(move_checks.task(lab)).values()
        assert check.figures["content_equal"] == 1, check.why
        assert check.figures["bytes"] > move_checks.MOVED_LEAST_BYTES
        assert check.figures["bare_gb_per_s"] > 0

    @pytest.mark.whole
    def test_slow_steps_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(speed_checks.bare_runs, "train", lambda place, n, limit: [0.05] * n)
        with lab_of("SlowSteps") as lab:
            (check,) = run(speed_checks.task(lab)).values()
        assert check.verdict == "fail"
        assert "step_time_ratio" in check.why
