"""When a worker counts as silent."""

from __future__ import annotations

from dataclasses import replace

from support.worker.beats import beat_of

from elastic.types import Layout, Plan, WorkerFailed, WorkerId
from elastic.worker.hosting.liveness import Liveness
from elastic.worker.process.beat import Beat
from elastic.worker.process.call_log import PartCalls
from elastic.worker.process.doing import Doing

A, B = WorkerId("a", 0), WorkerId("b", 0)


class Run:
    """Two workers whose polls are answered every 0.5 s unless they are named as mute."""

    def __init__(self, most_s: float | None = None, step_time_s: float = 0.1) -> None:
        self.liveness = Liveness(0.5, most_s)
        self.liveness.step_time_s[1] = step_time_s
        self.now_s = 0.0
        self.progress = 0

    def until(
        self,
        end_s: float,
        mute: tuple[WorkerId, ...] = (),
        moving: bool = True,
        phase: str = "stepping",
    ) -> list:
        found = []
        while self.now_s < end_s:
            self.now_s += 0.25
            self.progress += moving
            for worker in (A, B):
                self.liveness.called(worker)
                if worker not in mute and self.now_s % 0.5 == 0:
                    self.liveness.answered(worker, beat_of(1, phase, self.progress))
                    self.liveness.called(worker)
            found += [(round(self.now_s, 2), s.worker) for s in self.liveness.look(self.now_s)]
        return found


def test_a_mute_worker_is_named_once_after_its_bound() -> None:
    run = Run()
    assert run.until(10) == []
    found = run.until(30, mute=(B,), moving=False)
    assert [worker for _, worker in found] == [B]
    assert 11.25 < found[0][0] < 12.25, "the poll, then a second"
    assert run.until(31) == []
    assert [worker for _, worker in run.until(50, mute=(B,), moving=False)] == [B]


def test_who_supervises_a_script_answers_whatever_that_does() -> None:
    run = Run()
    assert run.until(7200, phase="supervising", moving=False) == []
    assert run.liveness.stuck_s(1) == 0.0, "a script may print nothing for hours"
    found = run.until(7230, mute=(B,), phase="supervising", moving=False)
    assert [worker for _, worker in found] == [B]
    assert 7209 < found[0][0] < 7212


def test_answers_that_came_late_make_it_patient_for_a_while() -> None:
    """A machine under load answers late without being silent: the bound follows the worst answer
    lately."""
    run = Run()
    run.until(10)
    run.until(11.25, mute=(A, B), moving=False)  # 0.75 s late
    run.until(11.5)
    assert [worker for _, worker in run.until(14.5, mute=(B,), moving=False)] == [], (
        "patient: four times as late"
    )
    assert [worker for _, worker in run.until(18, mute=(B,), moving=False)] == [B]
    run.until(300)
    assert [worker for _, worker in run.until(302.5, mute=(B,), moving=False)] == [B], (
        "forgotten after a time"
    )


def test_many_prompt_answers_at_once_do_not_make_a_late_one_forgotten() -> None:
    run = Run()
    run.until(10)
    run.until(11.25, mute=(A, B), moving=False)  # 0.75 s late
    run.until(11.5)
    for progress in range(1000):  # small steps: many answers in a second
        run.liveness.called(A)
        run.liveness.answered(A, beat_of(1, "stepping", progress))
    assert run.until(14.25, mute=(B,), moving=False) == []


def test_a_driver_that_is_late_itself_is_patient_before_any_answer_is_late() -> None:
    """The machine gave the driver no time for a while: nor may it give a worker any."""
    run = Run()
    run.until(10)
    run.now_s += 1.25
    assert run.liveness.look(run.now_s) == []  # its gap was 0.75 s longer than may be
    assert run.until(13.5, mute=(B,), moving=False) == []
    assert [worker for _, worker in run.until(17, mute=(B,), moving=False)] == [B]


def test_a_driver_that_was_stopped_for_long_is_patient_for_seconds_only() -> None:
    run = Run()
    run.until(10)
    run.now_s += 1000
    assert run.liveness.look(run.now_s) == []
    assert [worker for _, worker in run.until(1021, mute=(B,), moving=False)] == [B]


