"""The reconcile loop: poll, fold each event, decide, write one journal line, carry the actions out,
until the run ends or a signal (Ctrl-C) stops it.

The same loop runs on Ray, in the simulator and in tests. It imports neither torch nor ray and knows
no policy: `decide` is an argument.
"""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.errors import REFUSALS, ElasticError, InternalError, Interrupted, SpecError, unwritten
from elastic.ledger.journal import Line
from elastic.policy.decide import decide as decide_by_default
from elastic.policy.state.fold import ENDED, Change, State, changes, fold, folded
from elastic.types import (
    Action,
    Decided,
    Decision,
    DriverStarted,
    Event,
    Stop,
    StopAsked,
    StorageSeen,
)
from elastic.types.events import SIGNAL
from elastic.types.typed_job import LINE_EVERY_S as LINE_EVERY_S

log = logging.getLogger(__name__)

LOOK_S = 1.0  # on a real clock, how long a signal may wait until the loop sees it
LEAST_WAIT_S = 0.001  # between two looks without news
AWAY_EVERY_S = 10.0
COLLECT_EVERY = 20_000  # new objects; a look at thousands of workers makes tens of thousands
TEXT_MOST = 300  # characters of what storage said


class Backend(Protocol):
    """Where a run happens: carries out actions and reports facts.

    `virtual` (optional, default False): no real clock. `certain` (optional, default True): no other
    driver can have the run; while it is False the run is not ended, and whatever else a replaced
    driver may order, nobody obeys. `trouble` (optional): why it is not; `unheard_s` (optional): for
    how long storage has taken no word of this driver.
    """

    def now_s(self) -> float:
        """Seconds that never go back."""

    def poll(self, until_s: float | None) -> list[Event]:
        """Events since the last call; waits for the first one, at most until `until_s`."""

    def execute(self, action: Action) -> None:
        """Returns at once; the outcome arrives as an event."""

    def close(self) -> None:
        """Take everything down that still stands."""


class Recorder(Protocol):
    """What the loop needs of a journal: `ledger.journal.Journal`, or `Memory`. What is appended is
    kept, whatever happens, and `append` waits a few seconds at most until it is where it must
    be."""

    @property
    def due_at_s(self) -> float | None:
        """When `flush` is due."""

    @property
    def settled(self) -> bool:
        """What was appended is where the next driver finds it."""

    @property
    def trouble(self) -> Exception | None:
        """Why it is not."""

    def append(
        self, at_s: float, events: Sequence[tuple[float, Event]], decision: Decision | None = None
    ) -> None:
        """One tick."""

    def close_part(self, state: State) -> None:
        """Another file may begin: this state is what its first line follows."""

    def flush(self) -> None:
        """Write what was held back."""

    def close(self) -> None:
        """No more lines."""


Decide = Callable[[State, float], Decision]


def drive(
    backend: Backend,
    journal: Recorder,
    start: DriverStarted,
    *,
    state: State | None = None,
    decide: Decide = decide_by_default,
    found: Sequence[Event] = (),
) -> State:
    """Run until the state's phase is succeeded, failed or stopped; returns the last state.

    `state`: what an earlier driver of the run knew (`restored`); `found`: what else is known at its
    start. The backend and the journal are closed at the end, whatever happens. A first Ctrl-C,
    SIGTERM or SIGHUP (a closed terminal) asks the run to stop and save, a second one ends it at
    once. On a virtual clock signals are left to the caller: nothing is there to save, and a run
    that they stopped would be counted as one that the market ended.
    """
    now_s = backend.now_s()
    state = state or State()
    for event in (start, *found):
        state = fold(state, event, now_s)
    signals: AbstractContextManager[list[str]] = (
        nullcontext([]) if _is_virtual(backend) else stop_signals()
    )
    try:
        with signals as asked:
            state = _loop(
                backend,
                journal,
                state,
                now_s=now_s,
                first=(start, *found),
                decide=decide,
                asked=asked,
            )
    except BaseException:
        for close in (backend.close, journal.close):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - what ended the run is what is reported
                log.warning("at the end: %s", error)
        raise
    try:
        backend.close()
    finally:
        journal.close()
    return state


