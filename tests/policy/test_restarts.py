"""A script that is restarted, under the one policy: which groups follow each other, why, and what
the account says of it."""

from __future__ import annotations

import pytest
from support.policy.script_story import RAN_EVERY_S, ScriptStory, grown, three

from elastic.api.running.start_checks import failed_by_itself
from elastic.ledger.journal import Line
from elastic.observe import run_tables
from elastic.observe.diagnosis.doctor import run_troubles
from elastic.observe.run_view import view_of
from elastic.policy import restarts
from elastic.policy.faults import retries
from elastic.policy.pools import drain
from elastic.sim.replay import replay
from elastic.types import (
    Abort,
    DriverStarted,
    Node,
    NodeLost,
    NodeReady,
    Notice,
    NoticeWithdrawn,
    Pool,
    Progress,
    Quiesce,
    ReleaseNode,
    RequestFailed,
    RequestNodes,
    ScriptEnded,
    Silent,
    StopAsked,
    WorkerFailed,
    WorkerId,
)

N0, N1 = WorkerId("n0", 0), WorkerId("n1", 0)


def test_a_run_that_nothing_happens_to() -> None:
    story = three()
    story.wait(2)
    story.meet(steps=False)
    story.wait(20)
    story.end()
    assert (story.stop.outcome, story.stop.reason) == (
        "succeeded",
        "the script has ended on all 3 ranks",
    )
    books = story.account()
    assert books.gpu_seconds["productive"] == pytest.approx(60, abs=3)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert books.totals.usd == pytest.approx(books.totals.gpu_seconds)  # a dollar a second
    assert replay(story.lines).identical


@pytest.mark.parametrize("usd", [1.0, 0.0])
def test_what_nodes_cost_is_told_where_they_have_a_price(usd: float) -> None:
    story = three(pools=(Pool("spot", max_nodes=4, usd_per_node_h=usd),))
    story.meet()
    said = [line.decision.reason for line in story.lines if line.decision is not None]
    (starts,) = (text for text in said if "the script starts on 3 workers of 3 nodes" in text)
    assert ("nodes, $3.00/h" in starts, "$" in starts) == (usd > 0, usd > 0)


def test_one_rank_that_has_ended_well_waits_for_the_others() -> None:
    story = three()
    story.meet()
    story.hear(ScriptEnded(N0, 1), ScriptEnded(N1, 1))
    story.wait(5)
    assert story.state.phase == "running"
    story.hear(NodeLost("n2", "gone"))
    story.wait(1)
    assert len(story.plans) == 2, "it had not ended there"
    story.hear(ScriptEnded(N0, 1), ScriptEnded(N0, 2))
    assert story.state.phase == "entering"
    story.hear(ScriptEnded(N1, 2))
    assert story.stop.outcome == "succeeded", "also before it has printed a step"


def test_the_time_of_a_restart_is_not_productive_and_lost_steps_are_wasted() -> None:
    story = three()
    story.meet()
    for step in range(1, 11):
        story.wait(1)
        story.step(step)
    story.hear(NodeLost("n2", "gone"))
    story.wait(8)
    story.meet(6)  # its checkpoint was of that step
    for step in range(7, 13):
        story.wait(1)
        story.step(step)
    story.end()
    books, view = story.account(), view_of(story.lines)
    assert [(t.cause, t.at_step, t.steps_lost) for t in books.transitions] == [
        ("start", 0, 0),
        ("loss", 6, 4),
    ]
    assert books.gpu_seconds["wasted_progress"] == pytest.approx(4 * 3, abs=1)
    assert books.gpu_seconds["productive"] == pytest.approx(6 * 3 + 6 * 2, abs=3)
    assert books.gpu_seconds["checkpoint_restore"] == pytest.approx(8 * 2, abs=3)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert (view.step, view.phase, len(view.curve())) == (12, "succeeded", 12)
    assert story.plans[1].resume.source == "durable" and story.plans[1].resume.step == 10
    assert replay(story.lines).identical


def test_of_a_script_without_steps_its_groups_time_is_productive_to_the_end() -> None:
    story = three()
    story.meet(steps=False)
    story.wait(13)
    story.fail("n0", "rank 0 (exit code 1): Connection closed by peer")
    story.hear(NodeLost("n2", "gone"))
    story.wait(20)
    story.meet(steps=False)
    story.wait(7)
    # it has no handler for SIGTERM: it trains until the node goes
    story.hear(Notice("n1", story.now_s + 12))
    story.wait(12)
    story.fail("n0", "rank 0 (exit code 1): Connection closed by peer")
    story.hear(NodeLost("n1", "gone"))
    story.wait(3)
    books = story.account()
    assert books.gpu_seconds["productive"] == pytest.approx(13 * 3 + 19 * 2, abs=4)
    assert books.gpu_seconds["checkpoint_restore"] == pytest.approx(20 * 2 + 3, abs=5)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert [plan.cause for plan in story.plans] == ["start", "loss", "loss"]


