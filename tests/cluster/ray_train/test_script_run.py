"""A script that is restarted: what the driver makes of nodes and of its ranks' words, the account
that comes of it, and the supervisor's eyes. No Ray."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.cluster.stage import wait_gone

from elastic.api.running.start_checks import failed_by_itself, paid_until_s
from elastic.cluster.nodes.demand import LEAVE_MOST_S
from elastic.cluster.ray_train import script_state
from elastic.cluster.ray_train.script_bill import ORPHAN_LEASE_S, bill_of, counted
from elastic.cluster.ray_train.script_child import PARENT, asker
from elastic.cluster.ray_train.script_messages import (
    Board,
    Ended,
    Formed,
    Hello,
    ScriptOrder,
    ScriptOutput,
)
from elastic.cluster.ray_train.script_state import Needs, ScriptState, lines_of
from elastic.cluster.ray_train.script_worker import here, listens, n_guests
from elastic.driver import LINE_EVERY_S
from elastic.errors import SpecError
from elastic.ledger.accounts import Account, account
from elastic.ledger.journal import Line, parse_line, write_line
from elastic.observe import run_tables
from elastic.observe.doctor import run_troubles
from elastic.observe.run_view import view_of
from elastic.sim.replay import replay
from elastic.types import (
    Abort,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    ModelProfile,
    Node,
    NodeLost,
    NodeReady,
    Notice,
    Pool,
    PriceSeen,
    Quiesce,
    Stop,
)  # fmt: skip

POOLS = (Pool("spot", max_nodes=4, usd_per_node_h=3600.0),)


class Story:
    """Plays the words of a run on a clock of its own; `lines` is its journal."""

    def __init__(self, n_nodes: int = 3, **needs: float) -> None:
        self.script = ScriptState(Needs(POOLS, **{"max_workers": 4, "start_s": 300.0, **needs}))  # type: ignore[arg-type]
        self.now_s, self.group, self.lines = 0.0, 0, list[Line]()
        start = DriverStarted(
            "run", 1, {"script": "train.py", "restarted": True}, POOLS, ModelProfile(0, 0, ())
        )
        self.lines.append(Line(0.0, 1, ((0.0, start),)))
        for k in range(n_nodes):
            self.ready(f"n{k}")
        self.script.expect("start")
        self.orders: list[ScriptOrder] = []

    def ready(self, name: str) -> None:
        self.script.node(NodeReady(Node(name, "spot")), self.now_s)

    def hear(self, event: Event) -> None:
        self.script.node(event, self.now_s)

    def meet(self, nodes: Sequence[str]) -> None:
        """Ray Train starts a group there, and it meets."""
        self.group += 1
        for rank, name in enumerate(nodes):
            self.script.heard(
                Hello(self.group, rank, self.now_s, len(nodes), 0, name, 100 + rank), name
            )
        self.script.heard(Formed(self.group, 0, self.now_s))

    def say(self, line: str) -> None:
        self.script.heard(ScriptOutput(self.group, 0, self.now_s, (line,)))

    def ended(self, rank: int, code: int = 0, asked: bool = False, tail: str = "") -> None:
        self.script.heard(Ended(self.group, rank, self.now_s, code, asked, tail))

    def wait(self, seconds: float, silent_s: Mapping[tuple[int, int], float] | None = None) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += 0.5
            self.script.look(self.now_s, silent_s or {})
            for events, decision in lines_of(self.script.log):
                self.lines.append(Line(self.now_s, 1, tuple(events), decision))
            self.script.log = []
            self.orders += self.script.orders
            self.script.orders = []

    def account(self) -> Account:
        return account([parse_line(write_line(line)) for line in self.lines])

    def decisions(self, kind: type) -> list[Decision]:
        found = [line.decision for line in self.lines if line.decision is not None]
        return [
            decision
            for decision in found
            if any(isinstance(action, kind) for action in decision.actions)
        ]


def test_a_run_that_nothing_happens_to() -> None:
    story = Story()
    story.wait(2)
    story.meet(["n0", "n1", "n2"])
    story.wait(20)
    for rank in range(3):
        story.ended(rank)
    story.wait(1)
    assert story.script.outcome == "succeeded"
    books = story.account()
    assert books.gpu_seconds["productive"] == pytest.approx(60, abs=3)
    assert books.gpu_seconds["program_startup"] == pytest.approx(6, abs=2)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert books.totals.usd == pytest.approx(books.totals.gpu_seconds)  # a dollar a second


def test_the_time_of_a_restart_is_not_productive_and_lost_steps_are_wasted() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    for step in range(1, 11):
        story.wait(1)
        story.say(f"step {step}: loss {5 - step / 10}")
    story.hear(NodeLost("n2", "gone"))
    story.wait(8)
    story.meet(["n0", "n1"])
    story.wait(2)
    for step in range(7, 13):  # its checkpoint was of step 6
        story.say(f"step {step}: loss {5 - step / 10}")
        story.wait(1)
    for rank in range(2):
        story.ended(rank)
    story.wait(1)
    assert story.script.outcome == "succeeded"
    books, view = story.account(), view_of(story.lines)
    assert [(t.cause, t.at_step, t.steps_lost) for t in books.transitions] == [
        ("start", 0, 0),
        ("loss", 6, 4),
    ]
    assert books.gpu_seconds["wasted_progress"] == pytest.approx(4 * 3, abs=1)
    assert books.gpu_seconds["productive"] == pytest.approx(6 * 3 + 6 * 2, abs=3)
    assert books.gpu_seconds["checkpoint_restore"] == pytest.approx(10 * 2, abs=3)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)
    assert (view.step, view.phase, len(view.curve())) == (12, "succeeded", 12)
    assert story.script.group is not None and story.script.generation == 2


def test_of_a_script_without_steps_its_groups_time_is_productive_to_the_end() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(13)
    story.hear(NodeLost("n2", "gone"))
    story.wait(20)
    story.meet(["n0", "n1"])
    story.wait(7)
    # it has no handler for SIGTERM: it trains until the node goes
    story.hear(Notice("n1", story.now_s + 12))
    story.wait(12)
    story.hear(NodeLost("n1", "gone"))
    story.wait(3)
    books = story.account()
    assert books.gpu_seconds["productive"] == pytest.approx(13 * 3 + 19 * 2, abs=3)
    assert books.gpu_seconds["checkpoint_restore"] == pytest.approx(20 * 2, abs=3)
    assert sum(books.gpu_seconds.values()) == pytest.approx(books.totals.gpu_seconds)


def test_the_loss_of_a_node_ends_the_group_and_expects_the_next_one() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.hear(NodeLost("n1", "gone"))
    story.ended(0, 1, tail="Connection closed by peer")
    story.wait(1)
    assert [order.kind for order in story.orders] == ["end"]
    assert story.decisions(Abort)[0].reason == "node n1 is lost"
    assert story.script.restart
    story.script.go()
    story.wait(0.5)
    assert [order.kind for order in story.orders] == ["end", "go"]
    assert story.script.plan is not None and len(story.script.plan.ranks) == 2
    assert story.script.outcome is None


def test_a_scripts_own_error_is_not_retried() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.ended(1, 1, tail="Traceback\nValueError: no such column")
    story.wait(0.5)
    story.ended(0, 1, tail="Connection closed by peer")
    story.wait(script_state.VERDICT_S + 1)
    assert story.script.outcome == "failed"
    assert story.script.reason == (
        "the script itself failed on rank 1 (exit code 1), no node was lost: ValueError: no such "
        "column"
    )
    assert story.script.first_error().endswith("ValueError: no such column")
    assert story.orders[-1].kind == "leave"
    assert failed_by_itself(story.lines) == "rank 1 (exit code 1): ValueError: no such column"
    again = Line(99.0, 2, ((99.0, story.lines[0].events[0][1]),))
    assert failed_by_itself([*story.lines, again]) == "", "somebody has started it by hand since"


def test_a_ray_worker_that_is_gone_is_a_loss() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.ended(0, 1, tail="Connection closed by peer")
    story.wait(script_state.VERDICT_S + 1, {(1, 2): 9.0})
    assert story.script.outcome is None
    assert story.decisions(Abort)[0].reason == "the Ray Train workers of ranks 2 are gone"


def test_a_process_that_was_killed_is_started_again_but_not_for_ever() -> None:
    story = Story()
    for _ in range(script_state.MOST_KILLED):
        story.meet(["n0", "n1", "n2"])
        story.wait(2)
        story.ended(1, -9)
        story.wait(script_state.VERDICT_S + 1)
        assert story.script.outcome is None and story.script.restart
    story.meet(["n0", "n1", "n2"])
    story.ended(1, -9)
    story.wait(script_state.VERDICT_S + 1)
    assert story.script.outcome == "failed"
    assert "signal 9" in story.script.reason
    assert failed_by_itself(story.lines) == "", "nor is that the script's fault"


def test_a_notice_reaches_those_that_listen_and_the_others_run_until_the_end() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.hear(Notice("n2", story.now_s + 30))
    story.wait(1)
    assert story.orders == [ScriptOrder(1, "end", 29.0, listeners=True)]
    story.wait(5)
    assert not story.script.restart  # nobody has left yet
    for rank in range(3):
        story.ended(rank, 0, asked=True)
    story.wait(0.5)
    assert story.script.restart
    assert story.script.plan is not None and story.script.plan.cause == "notice"
    assert story.script.plan.nodes == ("n0", "n1")
    assert story.decisions(Quiesce)


def test_a_script_that_does_not_listen_is_restarted_when_the_node_goes() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.hear(Notice("n2", story.now_s + 5))
    story.wait(5)
    story.hear(NodeLost("n2", "gone"))
    story.wait(1)
    assert [
        (a.plan.cause, len(a.plan.ranks))
        for d in story.decisions(EnterPlan)
        for a in d.actions
        if isinstance(a, EnterPlan)
    ][-1] == ("notice", 2)


def test_growth_restarts_at_the_larger_size() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(3)
    story.ready("n3")
    story.wait(2)
    assert story.orders[-1] == ScriptOrder(1, "end", script_state.GRACE_S)
    for rank in range(3):
        story.ended(rank, -15, asked=True)
    story.wait(1)
    assert story.script.plan is not None and story.script.plan.cause == "growth"
    assert len(story.script.plan.ranks) == 4


def test_more_nodes_than_workers_allowed_change_nothing() -> None:
    story = Story(max_workers=3)
    story.meet(["n0", "n1", "n2"])
    story.ready("n3")
    story.wait(5)
    assert not story.orders


def test_too_few_nodes_are_waited_for() -> None:
    story = Story(min_workers=3)
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.hear(NodeLost("n0", "gone"))
    story.wait(20)
    assert story.script.plan is None
    assert story.script.reason == "waiting: 2 workers of min_workers=3"
    assert story.account().gpu_seconds["productive"] < 8
    story.ready("n4")
    story.wait(1)
    assert story.script.plan is not None and story.script.plan.nodes == ("n1", "n2", "n4")


def test_a_script_that_never_meets_is_wrong_input() -> None:
    story = Story(start_s=20)
    story.group = 1
    for rank in range(3):
        story.script.heard(Hello(1, rank, 0.0, 3, 0, f"n{rank}", 1), f"n{rank}")
    story.wait(19)
    assert story.script.outcome is None
    story.wait(2)
    assert story.script.outcome == "failed" and story.script.bad_input
    assert "did not start its process group on 3 ranks within 20 s" in story.script.reason
    assert "\n" not in story.script.reason


def test_stop_lets_the_script_save() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.wait(2)
    story.script.ask_stop("signal SIGINT", story.now_s)
    story.wait(2)
    assert [order.kind for order in story.orders] == ["end"]
    assert story.script.outcome is None
    for rank in range(3):
        story.ended(rank, 0, asked=True)
    story.wait(1)
    assert (story.script.outcome, story.script.reason) == ("stopped", "signal SIGINT")
    assert isinstance(story.decisions(Stop)[0].actions[0], Stop)


def test_there_is_nothing_to_replay_and_no_durable_copy_to_miss() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.say("step 3: loss 1.0")
    story.wait(1)
    with pytest.raises(SpecError, match="no policy decided there"):
        replay(story.lines)
    shown = "\n".join(run_tables.status(view_of(story.lines)))
    assert "step        3\n" in shown and "restarted, not changed live" in shown
    assert [check.name for check in run_troubles(view_of(story.lines))] == ["phase"]


def test_words_of_an_older_group_do_not_count() -> None:
    story = Story()
    story.meet(["n0", "n1", "n2"])
    story.meet(["n0", "n1"])
    story.script.heard(Ended(1, 0, story.now_s, 1, False, "late"))
    story.wait(6)
    assert story.script.outcome is None
    assert story.script.group is not None and story.script.group.name == 2


# ----------------------------------------------------------------------------- board and supervisor


def test_the_board_gives_each_supervisor_every_order_once() -> None:
    board = Board()
    assert board.exchange(1, 0, [Formed(1, 0, 0.0)], n_seen=0) == []
    words, silent_s = board.take([ScriptOrder(1, "end"), ScriptOrder(2, "go")])
    assert words == [Formed(1, 0, 0.0)]
    assert set(silent_s) == {(1, 0)}
    assert [order.kind for order in board.exchange(1, 0, [], n_seen=0)] == ["end"]
    assert board.exchange(1, 0, [], n_seen=1) == []
    assert board.take([])[0] == []


def test_guests_at_a_port_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert n_guests(port) == 0
        with (
            socket.create_connection(("127.0.0.1", port)),
            socket.create_connection(("127.0.0.1", port)),
        ):
            assert n_guests(port) == 2


@pytest.mark.parametrize("handler", [True, False])
def test_who_listens_to_sigterm_is_seen(handler: bool) -> None:
    line = "signal.signal(signal.SIGTERM, lambda *a: None);" if handler else ""
    text = f"import signal,time;{line}print('up', flush=True);time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        assert listens(child.pid, signal.SIGTERM) is handler
        child.kill()


def test_the_script_is_itself_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys,time\nprint(__name__, sys.argv[1:], flush=True)\ntime.sleep(600)\n"
    )
    text = (
        "import "
        f"os,subprocess,sys,time\nos.environ['{PARENT}']=str(os.getpid())\nc=subprocess.Popen([sys.executable,'-m','elastic.cluster.ray_train.script_child',{str(script)!r},'--a','b'])\nprint(c.pid, "
        "flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert supervisor.stdout.readline() == "__main__ ['--a', 'b']\n"
        supervisor.kill()
        supervisor.wait()
        wait_gone([pid])


def test_a_script_is_found_where_the_driver_has_it_or_in_the_submitted_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy" / "sub").mkdir(parents=True)
    (tmp_path / "copy" / "sub" / "train.py").touch()
    monkeypatch.chdir(tmp_path / "copy")
    there = str(tmp_path / "copy" / "sub" / "train.py")
    assert here(there, str(tmp_path)) == (there, str(tmp_path))
    assert here("/gone/job/sub/train.py", "/gone/job") == (there, str(tmp_path / "copy"))


def test_a_question_goes_to_the_supervisor_and_back() -> None:
    mine, theirs = socket.socketpair()
    ask = asker(theirs)
    mine.sendall(b'{"deadline_ms": 5, "ranks": {"a": [1]}}\n')
    assert ask() == {"deadline_ms": 5, "ranks": {"a": [1]}}
    assert mine.recv(10) == b"?\n"
    mine.close()
    theirs.close()


# -------------------------------------------------------------------------------------------- money


class Paid(Story):
    """A driver of a run with a budget, on nodes of $3600/h; `before`: the journal so far."""

    def __init__(
        self, before: Sequence[Line] = (), embedded: bool = True, at_s: float = 0.0, **job: float
    ) -> None:
        self.script = ScriptState(
            Needs(POOLS, max_workers=4), resumed=bool(before), bill=bill_of(before)
        )
        self.now_s, self.group, self.lines, self.orders = at_s, 0, list(before), list[ScriptOrder]()
        given = {"restarted": True, "budget_usd": 100.0, **job}
        until_s = paid_until_s(before, ORPHAN_LEASE_S, embedded)
        start = DriverStarted("run", 1, given, POOLS, ModelProfile(0, 0, ()), paid_until_s=until_s)
        self.lines.append(Line(at_s, 1, ((at_s, start),)))
        self.script.bill = counted(self.script.bill, start, at_s)
        self.ready("n0")

    def wait(self, seconds: float, silent_s: Mapping[tuple[int, int], float] | None = None) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9 and self.script.outcome is None:
            self.script.pay(self.now_s + 0.5)
            super().wait(0.5, silent_s)


def test_the_budget_outlives_its_driver() -> None:
    first = Paid()
    first.meet(["n0"])
    first.wait(60)
    assert first.script.bill.usd == pytest.approx(60.0) and not first.script.stop_reason
    second = Paid(first.lines, at_s=1000.0)
    assert second.script.bill.usd == pytest.approx(60.0, abs=script_state.RAN_EVERY_S), (
        "embedded nodes ended with their driver"
    )
    second.meet(["n0"])
    second.wait(50)
    assert second.script.stop_reason.startswith("the budget of $100.00 is spent ($100.")
    third = Paid(second.lines, at_s=2000.0)
    third.wait(1)
    assert third.script.stop_reason, "nothing is left of it"


def test_on_a_cluster_the_nodes_outlive_a_driver_for_a_while_and_not_longer() -> None:
    first = Paid(budget_usd=1e6)
    first.meet(["n0"])
    first.wait(60)
    spent = first.script.bill.usd
    soon, late = (
        Paid(first.lines, embedded=False, at_s=60.0 + s, budget_usd=1e6) for s in (30.0, 50_000.0)
    )
    assert soon.script.bill.usd == pytest.approx(spent + 30.0, abs=script_state.RAN_EVERY_S)
    outlived_s = LINE_EVERY_S + ORPHAN_LEASE_S + LEAVE_MOST_S
    assert late.script.bill.usd == pytest.approx(spent + outlived_s, abs=script_state.RAN_EVERY_S)
    ended = [*first.lines, Line(61.0, 1, (), Decision((Stop("stopped", "asked"),), "asked"))]
    after = Paid(ended, embedded=False, at_s=50_000.0, budget_usd=1e6)
    assert after.script.bill.usd == pytest.approx(spent, abs=script_state.RAN_EVERY_S), (
        "it has given its nodes back"
    )


def test_prices_that_change_count() -> None:
    story = Paid()
    story.meet(["n0"])
    story.wait(10)
    story.hear(PriceSeen("spot", 7200.0))
    story.wait(20)
    assert story.script.bill.usd == pytest.approx(10 + 2 * 20)
    story.hear(NodeLost("n0", "gone"))
    story.wait(100)
    assert story.script.bill.usd == pytest.approx(50) and not story.script.stop_reason
    assert bill_of(story.lines).usd == pytest.approx(50, abs=2.0)


def test_the_deadline_is_the_runs() -> None:
    first = Paid(deadline_h=1.0, budget_usd=1e6)
    first.meet(["n0"])
    first.wait(60)
    second = Paid(first.lines, at_s=3590.0, deadline_h=1.0, budget_usd=1e6)
    second.meet(["n0"])
    second.wait(5)
    assert not second.script.stop_reason
    second.wait(10)
    assert second.script.stop_reason == "the deadline of 1 h is over"


def test_a_journal_without_paid_until_says_its_bill_too() -> None:
    first = Paid()
    first.meet(["n0"])
    first.wait(60)
    start = DriverStarted("run", 2, {"restarted": True}, POOLS, ModelProfile(0, 0, ()))
    assert bill_of([*first.lines, Line(500.0, 2, ((500.0, start),))]).usd == pytest.approx(
        60.0, abs=script_state.RAN_EVERY_S
    )