def restored(lines: Iterable[Line], seen: Callable[[Change], None] | None = None) -> State | None:
    """The state that a journal ends with, from the newest one that stands in it on; None when it is
    empty. `seen`: who reads along."""
    state: State | None = None
    for change in changes(lines):
        state = change.after
        if seen is not None:
            seen(change)
    return state


def _loop(
    backend: Backend,
    journal: Recorder,
    state: State,
    *,
    now_s: float,
    first: Sequence[Event],
    decide: Decide,
    asked: list[str],
) -> State:
    """`first`: the events that `state` knows already, of the moment `now_s`."""
    events: list[tuple[float, Event]] = [(now_s, event) for event in first]
    said, line_s = "", now_s
    n_asked = 0
    real = not _is_virtual(backend)
    wait = _Wait(backend, journal, state.job.orphan_lease_s)
    storage = _Storage(backend, journal)
    while True:
        wake_at_s = None
        if not wait.actions:
            decision = decided(state, now_s, decide)
            due = real and now_s - line_s >= LINE_EVERY_S and state.usd_per_h > 0
            if events or decision.actions or decision.reason != said or due:
                state = fold(state, Decided(decision), now_s)  # as whoever reads this line does
                journal.append(now_s, events, decision)
                journal.close_part(state)
                said, line_s = decision.reason, now_s
            wait.actions, wake_at_s = decision.actions, _later(decision.wake_at_s, now_s)
        elif events:
            journal.append(now_s, events)
            line_s = now_s
        if wait.carry_out(state, now_s, n_asked):
            wake_at_s = now_s  # after an order: look again at once
        if state.phase in ENDED and not wait.actions:
            return state
        found = _poll(backend, journal, wake_at_s, asked=asked)
        if len(asked) > 1:
            found = []
        elif len(asked) > n_asked:
            found.append(StopAsked(asked[0]))
        n_asked = len(asked)
        now_s = backend.now_s()
        if journal.due_at_s is not None and now_s >= journal.due_at_s:
            journal.flush()
        events = [(now_s, event) for event in (*storage.news(now_s), *found)]
        state = folded(state, events)
        if n_asked > 1:
            decide = _at_once


def _is_certain(backend: Backend) -> bool:
    return bool(getattr(backend, "certain", True))


@dataclass
class _Storage:
    """Whether storage takes what this driver writes. `since_s`: since when it does not, None = it
    does."""

    backend: Backend
    journal: Recorder
    since_s: float | None = None
    _back_s: float = float("-inf")

    def news(self, now_s: float) -> list[Event]:
        """It has gone away, or is back; weather that changes every second is reported once in
        AWAY_EVERY_S."""
        certain, trouble = _is_certain(self.backend), self.journal.trouble
        if (
            self.since_s is None
            and (trouble is not None or not certain)
            and now_s >= self._back_s + AWAY_EVERY_S
        ):
            unheard_s = 0.0 if certain else float(getattr(self.backend, "unheard_s", 0.0))
            self.since_s = now_s - unheard_s
            what = trouble or getattr(self.backend, "trouble", None) or TimeoutError("no answer")
            return [
                StorageSeen(
                    False,
                    f"{'lease' if trouble is None else 'journal'}: {what}"[:TEXT_MOST],
                    self.since_s,
                )
            ]
        if self.since_s is not None and certain and trouble is None and self.journal.settled:
            seen, self.since_s, self._back_s = StorageSeen(True, "", self.since_s), None, now_s
            return [seen]
        return []


@dataclass
class _Wait:
    """Only the end of a run, and its begin, wait until its line is where the next driver finds it
    and nobody else can have the run: at most `end_most_s`, and not at all where the budget or the
    deadline says so."""

    backend: Backend
    journal: Recorder
    end_most_s: float
    actions: tuple[Action, ...] = ()
    _since_s: float | None = None

    def carry_out(self, state: State, now_s: float, n_asked: int) -> bool:
        """True = actions were. Raises LostContact, or StorageFailed where a disk is full, when the
        wait was too long; SpecError where storage refuses what is written before anything has
        begun."""
        ends, certain = (
            any(isinstance(action, Stop) for action in self.actions),
            _is_certain(self.backend),
        )
        written = certain and self.journal.settled
        begins = not ends and _has_not_begun(state)
        over = ends or begins or n_asked > 0 or 0 < state.steps <= state.step
        self._since_s = (
            (now_s if self._since_s is None else self._since_s) if over and not written else None
        )
        too_long = n_asked > 1 or (
            self._since_s is not None and now_s - self._since_s > self.end_most_s
        )
        limit = state.stop is not None and state.stop.limit
        done: tuple[Action, ...] = ()
        if not ends or written or limit or (certain and too_long):
            done, self.actions = self.actions, ()
        for action in done:
            self.backend.execute(action)
        trouble = getattr(self.backend, "trouble", None) or self.journal.trouble
        if begins and not written and trouble is not None and _is_refusal(trouble):
            raise SpecError(f"run '{state.run}' has not begun, its storage refuses it: {trouble}")
        if too_long and (begins or (not certain and not done)):
            trouble = trouble or TimeoutError("no answer")
            text = (
                f"run '{state.run}': ended at step {state.step} without a recorded reason, last "
                f"checkpoint at step {state.saved_step}"
            )
            raise unwritten(trouble, f"{text}; run it again when its storage takes writes")
        return bool(done)