def test_an_error_of_a_rank_waits_for_the_node_that_explains_it() -> None:
    story = three()
    story.meet()
    story.fail("n0", "rank 0 (exit code 1): Connection closed by peer")
    story.wait(restarts.VERDICT_S - 1)
    assert story.state.phase == "running"
    story.hear(NodeLost("n1", "gone"))
    story.wait(1)
    assert "node n1 is gone" in story.decisions(Abort)[0].reason
    assert [plan.nodes for plan in story.plans][1:] == [("n0", "n2")]


@pytest.mark.parametrize("killed_first", [True, False])
def test_so_does_a_process_that_was_killed(killed_first: bool) -> None:
    story = three()
    story.meet()
    failures = [("n1", "killed (signal 9)", "infrastructure"), ("n0", "rank 0: closed", "program")]
    for one in failures if killed_first else failures[::-1]:
        story.fail(*one)
    story.wait(6)
    assert len(story.plans) == 2


def test_an_error_that_nothing_explains_is_the_scripts_own_and_ends_the_run() -> None:
    story = three()
    story.meet()
    story.fail("n1", "rank 1 (exit code 1): IndexError: no such column")
    story.wait(restarts.VERDICT_S + 1)
    assert story.stop.outcome == "failed"
    assert story.stop.reason == (
        "the script itself failed on rank 1 (exit code 1): IndexError: no such column; no node was "
        "lost"
    )
    assert failed_by_itself(story.lines) == "rank 1 (exit code 1): IndexError: no such column"
    start = next(e for line in story.lines for _, e in line.events if isinstance(e, DriverStarted))
    again = [*story.lines, Line(99.0, 2, ((99.0, start),))]
    assert failed_by_itself(again) == "", "somebody has started it by hand since"


def test_a_process_that_was_killed_is_started_again_but_not_for_ever() -> None:
    story = three()
    for _ in range(retries.SCRIPTS_MOST):
        story.meet()
        story.wait(2)
        story.fail("n1", "the process was killed from outside (signal 9)", "infrastructure")
        story.wait(20)
        assert story.state.phase == "entering"
    story.meet()
    story.fail("n1", "the process was killed from outside (signal 9)", "infrastructure")
    story.wait(1)
    assert story.stop.outcome == "failed" and "signal 9" in story.stop.reason
    assert len(story.plans) == 1 + retries.SCRIPTS_MOST
    assert failed_by_itself(story.lines) == "", "nor is that the script's fault"
    assert replay(story.lines).identical


def test_a_group_that_ran_for_a_while_forgives_earlier_kills() -> None:
    story = three()
    for _ in range(retries.SCRIPTS_MOST + 2):
        story.meet(steps=False)
        story.wait(restarts.SETTLED_S + 2 * RAN_EVERY_S)
        story.fail("n1", "the process was killed from outside (signal 9)", "infrastructure")
        story.wait(3)
    assert story.state.phase == "entering"


def test_a_worker_that_does_not_answer_is_a_loss() -> None:
    story = three()
    story.meet()
    story.hear(Silent(N1, 1, "supervising", 5.0))
    (order,) = story.orders(Abort)
    assert isinstance(order, Abort) and order.kill == (N1,)
    story.wait(2)
    assert [plan.cause for plan in story.plans] == ["start", "loss"]


def test_a_notice_reaches_those_that_listen_and_the_others_run_until_the_end() -> None:
    story = three()
    story.meet()
    story.wait(2)
    story.hear(Notice("n2", story.now_s + 30))
    assert story.orders(Quiesce) == [Quiesce(1, grace_s=29.0, cause="notice", leaving=("n2",))]
    assert "SIGTERM" in story.decisions(Quiesce)[0].reason
    story.wait(5)
    story.leave("n0", "n1")
    assert len(story.plans) == 1, "one has not left yet"
    story.leave("n2")
    story.wait(1)
    assert (story.plans[1].cause, story.plans[1].nodes) == ("notice", ("n0", "n1"))
    assert ReleaseNode("n2") in story.orders(ReleaseNode)
    assert len(story.orders(Quiesce)) == 1
    assert replay(story.lines).identical