def test_an_answer_that_a_workers_own_work_held_up_tells_nothing_of_the_machine() -> None:
    run = Run()
    run.until(10, phase="preparing")
    run.until(18, mute=(A, B), moving=False, phase="preparing")  # it imports a large library
    run.until(20, phase="stepping")
    found = run.until(22.25, mute=(B,), moving=False)
    assert [worker for _, worker in found] == [B], "after its second, as on any quiet machine"


def test_not_while_a_peer_gets_on() -> None:
    run = Run()
    run.until(10)
    assert run.until(60, mute=(B,), moving=True) == []


def test_the_bound_grows_with_the_step_and_is_capped() -> None:
    slow = Run(step_time_s=2.0)
    slow.until(1)
    assert slow.until(11, mute=(B,), moving=False) == []
    assert [worker for _, worker in slow.until(13, mute=(B,), moving=False)] == [B]
    capped = Run(most_s=1.0, step_time_s=2.0)
    capped.until(1)
    assert [worker for _, worker in capped.until(4, mute=(B,), moving=False)] == [B]


def test_other_phases_have_patience() -> None:
    run = Run()
    run.until(1, phase="loading")
    assert run.until(55, mute=(B,), moving=False, phase="loading") == []
    assert [worker for _, worker in run.until(65, mute=(B,), moving=False, phase="loading")] == [B]


def test_a_process_that_is_started_anew_may_take_twice_as_long_as_the_one_before() -> None:
    liveness, now_s, told = Liveness(0.5), 0.0, []
    liveness.look(now_s)
    while len(told) < 4:  # each is ended and started again as it is told
        liveness.called(A)
        now_s += 0.5
        if liveness.look(now_s):
            told.append(now_s)
            liveness.forget(A)
    took = [after - before for before, after in zip([0.0, *told], told)]
    assert [round(seconds / 120) for seconds in took] == [1, 2, 4, 4]
    liveness.called(A)
    liveness.answered(A, beat_of(0, "idle", 0))
    liveness.forget(A)
    until_s = now_s + 122
    while now_s < until_s and not told[4:]:
        liveness.called(A)
        now_s += 0.5
        told += [now_s for _ in liveness.look(now_s)]
    assert len(told) == 5, "one that has answered begins anew"


def test_a_pause_of_the_driver_itself_is_nobodys_silence() -> None:
    run = Run()
    run.until(2)
    run.now_s += 1000  # the driver was stopped; all polls were answered meanwhile but not read
    assert run.liveness.look(run.now_s) == []


def test_a_generation_that_answers_and_stands_still_is_stuck() -> None:
    run = Run()
    run.until(10)
    assert run.liveness.stuck_s(1) == 0.0
    run.until(45, moving=False)
    assert run.liveness.stuck_s(1) == 0.0
    run.until(55, moving=False)
    assert run.liveness.stuck_s(1) > 40.0, (
        "30 s after a rank that is waited for could have been named"
    )
    assert run.liveness.stuck_s(2) == 0.0


def test_a_validation_is_stuck_only_after_minutes_within_one_batch() -> None:
    run = Run()
    run.until(10)
    run.until(200, phase="evaluating", moving=False)
    assert run.liveness.stuck_s(1) == 0.0, "15 steps and 30 s are over"
    run.until(200.5, phase="evaluating")
    run.until(790, phase="evaluating", moving=False)
    assert run.liveness.stuck_s(1) == 0.0, "it got on since"
    run.until(810, phase="evaluating", moving=False)
    assert run.liveness.stuck_s(1) > 600.0
    # the first that is through waits for the others
    run.liveness.answered(A, beat_of(1, "stepping", 1))
    assert run.liveness.stuck_s(1) == 0.0, "it got on"


def test_a_late_answer_is_known_long_before_it_is_silence() -> None:
    run = Run()
    run.until(10)
    assert run.liveness.late() == []
    run.until(11.25, mute=(B,), moving=False)
    assert run.liveness.late() == [B]
    assert not run.liveness.is_silent(B)


