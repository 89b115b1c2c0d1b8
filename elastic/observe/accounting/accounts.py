"""Where the time and the money went: journal lines in, an Account out. Pure. What is paid for, and
at which price, is the State's, as the budget has it.

Every paid GPU-second falls in exactly one category, so the categories sum to the bill. `seconds`
divides the wall clock: a moment at which three of four GPUs train and one is idle counts as 3/4
productive and 1/4 idle_remainder; a moment without any node is waiting_for_capacity.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.ledger.journal import Doubles, Line
from elastic.observe.accounting.loss_checks import LossChecks
from elastic.observe.accounting.transitions import Transition, TransitionTimes, undone
from elastic.policy.state.fold import EMPTY, Change, State, changes, ran_until_s
from elastic.types import (
    Abort,
    CopyStored,
    Decided,
    DigestChecked,
    DrillAsked,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    GroupRan,
    Node,
    NodeLost,
    NodePrepared,
    Plan,
    PlanEntered,
    PlansFound,
    Quiesced,
    StepDone,
    Stop,
    StorageSeen,
    WorkerFailed,
)

CATEGORIES = (
    "productive", "program_startup", "data_loading", "evaluation", "copy", "checkpoint_save",
    "checkpoint_restore", "reshard", "wasted_progress", "waiting_for_capacity", "idle_remainder",
    "between_steps", "head_node", "not_running", "other",
)  # fmt: skip


OF_STEPS = ("productive", "data_loading", "copy")  # what a step's own time is booked as
STEP_NUMBERS = 7 + len(OF_STEPS)


@dataclass(frozen=True)
class Totals:
    """Of the whole run; `steps` and `tokens` count what was kept."""

    wall_s: float = 0.0
    gpu_seconds: float = 0.0
    usd: float = 0.0
    goodput: float = 0.0  # productive GPU-seconds / paid GPU-seconds
    steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0  # of the time in which a driver ran it
    final_loss: float | None = None
    launch_to_first_step_s: float | None = None
    storage_away_s: float = 0.0  # in which storage took no word of the driver


@dataclass(frozen=True)
class Account:
    """Per category: wall seconds, GPU-seconds, dollars."""

    seconds: dict[str, float]
    gpu_seconds: dict[str, float]
    usd: dict[str, float]
    transitions: tuple[Transition, ...]
    totals: Totals


def account(lines: Iterable[Line]) -> Account:
    """The account of a journal, up to its last line."""
    books = Books()
    for change in changes(lines):
        books.take(change)
    return books.closed()


@dataclass(slots=True)
class _Amount:
    """Wall seconds, GPU-seconds, dollars; and `wall_s`, the undivided time that they were gathered
    in."""

    seconds: float = 0.0
    gpu_s: float = 0.0
    usd: float = 0.0
    wall_s: float = 0.0

    def add(self, other: _Amount, share: float = 1.0) -> None:
        self.seconds += other.seconds * share
        self.gpu_s += other.gpu_s * share
        self.usd += other.usd * share
        self.wall_s += other.wall_s * share

    def taken(self) -> _Amount:
        """All of it; nothing is left."""
        out = _Amount(self.seconds, self.gpu_s, self.usd, self.wall_s)
        self.seconds = self.gpu_s = self.usd = self.wall_s = 0.0
        return out


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that may still be rolled back: what was gathered while it ran, and which shares of
    that are booked as OF_STEPS."""

    step: int
    tokens: int
    train_loss: float
    gathered: _Amount
    shares: tuple[float, ...]


@dataclass
class _Steps:
    """The oldest first, as plain numbers: a run of months has millions."""

    rows: Doubles = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.rows) // STEP_NUMBERS

    def append(self, one: _Step) -> None:
        paid = one.gathered
        self.rows.extend(
            (one.step, one.tokens, one.train_loss, paid.seconds, paid.gpu_s, paid.usd, paid.wall_s,
            *one.shares)
        )  # fmt: skip

    @property
    def newest(self) -> _Step | None:
        if not self.rows:
            return None
        step, tokens, train_loss, seconds, gpu_s, usd, wall_s, *shares = self.rows[-STEP_NUMBERS:]
        paid = _Amount(seconds, gpu_s, usd, wall_s)
        return _Step(int(step), int(tokens), train_loss, paid, tuple(shares))

    def drop_newest(self) -> None:
        del self.rows[-STEP_NUMBERS:]

    def drop_oldest(self, n: int) -> None:
        del self.rows[: n * STEP_NUMBERS]