def test_a_second_notice_is_told_too_and_a_deaf_script_ends_with_its_node() -> None:
    story = three()
    story.meet()
    story.hear(Notice("n2", story.now_s + 20))
    story.wait(5)
    story.hear(Notice("n1", story.now_s + 30))
    told = story.orders(Quiesce)
    assert [one.leaving for one in told if isinstance(one, Quiesce)] == [("n2",), ("n1", "n2")]
    story.wait(14)
    story.hear(NodeLost("n2", "gone"))
    story.wait(1)
    assert (story.plans[1].cause, story.plans[1].nodes) == ("loss", ("n0",))


def test_a_deadline_far_away_is_no_reason_to_stop_yet() -> None:
    story = three()
    story.meet()
    story.wait(30)
    story.hear(Notice("n2", story.now_s + 1000))
    story.wait(1000 - drain.SCRIPT_NOTICE_S - 5)
    assert not story.orders(Quiesce)
    story.wait(10)
    assert story.orders(Quiesce)


def test_a_notice_for_a_group_that_has_not_met_is_told_as_well() -> None:
    story = three()
    story.hear(Notice("n2", story.now_s + 30))
    story.leave()
    story.wait(1)
    assert [(plan.cause, len(plan.ranks)) for plan in story.plans] == [("start", 3), ("notice", 2)]


def test_a_notice_that_is_withdrawn_leaves_a_deaf_script_alone_and_able_to_grow() -> None:
    story = three()
    story.meet()
    story.hear(Notice("n2", story.now_s + 20))
    story.wait(2)
    story.hear(NoticeWithdrawn("n2"))
    story.wait(60)
    assert story.state.phase == "running" and len(story.orders(Quiesce)) == 1
    story.hear(NodeReady(Node("n3", "spot")))
    story.wait(3)
    assert story.orders(Quiesce)[-1] == Quiesce(1, grace_s=restarts.GRACE_S, cause="growth")


def test_growth_restarts_at_the_larger_size() -> None:
    story = grown()
    assert story.orders(Quiesce) == [Quiesce(1, grace_s=restarts.GRACE_S, cause="growth")]
    story.leave()
    story.wait(1)
    assert (story.plans[1].cause, len(story.plans[1].ranks)) == ("growth", 4)
    assert replay(story.lines).identical


def test_it_does_not_grow_again_before_the_last_restart_has_been_worth_it() -> None:
    story = three()
    story.wait(30)
    story.meet()  # that took half a minute
    story.hear(NodeReady(Node("n3", "spot")))
    story.wait(25)
    assert not story.orders(Quiesce)
    story.wait(20)
    assert len(story.orders(Quiesce)) == 1


def test_a_restart_that_takes_longer_than_nodes_last_is_not_made_for_one_of_them() -> None:
    pool = Pool("spot", market_type="spot", max_nodes=4, usd_per_node_h=1.0)
    story = three(pools=(pool,), max_silence_s=4000.0)
    story.wait(3600)
    story.meet()  # that took an hour; four spot nodes are expected to lose one in five
    story.wait(3700)
    story.hear(NodeReady(Node("n3", "spot")))
    story.wait(10)
    assert not story.orders(Quiesce)
    assert "would be gained until the next reclaim" in story.said


def test_a_group_that_does_not_end_is_ended() -> None:
    story = grown()
    story.wait(restarts.GRACE_S + restarts.LEAVE_MOST_S + 1)
    assert "has not ended" in story.decisions(Abort)[0].reason


def test_more_nodes_than_workers_allowed_change_nothing() -> None:
    story = three(max_workers=3)
    story.meet()
    story.wait(60)
    story.hear(NodeReady(Node("n3", "spot")))
    story.wait(5)
    assert not story.orders(Quiesce)


def test_too_few_nodes_are_waited_for() -> None:
    story = three(min_workers=3)
    story.meet(steps=False)
    story.wait(2)
    story.hear(NodeLost("n0", "gone"))
    story.wait(20)
    assert story.state.phase == "waiting"
    assert "2 of 3 required (min_workers)" in story.said
    assert story.account().gpu_seconds["productive"] < 8
    story.hear(NodeReady(Node("n4", "spot")))
    story.wait(1)
    assert story.plans[1].nodes == ("n1", "n2", "n4")
    assert story.plans[1].cause == "loss"


def test_a_notice_that_leaves_too_few_lets_it_save_and_wait() -> None:
    story = three(min_workers=3)
    story.meet()
    story.hear(Notice("n2", story.now_s + 30))
    story.leave()
    story.wait(5)
    assert story.state.phase == "waiting" and len(story.plans) == 1
    story.hear(NodeReady(Node("n4", "spot")))
    story.wait(1)
    assert (story.plans[1].cause, story.plans[1].nodes) == ("notice", ("n0", "n1", "n4"))