def _has_not_begun(state: State) -> bool:
    """No plan was ever entered that this driver knows of, and nobody holds any state."""
    waits = state.phase == "waiting" and state.last_step is None
    return waits and not state.holdings and state.away is not None


def _is_refusal(trouble: Exception) -> bool:
    """It lasts until a person changes something."""
    return isinstance(trouble, SpecError) or getattr(trouble, "errno", None) in REFUSALS


def _later(wake_at_s: float | None, now_s: float) -> float | None:
    """Nothing is looked at twice in the same moment."""
    return None if wake_at_s is None else max(wake_at_s, now_s + LEAST_WAIT_S)


def decided(state: State, now_s: float, decide: Decide) -> Decision:
    """What to do; a fault of the policy ends the run, on record, instead of leaving it running."""
    try:
        return decide(state, now_s)
    except ElasticError as error:
        return Decision(
            (Stop("failed", f"{type(error).__name__}: {error}"),),
            f"{type(error).__name__}: {error}",
        )
    except Exception as error:  # noqa: BLE001 - the boundary of the driver: the run's end must reach the journal
        text = (
            f"{InternalError.__name__}: the policy raised {type(error).__name__}: {error}; the "
            "journal is the bug report"
        )
        return Decision((Stop("failed", text),), text)


def _at_once(state: State, now_s: float) -> Decision:
    text = (
        f"asked twice to stop: ended at once at step {state.step}; last checkpoint at step "
        f"{state.saved_step}"
    )
    return Decision((Stop("stopped", text),), text)


def _is_virtual(backend: Backend) -> bool:
    return bool(getattr(backend, "virtual", False))


def _poll(
    backend: Backend, journal: Recorder, wake_at_s: float | None, *, asked: list[str]
) -> list[Event]:
    times = [t for t in (wake_at_s, journal.due_at_s) if t is not None]
    if not _is_virtual(backend):
        times.append(backend.now_s() + LOOK_S)
    try:
        return list(backend.poll(min(times, default=None)))
    except KeyboardInterrupt:
        if _is_virtual(backend):
            raise
        asked.append(f"{SIGNAL}{signal.SIGINT.name}")
        return []


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Garbage is looked for less often than Python does by itself, and never in what is there
    already: with Ray and torch that takes 0.2 s of a decision now and then."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Names of the signals that ask for a stop, as they come."""
    asked: list[str] = []

    def note(number: int, frame: Any) -> None:
        text = f"{SIGNAL}{signal.Signals(number).name}"
        # a closed terminal's shell sends it again: no second wish
        if number != signal.SIGHUP or text not in asked:
            asked.append(text)

    with _handled(note, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield asked


def stopped_by(state: State) -> int:
    """The number of the signal that this process was sent and that has stopped the run; 0 =
    something else has."""
    if state.phase != "stopped" or state.stop is None:
        return 0
    name = state.stop.reason.removeprefix(SIGNAL)
    return next((one.value for one in signal.Signals if one.name == name), 0)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Interrupted, as Ctrl-C raises KeyboardInterrupt: what was started is
    taken down. Once: that takes a moment, in which the next one is passed over."""

    def end(number: int, frame: Any) -> None:
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_IGN)
        raise Interrupted(number)

    with _handled(end, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def _handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Only the main thread may set handlers. SIGHUP not where it is ignored, as under nohup."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