@dataclass(slots=True)
class _Paid:
    """Machines whose time has one place: their GPUs, the share of all, and what they cost."""

    place: _Amount
    gpus: int = 0
    share: float = 0.0
    usd_per_s: float = 0.0


@dataclass
class Books:
    """Takes the journal in order. `group` and `wait` hold time that has passed but is not yet
    classified. Waiting while storage is away was waiting for it, where the next plan begins from
    there. `keeps`: so many of the newest steps may still be undone, at least; 0 = all of them.
    Books of a run that goes on for months are bounded by it."""

    keeps: int = 0
    state: State = EMPTY
    at_s: float | None = None
    prepared: set[str] = field(default_factory=set)  # once; their processes may be gone since
    aborted: bool = False  # and no other plan was entered since
    ended: bool = False
    stopped_at_s: float = 0.0
    sums: dict[str, _Amount] = field(
        default_factory=lambda: {name: _Amount() for name in CATEGORIES}
    )
    group: _Amount = field(default_factory=_Amount)
    wait: _Amount = field(default_factory=_Amount)
    wait_away: _Amount = field(default_factory=_Amount)  # the same, while storage was
    away_since_s: float | None = None
    away_s: float = 0.0
    steps: _Steps = field(default_factory=_Steps)
    tokens: int = 0
    carry_s: float = 0.0
    stall_s: float = 0.0
    # what the newest step has left between steps, and its generation and moment
    left: _Amount = field(default_factory=_Amount)
    left_of: tuple[int, float] | None = None
    # category of a slow first step: of the step to come, of the last one
    first_of: tuple[str, str] = ("", "")
    timing: TransitionTimes = field(default_factory=TransitionTimes)
    checks: LossChecks = field(default_factory=LossChecks)
    # what _paid has found, and from what
    _places: tuple[Any, list[_Paid]] | None = None

    # ----------------------------------------------------------------------------------------- time

    def advance(self, at_s: float) -> None:
        """Book the time up to `at_s` on every machine that is paid for; of the head, without
        GPU-seconds, dollars alone."""
        passed_s = 0.0 if self.at_s is None or self.ended else max(0.0, at_s - self.at_s)
        self.at_s = at_s if self.at_s is None else max(self.at_s, at_s)
        if not passed_s:
            return
        state = self.state
        self.sums["head_node"].usd += passed_s * state.head_usd_per_h / 3600
        paid = self._paid()
        if not paid:
            self.sums["waiting_for_capacity"].add(_Amount(passed_s, wall_s=passed_s))
        for one in paid:
            place = one.place
            place.seconds += passed_s * one.share
            place.gpu_s += passed_s * one.gpus
            place.usd += passed_s * one.usd_per_s
            place.wall_s += passed_s

    def _paid(self) -> list[_Paid]:
        """Most lines change none of that: with hundreds of nodes it is not looked for again."""
        state, known = self.state, self._places
        seen = (state.nodes, state.instances, state.plan, state.target, self.away_since_s is None,
                state.pools)  # fmt: skip
        if known is None or any(a is not b for a, b in zip(known[0], seen, strict=True)):
            prices = {pool.name: pool.usd_per_node_h for pool in state.pools}
            found: dict[int, _Paid] = {}
            machines = [(node.pool, node.gpus, self._place(node)) for node in state.alive]
            for pool, gpus, place in [*machines, *self._no_nodes()]:
                one = found.setdefault(id(place), _Paid(place))
                one.gpus += gpus
                one.usd_per_s += prices.get(pool, 0.0) / 3600
            n_gpus = max(1, sum(one.gpus for one in found.values()))
            for one in found.values():
                one.share = one.gpus / n_gpus
            known = self._places = (seen, list(found.values()))
        return known[1]

    def _no_nodes(self) -> list[tuple[str, int, _Amount]]:
        """Pool, GPUs and place of each machine that is not a node yet, or any more."""
        found = []
        for name, seen in self.state.instances.items():
            pool = self.state.pool(name)
            gpus = pool.gpus_per_node if pool is not None else 1
            found += [(name, gpus, self.sums["program_startup"])] * seen.starting
            found += [(name, gpus, self.sums["other"])] * seen.leaving
        return found

    def _place(self, node: Node) -> _Amount:
        plan, target = self.state.plan, self.state.target
        if node.node_id not in self.prepared:
            return self.sums["program_startup"]
        if plan is not None and node.node_id in plan.workers_per_node:
            return self.group
        if target is not None:
            return self.sums[
                _entering(target) if node.node_id in target.nodes_taking_part else "idle_remainder"
            ]
        if plan is not None:
            return self.sums["idle_remainder"]
        return self.wait if self.away_since_s is None else self.wait_away

    # --------------------------------------------------------------------------------------- events

    def take(self, change: Change) -> None:
        self.checks.take(change)
        event, at_s = change.event, change.at_s
        if isinstance(event, DriverStarted):
            self._started(event, at_s)
        elif event is not None:
            if self.ended and not _after_the_end(event):
                # what is seen or ordered still: the Stop waited for storage till now
                self.at_s, self.ended = self.stopped_at_s, False
                self.advance(at_s)
                self.stopped_at_s, self.ended = at_s, True
            self.advance(at_s)
            if isinstance(event, Decided):
                self._decided(event, at_s)
            elif not isinstance(event, StepDone):
                self._seen(event, at_s)
            elif change.after.last_step is event:
                # else it is one of another generation, or was done before
                self._entered(PlanEntered(event.generation, event.step - 1), at_s)
                self._step(event, at_s)
        self.state = change.after

    def _seen(self, event: Event, at_s: float) -> None:
        if isinstance(event, NodePrepared):
            self.prepared.add(event.node_id)
            self._places = None
        elif isinstance(event, NodeLost):
            self._settle_wait()
            self.prepared.discard(event.node_id)
            self._places = None
        elif isinstance(event, Quiesced | WorkerFailed):
            self._settle_wait()
        elif isinstance(event, GroupRan | Evaluated):
            plan = self.state.plan
            if plan is not None and event.generation == plan.generation:
                self._worked(event)
        elif isinstance(event, PlansFound):
            for plan in event.plans:
                self._ordered(plan, at_s)
        elif isinstance(event, StorageSeen):
            self._storage(event, at_s)
        elif isinstance(event, PlanEntered):
            self._entered(event, at_s)
        elif isinstance(event, CopyStored) and event.copy.kind == "durable":
            self.stall_s += event.stall_s
        elif isinstance(event, DigestChecked):
            self.timing.digest(event)
        elif isinstance(event, DrillAsked) and ("kill" in event.drill or "hang" in event.drill):
            self.timing.drill_at_s = at_s

    def _worked(self, event: GroupRan | Evaluated) -> None:
        if isinstance(event, GroupRan):
            self.sums["productive"].add(self.group.taken())
        elif self.group.wall_s > 0:
            # it was told when it was over: its seconds are the last ones that were gathered
            share = min(1.0, event.seconds / self.group.wall_s)
            self.sums["evaluation"].add(self.group, share)
            self.group.add(replace(self.group), -share)

    def _started(self, event: DriverStarted, at_s: float) -> None:
        """A driver that does not attach found nothing alive: its predecessor's nodes ended with it,
        at its last line unless the event says until when they were paid for. Time continues by this
        driver's clock."""
        self.advance(ran_until_s(event, at_s, at_s if self.at_s is None else self.at_s))
        if not event.attached:
            self.sums["wasted_progress"].add(self.group.taken())
            self._waited("waiting_for_capacity")
            self.prepared, self._places = set(), None
        if self.away_since_s is not None and self.at_s is not None:
            self._storage(StorageSeen(True, "", self.away_since_s), self.at_s)
        if self.at_s is not None:
            gap_s = max(0.0, at_s - self.at_s)
            self.sums["not_running"].add(_Amount(gap_s, wall_s=gap_s))
        self.at_s = at_s
        self.ended = self.aborted = False

    def _storage(self, event: StorageSeen, at_s: float) -> None:
        if self.away_since_s is not None:
            self.away_s += max(0.0, at_s - self.away_since_s)
        self.away_since_s = None if event.answers else min(at_s, event.since_s)

    def _settle_wait(self) -> None:
        """While a generation is aborted, waiting for its workers is a part of the transition."""
        if self.aborted:
            self._waited("reshard")
            self.timing.settled_at_s = self.at_s

    def _step(self, event: StepDone, at_s: float) -> None:
        gathered, moment = self.group.taken(), (event.generation, at_s)
        if not gathered.wall_s and self.left_of == moment:
            gathered = self._taken_of_left(event.step_time_s + self.carry_s + self.stall_s)
        elif gathered.wall_s > 0:
            self.left, self.left_of = _Amount(), moment
        shares: tuple[float, ...] = (0.0, 0.0, 0.0)
        if gathered.wall_s > 0:
            owed_s = event.step_time_s + self.carry_s
            step_s = min(gathered.wall_s, owed_s)
            # reports reach the journal early or late
            self.carry_s = min(owed_s - step_s, event.step_time_s)
            data_s = min(event.data_s, step_s)
            copy_s = min(event.copy_s, step_s - data_s)
            save_s = min(self.stall_s, gathered.wall_s - step_s)
            self.stall_s = 0.0
            own_s = step_s - data_s - copy_s
            shares = tuple(part_s / gathered.wall_s for part_s in (own_s, data_s, copy_s))
            self.sums["checkpoint_save"].add(gathered, save_s / gathered.wall_s)
            rest_s = max(0.0, gathered.wall_s - step_s - save_s)
            self.sums["between_steps"].add(gathered, rest_s / gathered.wall_s)
            self.left.add(gathered, rest_s / gathered.wall_s)
        self._take_off_first(gathered.wall_s * shares[0])
        one = _Step(event.step, event.tokens, event.train_loss, gathered, shares)
        self._book(one)
        self.steps.append(one)
        if self.keeps and len(self.steps) > 2 * self.keeps:  # no recovery goes back so far
            self.steps.drop_oldest(len(self.steps) - self.keeps)
        self.timing.step(event, at_s, self.state.first_started_at_s)

    def _taken_of_left(self, seconds: float) -> _Amount:
        """Steps that are told at one moment, as those of a group that trained while no driver was
        there, have passed one after the other: each has its time of what was gathered until
        then."""
        found, wall_s = _Amount(), self.left.wall_s
        if wall_s > 0:
            share = min(1.0, seconds / wall_s)
            found.add(self.left, share)
            self.left.add(found, -1.0)
            self.sums["between_steps"].add(found, -1.0)
        return found

    def _book(self, one: _Step, sign: int = 1) -> None:
        """-1: it is undone."""
        self.tokens += sign * one.tokens
        for name, share in zip(OF_STEPS, one.shares, strict=True):
            self.sums[name].add(one.gathered, sign * share)

    def _take_off_first(self, second_s: float) -> None:
        """The first step of a generation also builds and compiles: what it took above the second is
        not progress."""
        to_come, of_last = self.first_of
        first = self.steps.newest if of_last and not to_come else None
        if first is not None:
            own, *others = first.shares
            most = second_s / first.gathered.wall_s if first.gathered.wall_s > 0 else own
            if own > most:
                self.sums[of_last].add(first.gathered, own - most)
                self.sums["productive"].add(first.gathered, most - own)
                self.steps.drop_newest()
                self.steps.append(replace(first, shares=(most, *others)))
        self.first_of = ("", to_come)

    def _entered(self, event: PlanEntered, at_s: float) -> None:
        """Also by its first step, where a driver died before it wrote that down."""
        target = self.state.target
        if target is None or event.generation != target.generation:
            return
        self.sums["reshard"].add(self.group.taken())
        while (last := self.steps.newest) is not None and last.step > event.step:
            self._book(last, -1)
            self.sums["wasted_progress"].add(last.gathered, sum(last.shares))
            self.steps.drop_newest()
        self.aborted, self.carry_s = False, 0.0
        self.first_of = (_entering(target), "")
        self.timing.entered(target, event, self.state.step, at_s=at_s)

    # ------------------------------------------------------------------------------------ decisions

    def _decided(self, event: Decided, at_s: float) -> None:
        for action in event.decision.actions:
            if isinstance(action, EnterPlan):
                self._ordered(action.plan, at_s)
            elif isinstance(action, Abort):
                self._aborted(at_s)
            elif isinstance(action, Stop):
                self._close_group()
                self.stopped_at_s, self.ended = at_s, True

    def _ordered(self, plan: Plan, at_s: float) -> None:
        if self.state.plan is not None and plan.resume.source != "live":
            self._close_group()
        self.sums["waiting_for_capacity"].add(self.wait.taken())
        restored = plan.resume.source == "durable"
        self.sums["checkpoint_restore" if restored else "waiting_for_capacity"].add(
            self.wait_away.taken()
        )
        self.timing.ordered_at_s = at_s

    def _aborted(self, at_s: float) -> None:
        self._settle_wait()
        gathered = self.group.taken()
        if gathered.wall_s:
            begun = min(1.0, self.timing.ordinary_s / gathered.wall_s)  # the step that was aborted
            self.sums["wasted_progress"].add(gathered, begun)
            self.sums["reshard"].add(gathered, 1 - begun)
        if not self.aborted:
            self.timing.aborted_at_s = at_s
        self.aborted = True

    def _close_group(self) -> None:
        newest = self.steps.newest
        last = newest is not None and newest.step >= self.state.steps > 0
        saving = last or self.state.quiescing is not None
        self.sums["checkpoint_save" if saving else "other"].add(self.group.taken())
        self._waited("waiting_for_capacity")

    def _waited(self, category: str) -> None:
        """What was waited for, whether storage was away or not."""
        for wait in (self.wait, self.wait_away):
            self.sums[category].add(wait.taken())

    def so_far(self) -> Account:
        """The account as it stands, of books that go on."""
        timing = replace(
            self.timing, recent_s=[*self.timing.recent_s], transitions=[*self.timing.transitions]
        )
        mine = (self.group, self.wait, self.wait_away)
        group, wait, away = (replace(amount) for amount in mine)
        sums = {name: replace(amount) for name, amount in self.sums.items()}
        return replace(
            self, sums=sums, group=group, wait=wait, wait_away=away, timing=timing
        ).closed()

    def closed(self) -> Account:
        """The account as it stands; a run that continues has its open time in `other`."""
        self._close_group()
        self.timing.close(None)
        sums, newest = self.sums, self.steps.newest
        gpu_s = sum(amount.gpu_s for amount in sums.values())
        wall_s = sum(amount.seconds for amount in sums.values())
        running_s = wall_s - sums["not_running"].seconds
        totals = Totals(
            wall_s=wall_s,
            gpu_seconds=gpu_s,
            usd=sum(amount.usd for amount in sums.values()),
            goodput=sums["productive"].gpu_s / gpu_s if gpu_s else 0.0,
            steps=newest.step if newest else 0,
            tokens=self.tokens,
            tokens_per_s=self.tokens / running_s if running_s else 0.0,
            final_loss=newest.train_loss if newest else None,
            launch_to_first_step_s=self.timing.launch_to_first_step_s,
            storage_away_s=self.away_s
            + (
                0.0
                if self.away_since_s is None
                else max(0.0, (self.at_s or 0.0) - self.away_since_s)
            ),
        )
        return Account(
            {name: max(0.0, amount.seconds) for name, amount in sums.items()},
            {name: max(0.0, amount.gpu_s) for name, amount in sums.items()},
            {name: max(0.0, amount.usd) for name, amount in sums.items()},
            self._transitions(),
            totals,
        )

    def _transitions(self) -> tuple[Transition, ...]:
        """With those that were rolled back before they were entered."""
        equal, probe_s = self.checks.equal, self.checks.probe_s
        found = [*self.timing.transitions, *(undone(one) for one in self.checks.undone.values())]
        found = [
            replace(t, loss_equal=equal.get(t.generation), probe_s=probe_s.get(t.generation, 0.0))
            for t in found
        ]
        return tuple(sorted(found, key=lambda t: t.generation))


def _after_the_end(event: Event) -> bool:
    """It may come when the Stop was carried out: nothing was paid till then."""
    if isinstance(event, Decided):
        return not event.decision.actions
    return isinstance(event, NodeLost) and event.cause == "released"


def _entering(plan: Plan) -> str:
    """The category of the time in which a plan is entered."""
    if plan.resume.source == "durable":
        return "checkpoint_restore"
    return "program_startup" if plan.cause == "start" else "reshard"