def test_a_call_that_one_script_makes_alone_is_named_as_soon_as_all_stand_still() -> None:
    """Nobody waits for the bound of silence: what was called stays called."""
    run, plan = Run(), Plan(1, Layout(dp_shard=2), (A, B), (1, 1), (1,))
    place = ("train.py, line 9",)
    alone = PartCalls(2, False, 2, "mm", (*place, "train.py, line 14"))
    other = PartCalls(2, False, 1, "m", place)
    further = PartCalls(2, True, 1, "m", place)
    run.liveness.answered(A, beat_of(calls=(alone,)))
    assert not run.liveness.unequal_calls(plan), "of B nothing is known"
    run.liveness.answered(B, beat_of(calls=(other,)))
    assert not run.liveness.unequal_calls(plan), "B may still come to it"
    run.liveness.answered(B, beat_of(generation=2, calls=(further,)))
    assert not run.liveness.unequal_calls(plan), "that is another generation"
    run.liveness.answered(B, beat_of(calls=(further,)))
    (failed,) = run.liveness.stalled(plan)
    assert isinstance(failed, WorkerFailed) and failed.kind == "program"
    said = "step 2: rank 0 calls run.model at train.py, line 14, rank 1 does not;"
    assert failed.error.startswith(said)
    assert not run.liveness.stalled(plan), "once"


def test_a_rank_that_waits_in_a_collective_of_its_script_alone_is_named_after_ten_seconds() -> None:
    """A script that has the loop is else given a minute."""
    liveness, plan = (
        Liveness(0.5, patience_s=60.0),
        Plan(1, Layout(dp_shard=2), (A, B), (1, 1), (1,)),
    )
    where = "train.py, line 9 (all_reduce)"

    def after(seconds: float, a: Doing, b: Doing) -> list:
        liveness.answered(A, beat_of(doing=a, where=where))
        liveness.answered(B, beat_of(doing=b))
        for _ in range(int(seconds * 4)):
            now_s = (liveness._looked_at_s or 0.0) + 0.25
            liveness.look(now_s)
        return liveness.stalled(plan)

    assert not after(15.0, "script", "own"), "B may still come to it"
    assert not after(0.0, "script", "script"), "both are in it"
    liveness.answered(A, beat_of(progress=1))
    assert not after(9.0, "script", "others")
    (failed,) = after(2.0, "script", "others")
    assert isinstance(failed, WorkerFailed) and failed.kind == "program"
    assert failed.error.startswith(
        "rank 0 waits in a collective of the script's own at train.py, line 9 (all_reduce), rank 1 "
        "does not call it: every rank"
    )
    assert not after(20.0, "script", "others"), "once"


def test_collectives_that_do_not_match_are_told_from_a_rank_that_does_not_come() -> None:
    """At once where their numbers contradict each other; else when a rank would be named."""
    plan = Plan(1, Layout(dp_shard=2), (A, B), (1, 1), (1,))

    def after(seconds: float, *beats: Beat, pp: int = 1, timed: bool = True) -> list:
        liveness = Liveness(0.5, patience_s=60.0)
        if timed:
            liveness.stepped(1, 1.0)
        for worker, beat in zip((A, B), beats, strict=True):
            liveness.answered(worker, beat)
        for look in range(int(seconds * 4)):
            liveness.look(0.25 * look)
        return liveness.stalled(replace(plan, layout=Layout(pp=2)) if pp > 1 else plan)

    def beat(fsdp: int, commits: int, doing: Doing = "others", where: str = "") -> Beat:
        return beat_of(arrived=(("fsdp", 0, fsdp), ("plan", 0, commits)), doing=doing, where=where)

    crossed = beat(7, 2), beat(8, 1)
    (failed,) = after(11, *crossed)
    assert isinstance(failed, WorkerFailed) and failed.kind == "mismatch"
    said = "rank 1 has begun 8 collectives of fsdp and 1 of plan, rank 0 7 and 2"
    assert failed.error == said and not after(9, *crossed)
    (failed,) = after(11, *crossed, pp=2)
    assert isinstance(failed, WorkerFailed) and (failed.kind, failed.error) == ("mismatch", said)
    places = beat(8, 1, where="m.py, line 3"), beat(8, 1, where="its backward pass")
    assert not after(14, *places), "fifteen of its steps"
    assert [failed.kind for failed in after(16, *places)] == ["collective"], "a network's, perhaps"
    assert not after(16, *places, pp=2), "stages are at places of their own"
    assert not after(16, places[0], beat(8, 1, "own")), "one may still come"
    assert not after(29, *places, timed=False) and after(11, *crossed, timed=False)
    assert [failed.kind for failed in after(31, *places, timed=False)] == ["collective"]
