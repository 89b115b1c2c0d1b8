"""The loop: journal before actions, one decision per tick, ends closed, signals heard."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.sim.tiny_driver import JOB, POOL, Tiny, start

from elastic.driver import (
    COLLECT_EVERY,
    LINE_EVERY_S,
    drive,
    restored,
    seldom_collected,
    stop_signals,
    stopped_by,
)
from elastic.errors import LostContact, SpecError, StateLost, StorageFull, StorageRefused
from elastic.ledger.journal import Journal, MemoryJournal, read
from elastic.policy.state.fold import State
from elastic.sim.replay import replay
from elastic.types import (
    Abort,
    Action,
    Copy,
    CopyDamaged,
    Decision,
    DriverStarted,
    EnterPlan,
    Event,
    Holding,
    Layout,
    Node,
    NodeReady,
    Quiesce,
    Quiesced,
    RequestNodes,
    Stop,
    StopAsked,
    StorageSeen,
    WorkerFailed,
    WorkerId,
)


def test_a_run_from_start_to_end() -> None:
    journal = MemoryJournal()
    backend = Tiny(journal)
    state = drive(backend, journal, start())
    assert state.phase == "succeeded" and state.step == 5 and backend.closed == 1
    assert [type(a).__name__ for a in backend.actions] == [
        "RequestNodes",
        "Prepare",
        "EnterPlan",
        "Stop",
    ]
    assert isinstance(journal.lines[0].events[0][1], DriverStarted)
    assert restored(journal.lines) == state


def test_the_file_tells_the_same_story(tmp_path: Path) -> None:
    state = drive(Tiny(), Journal(tmp_path / "j", 1), start())
    assert restored(read(tmp_path / "j")) == state
    assert restored([]) is None


def test_what_is_known_at_the_start_is_recorded_and_folded_with_it(tmp_path: Path) -> None:
    first = replace(
        start(),
        durable=tuple(Copy(step, "durable", 1, Layout(), (2,), uri=f"u{step}") for step in (3, 2)),
    )
    lost = CopyDamaged("u3", "u3/commit.json: altered")
    state = drive(Tiny(), Journal(tmp_path / "j", 1), first, found=[lost])
    lines = read(tmp_path / "j")
    assert [event for _, event in lines[0].events] == [first, lost]
    assert state.damaged == {"u3": lost.reason} and restored(lines) == state
    orders = [
        action for line in lines if line.decision is not None for action in line.decision.actions
    ]
    resumed = [order.plan.resume for order in orders if isinstance(order, EnterPlan)]
    assert [(resume.source, resume.step, resume.uri) for resume in resumed] == [
        ("durable", 2, "u2")
    ]
    assert replay(lines).identical


def test_ticks_without_events_or_orders_leave_no_line() -> None:
    journal = MemoryJournal()
    backend = Tiny(journal)
    decided = 0

    def waiting(state: State, now_s: float) -> Decision:
        nonlocal decided
        decided += 1
        return (
            Decision((Stop("stopped", "enough"),), "enough")
            if decided > 30
            else Decision((), "waits", now_s + 1)
        )

    drive(backend, journal, start(), decide=waiting)
    assert decided == 31 and len(journal.lines) == 2


def test_a_wake_that_is_over_does_not_stop_the_clock() -> None:
    """A time that rounding leaves at this very moment would be looked at for ever."""
    looks: list[float] = []

    class Waits(Tiny):
        def poll(self, until_s: float | None) -> list[Event]:
            assert until_s is not None
            self.time_s = max(self.time_s, until_s)  # as a virtual clock does
            return []

    def now_again(state: State, now_s: float) -> Decision:
        looks.append(now_s)
        return (
            Decision((Stop("stopped", "enough"),), "enough")
            if len(looks) > 9
            else Decision((), "waits", now_s)
        )

    drive(Waits(), MemoryJournal(), start(), decide=now_again)
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_once_for_a_stop_that_saves(number: int) -> None:
    journal = MemoryJournal()
    before = signal.getsignal(number)
    backend = Tiny(journal, {3: lambda: os.kill(os.getpid(), number)})
    state = drive(backend, journal, start())
    assert state.phase == "stopped" and state.saved_step == 3 and backend.closed == 1
    asked = [
        event for line in journal.lines for _, event in line.events if isinstance(event, StopAsked)
    ]
    assert asked == [StopAsked(f"signal {signal.Signals(number).name}")]
    assert stopped_by(state) == number
    assert not stopped_by(replace(state, phase="succeeded"))
    assert state.stop is not None
    assert not stopped_by(replace(state, stop=replace(state.stop, reason="elastic stop")))
    assert any(isinstance(a, Quiesce) and a.save for a in backend.actions)
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_run_at_once() -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    journal = MemoryJournal()
    backend = Tiny(journal, {3: twice})
    state = drive(backend, journal, start())
    assert (
        state.phase == "stopped" and "asked twice" in state.outcome_reason and backend.closed == 1
    )
    assert not any(isinstance(a, Quiesce) for a in backend.actions) and isinstance(
        backend.actions[-1], Stop
    )


def test_a_closed_terminal_asks_once_however_often_it_says_so_and_not_at_all_under_nohup() -> None:
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)

    journal = MemoryJournal()
    backend = Tiny(journal, {3: hang_up})
    state = drive(backend, journal, start())
    assert (
        state.phase == "stopped"
        and state.saved_step == 3
        and "signal SIGHUP" in state.outcome_reason
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and not asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_inside_poll_is_a_wish_to_stop() -> None:
    def interrupt() -> None:
        if backend.step == 2 and not backend.stopping and not raised:
            raised.append(1)
            raise KeyboardInterrupt

    raised: list[int] = []
    backend = Tiny()
    backend.on_poll = interrupt
    state = drive(backend, MemoryJournal(), start())
    assert raised and state.phase == "stopped" and state.saved_step == 2
    assert stopped_by(state) == signal.SIGINT


@pytest.mark.parametrize(
    "error", [StateLost("no copy is left"), ZeroDivisionError("division by zero")]
)
def test_a_policy_that_raises_ends_the_run_on_record(error: Exception) -> None:
    def faulty(state: State, now_s: float) -> Decision:
        raise error

    journal, backend = MemoryJournal(), Tiny()
    state = drive(backend, journal, start(), decide=faulty)
    assert state.phase == "failed" and str(error) in state.outcome_reason and backend.closed == 1
    assert journal.lines[-1].decision is not None and isinstance(
        journal.lines[-1].decision.actions[0], Stop
    )


def test_after_an_order_the_loop_looks_again_at_once() -> None:
    class Watched(Tiny):
        asked: list[float | None] = []

        def poll(self, until_s: float | None) -> list[Event]:
            self.asked.append(None if until_s is None else until_s - self.time_s)
            return super().poll(until_s)

    def policy(state: State, now_s: float) -> Decision:
        orders = {1: (RequestNodes("p", 1, "p-1"),), 3: (Stop("stopped", "enough"),)}
        return Decision(orders.get(len(backend.asked), ()), "because", now_s + 0.5)

    backend = Watched()
    drive(backend, MemoryJournal(), start(), decide=policy)
    assert backend.asked == [0.5, 0.0, 0.5]


def test_a_backend_that_raises_is_closed() -> None:
    class Broken(Tiny):
        def poll(self, until_s: float | None) -> list[Event]:
            raise OSError("cluster is gone")

    backend = Broken()
    with pytest.raises(OSError, match="cluster is gone"):
        drive(backend, MemoryJournal(), start())
    assert backend.closed == 1


def test_a_second_driver_goes_on_where_the_first_one_left(tmp_path: Path) -> None:
    def die() -> None:
        raise SystemExit(9)

    with pytest.raises(SystemExit):
        drive(Tiny(at_step={4: die}), Journal(tmp_path / "j", 1), start())
    before = restored(read(tmp_path / "j"))
    assert before is not None and before.phase == "running" and before.generation == 1
    copy = Copy(2, "durable", 1, Layout(), (2,), uri="u2")
    backend = Tiny()
    state = drive(
        backend, Journal(tmp_path / "j", 2), start(epoch=2, durable=(copy,)), state=before
    )
    assert state.phase == "succeeded" and state.epoch == 2
    (entered,) = [a.plan for a in backend.actions if isinstance(a, EnterPlan)]
    assert (entered.generation, entered.resume.source, entered.resume.step) == (2, "durable", 2)
    assert restored(read(tmp_path / "j")) == state


@pytest.mark.parametrize("usd_per_node_h", [0.0, 1.0])
def test_while_nodes_are_paid_for_there_is_a_line_every_minute(usd_per_node_h: float) -> None:
    journal, backend = MemoryJournal(), Tiny()
    ready = NodeReady(Node("a", "p"))
    backend.out = [ready]

    def slow() -> None:
        backend.time_s += 19.75
        if backend.time_s >= 600:
            backend.out.append(StopAsked("enough"))

    backend.on_poll = slow
    job = {**JOB, "min_workers": 2}
    drive(
        backend,
        journal,
        start(job=job, pools=(replace(POOL, max_nodes=2, usd_per_node_h=usd_per_node_h),)),
    )
    times = [line.at_s for line in journal.lines]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert (max(gaps) <= LINE_EVERY_S) == bool(usd_per_node_h), gaps


class Away(Tiny):
    """`certain` as a lease says it. Each poll from the first plan on takes one of `signs`, then it
    stays True."""

    def __init__(self, signs: str, **more: Any) -> None:
        super().__init__(**more)
        self.signs, self.certain = list(signs), True
        self.trouble: Exception | None = None
        self.while_away: list[Action] = []

    def poll(self, until_s: float | None) -> list[Event]:
        if self.generation:
            self.certain = not self.signs or self.signs.pop(0) == "y"
        return super().poll(until_s)

    def execute(self, action: Action) -> None:
        if not self.certain:
            self.while_away.append(action)
        super().execute(action)


class Breaks(Away):
    """Its generation breaks at a step, while storage is away; the worker holds a copy of that
    step."""

    def __init__(self, signs: str, at: int, **more: Any) -> None:
        super().__init__(signs, **more)
        self.at_step = {at: self._break}

    def _break(self) -> None:
        self.out.append(
            WorkerFailed(WorkerId("n", 0), self.generation, "collective", "connection reset")
        )

    def execute(self, action: Action) -> None:
        super().execute(action)
        if isinstance(action, Abort):
            held = Holding(WorkerId("n", 0), action.generation, 0, self.step, "live")
            self.out.append(Quiesced(held.worker, action.generation, self.step, (held,)))


def test_a_loss_while_storage_is_away_is_mended_from_memory_at_once() -> None:
    journal = MemoryJournal()
    backend = Breaks("n" * 40, 2, journal=journal)
    backend.trouble = TimeoutError("no answer")
    state = drive(backend, journal, start())
    assert state.phase == "succeeded" and [type(action) for action in backend.while_away] == [
        Abort,
        EnterPlan,
    ]
    plan = backend.while_away[-1].plan  # type: ignore[attr-defined]
    assert (plan.generation, plan.resume.source, plan.resume.step) == (2, "peer", 2)
    seen = [
        event
        for line in journal.lines
        for _, event in line.events
        if isinstance(event, StorageSeen)
    ]
    assert [(event.answers, event.what) for event in seen] == [
        (False, "lease: no answer"),
        (True, ""),
    ]
    assert replay(journal.lines).identical and restored(journal.lines) == state


def test_without_a_copy_in_memory_a_loss_waits_for_storage() -> None:
    class Forgets(Breaks):
        def execute(self, action: Action) -> None:
            super().execute(action)
            self.out = [replace(e, holdings=()) if isinstance(e, Quiesced) else e for e in self.out]

    journal = MemoryJournal()
    backend = Forgets("n" * 40, 2, journal=journal)
    state = drive(
        backend, journal, start(durable=(Copy(1, "durable", 1, Layout(), (2,), uri="u"),))
    )
    assert state.phase == "succeeded" and [type(action) for action in backend.while_away] == [Abort]
    waits = [
        line.decision.reason
        for line in journal.lines
        if line.decision and "waits to begin" in line.decision.reason
    ]
    assert waits == [
        "waits to begin from step 1 from the checkpoint: storage does not answer (lease: no answer)"
    ]
    assert replay(journal.lines).identical


def test_orders_are_carried_out_though_their_line_is_not_stored_and_the_end_is_not() -> None:
    journal = MemoryJournal()
    backend = Tiny(journal)
    at_stop: list[bool] = []

    def look() -> None:
        journal.settled = backend.step == 5 and bool(at_stop)
        if journal.lines[-1].decision and any(
            isinstance(a, Stop) for a in journal.lines[-1].decision.actions
        ):
            at_stop.append(any(isinstance(action, Stop) for action in backend.actions))

    backend.on_poll = look
    journal.settled = False
    state = drive(backend, journal, start())
    assert state.phase == "succeeded" and at_stop == [False, False]
    assert [type(a).__name__ for a in backend.actions] == [
        "RequestNodes",
        "Prepare",
        "EnterPlan",
        "Stop",
    ]


@pytest.mark.parametrize("limit", [{"budget_usd": 1.0}, {"deadline_h": 0.01}])
def test_a_limit_ends_the_run_within_its_bound_though_storage_is_away(
    limit: dict[str, float],
) -> None:
    journal = MemoryJournal()
    backend = Away("n" * 100_000, journal=journal)
    backend.at_step = {2: lambda: setattr(backend, "time_s", 30.0)}
    pool = replace(POOL, usd_per_node_h=3600.0 / 30 if "budget_usd" in limit else 0.0)
    state = drive(backend, journal, start(job=JOB | limit | {"steps": 50}, pools=(pool,)))
    assert state.phase == "stopped" and isinstance(backend.while_away[-1], Stop)
    assert any(isinstance(action, Quiesce) for action in backend.while_away) or state.usd >= 1.0
    assert backend.time_s < 100.0 and replay(journal.lines).identical


def test_a_person_s_wish_to_stop_waits_for_storage_that_what_it_ends_can_be_saved() -> None:
    journal = MemoryJournal()
    backend = Away(
        "n" * 10, journal=journal, at_step={2: lambda: backend.out.append(StopAsked("enough"))}
    )
    state = drive(backend, journal, start(job=JOB | {"steps": 50}))
    assert state.phase == "stopped" and state.saved_step == state.step and backend.while_away == []
    assert any(
        "enough: storage does not answer" in line.decision.reason
        for line in journal.lines
        if line.decision
    )
    assert replay(journal.lines).identical


def test_weather_that_changes_with_every_look_is_told_once_in_a_while() -> None:
    journal = MemoryJournal()
    backend = Away("ny" * 400, journal=journal)

    def on() -> None:
        backend.step = 0
        backend.out += [StopAsked("enough")] if backend.time_s > 60 else []

    backend.at_step = {1: on}
    drive(backend, journal, start(job=JOB | {"steps": 50}))
    seen = [
        event
        for line in journal.lines
        for _, event in line.events
        if isinstance(event, StorageSeen)
    ]
    assert 4 <= len(seen) <= 14


@pytest.mark.parametrize(
    ("trouble", "kind", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageFull, 1),
        (TimeoutError("no answer"), LostContact, 4),
    ],
)
def test_the_end_of_a_run_waits_for_storage_and_not_for_ever(
    trouble: OSError, kind: type, code: int
) -> None:
    backend = Away("n" * 100_000)
    backend.trouble = trouble
    with pytest.raises(
        kind,
        match="ended at step 5 without a recorded reason.*run it again when.*" + trouble.args[-1],
    ) as raised:
        drive(backend, MemoryJournal(), start(job=JOB | {"orphan_lease_s": 60.0}))
    assert raised.value.exit_code == code and backend.closed == 1
    assert backend.time_s > 60.0 and backend.while_away == []


def test_asked_twice_while_storage_is_away_it_ends_and_carries_out_nothing() -> None:
    backend = Away("n" * 100_000)
    backend.at_step = {3: lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]}
    with pytest.raises(LostContact, match="ended at step"):
        drive(backend, MemoryJournal(), start())
    assert backend.while_away == [] and backend.time_s < 10.0


def test_what_fails_at_the_end_does_not_hide_what_ended_the_run() -> None:
    class Worse(Tiny):
        def poll(self, until_s: float | None) -> list[Event]:
            raise OSError("the cluster is gone")

        def close(self) -> None:
            raise RuntimeError("also at the end")

    with pytest.raises(OSError, match="cluster is gone"):
        drive(Worse(), MemoryJournal(), start())


def test_garbage_is_looked_for_seldom_while_a_run_lasts_and_as_before_afterwards() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_threshold() == (COLLECT_EVERY, *before[1:])
        assert gc.get_freeze_count() > frozen, "what is there already is not looked at"
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("trouble", "kind", "most_s"),
    [
        (OSError(errno.EROFS, "Read-only file system"), SpecError, 5.0),
        (StorageRefused("s3://b/x: PutObject was refused (AccessDenied)"), SpecError, 5.0),
        (TimeoutError("503 SlowDown"), LostContact, 65.0),
    ],
)
@pytest.mark.parametrize("whose", ["lease", "journal"])
def test_a_run_that_cannot_begin_says_so_and_does_not_wait_for_ever(
    trouble: Exception, kind: type, most_s: float, whose: str
) -> None:
    journal = MemoryJournal()
    backend = Away("")
    backend.certain, backend.trouble = whose == "journal", trouble if whose == "lease" else None
    if whose == "journal":
        journal.trouble, journal.settled = trouble, False
    backend.poll = lambda until_s: Tiny.poll(backend, until_s)  # type: ignore[method-assign]
    with pytest.raises(kind, match=str(trouble.args[-1]).partition("(")[0]):
        drive(backend, journal, start(job=JOB | {"orphan_lease_s": 60.0}))
    assert backend.closed == 1 and backend.time_s < most_s
    assert not [action for action in backend.actions if isinstance(action, EnterPlan)]