def test_a_script_that_never_meets_is_wrong_input() -> None:
    story = three(max_silence_s=20.0)
    story.wait(19)
    assert story.state.phase == "entering"
    story.wait(2)
    assert story.stop.outcome == "failed" and restarts.never_met(story.state)
    assert "did not start its process group on 3 ranks within 20 s" in story.stop.reason
    assert "\n" not in story.stop.reason


def test_one_that_has_met_may_take_longer_to_say_where_it_continues() -> None:
    story = three(max_silence_s=20.0)
    story.wait(15)
    story.hear(Progress(N0, 1, "supervising"))
    story.wait(60)
    assert story.state.phase == "entering"
    story.wait(60)
    assert story.orders(Abort) and not restarts.never_met(story.state)


@pytest.mark.parametrize("met", [True, False])
def test_stop_lets_the_script_save(met: bool) -> None:
    story = three()
    if met:
        story.meet()
    story.wait(2)
    story.hear(StopAsked("signal SIGINT"))
    story.wait(2)
    assert story.orders(Quiesce) == [Quiesce(1, grace_s=restarts.GRACE_S)]
    assert story.state.phase in ("running", "entering")
    story.leave()
    story.wait(1)
    assert (story.stop.outcome, story.stop.reason) == ("stopped", "signal SIGINT")
    assert len(story.plans) == 1
    assert replay(story.lines).identical


def test_one_that_does_not_listen_to_a_notice_is_told_to_stop_all_the_same() -> None:
    story = three()
    story.meet()
    story.hear(Notice("n2", story.now_s + 100))
    story.hear(StopAsked("enough"))
    assert story.orders(Quiesce)[-1] == Quiesce(1, grace_s=restarts.GRACE_S)
    story.wait(70)
    assert story.stop.outcome == "stopped" and "had not ended" in story.stop.reason


def test_a_pool_without_capacity_is_left_alone_longer_each_time() -> None:
    story = three()
    story.meet()
    for _ in range(3):
        (asked, *_) = story.orders(RequestNodes)[-1:]
        assert isinstance(asked, RequestNodes)
        story.hear(RequestFailed("spot", asked.request_id, "no capacity"))
        story.wait(700)
    asked_at = [
        line.at_s
        for line in story.lines
        if line.decision and any(isinstance(a, RequestNodes) for a in line.decision.actions)
    ]
    waits = [later - sooner for sooner, later in zip(asked_at, asked_at[1:], strict=False)]
    assert waits[0] < waits[1] < waits[2]


def test_on_demand_stands_in_where_spot_gives_nothing_and_is_left_again() -> None:
    pools = (
        Pool("spot", market_type="spot", max_nodes=2, usd_per_node_h=1.0),
        Pool("fixed", market_type="on-demand", max_nodes=2, usd_per_node_h=4.0),
    )
    story = ScriptStory(pools=pools, purpose="cheapest", min_workers=1)
    (asked,) = story.orders(RequestNodes)
    assert isinstance(asked, RequestNodes) and asked.pool == "spot"
    story.hear(RequestFailed("spot", asked.request_id, "no capacity"))
    story.wait(3600)
    fixed = [one for one in story.orders(RequestNodes) if isinstance(one, RequestNodes)]
    assert {one.pool for one in fixed} == {"spot", "fixed"}
    story.hear(NodeReady(Node("f0", "fixed")))
    story.wait(20)
    assert story.plans[0].nodes == ("f0",)
    story.wait(5)
    story.meet()
    story.wait(60)
    story.hear(NodeReady(Node("s0", "spot")), NodeReady(Node("s1", "spot")))
    story.wait(10)
    assert story.orders(Quiesce)[-1] == Quiesce(1, grace_s=restarts.GRACE_S, cause="release")
    story.leave()
    story.wait(2)
    assert (story.plans[1].cause, set(story.plans[1].nodes)) == ("release", {"s0", "s1"})
    assert ReleaseNode("f0") in story.orders(ReleaseNode)
    assert replay(story.lines).identical


def test_a_status_says_whose_affair_the_checkpoint_is() -> None:
    story = three()
    story.meet()
    story.step(3)
    shown = "\n".join(run_tables.status(view_of(story.lines)))
    assert "step        3\n" in shown and "restarted, not changed live" in shown
    assert [check.name for check in run_troubles(view_of(story.lines))] == ["phase"]


def test_words_of_an_older_group_do_not_count() -> None:
    story = three()
    story.meet()
    story.hear(NodeLost("n2", "gone"))
    story.wait(1)
    story.meet()
    story.hear(WorkerFailed(N0, 1, "program", "late"))
    story.wait(6)
    assert story.state.phase == "running" and len(story.plans) == 2
