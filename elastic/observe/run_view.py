"""journal lines -> View: what a person wants to know of a run, its State and what that does not
keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from elastic.ledger.journal import Line
from elastic.observe import event_messages
from elastic.observe.accounting.launch_times import Launches
from elastic.observe.metrics.node_loads import NodeLoads
from elastic.observe.node_speeds import NodeSpeeds
from elastic.policy.state.fold import EMPTY, ENDED, Change, State, changes
from elastic.types import (
    CopyFailed,
    CopyStored,
    Decided,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    Job,
    Node,
    NodeLost,
    NodeReady,
    NodesMute,
    NoiseSeen,
    Plan,
    PlanEntered,
    Pool,
    Resume,
    StepDone,
)

RECENT = 20  # steps that rates are measured over
PACE_POINTS = 128  # of the running generation, evenly apart, that the ETA looks at
MOST_GONE = 24  # nodes that are listed although they are gone
SKIPPED = "CopySkipped"  # kind of the note about a checkpoint that was skipped: none has failed


class Point(NamedTuple):
    """One optimizer step on the curve."""

    step: int
    train_loss: float
    at_s: float
    generation: int
    tokens: int
    step_time_s: float
    digest: str = ""  # of the sample ids
    imbalance: float = 0.0
    pad_share: float = 0.0
    grad_norm: float = 0.0
    logged: Mapping[str, float] = {}  # by the user's code
    expert_load: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling: `kind` is the event's class name, 'Decision' or SKIPPED."""

    at_s: float
    step: int
    kind: str
    text: str
    about: Event | None = None


@dataclass
class View:
    """Built by `add`, one journal line at a time, or by `take`, where others read along."""

    state: State = EMPTY
    # step -> of the gradient, see NoiseSeen
    noise: dict[int, tuple[float, float]] = field(default_factory=dict)
    # in order of their first arrival, with those that are gone for long
    nodes: dict[str, Node] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)  # of those that are gone: released
    # of those that `nodes` has no more, how many by pool and status
    forgotten: dict[tuple[str, str], int] = field(default_factory=dict)
    planned: dict[int, Plan] = field(default_factory=dict)  # of all drivers
    plan: Plan | None = None  # that the driver has entered last
    step: int = 0  # that was told of last, also where no line tells of its plan
    reached: int = 0  # the furthest step ever, also where it was undone
    points: list[Point] = field(default_factory=list)
    # steps of the running generation, and when they were; each `pace_every`-th
    pace: list[tuple[int, float]] = field(default_factory=list)
    pace_every: int = 1
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    saved: CopyStored | None = None  # the newest checkpoint
    entered: list[tuple[float, PlanEntered]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    orders: dict[int, str] = field(default_factory=dict)  # generation -> why it was ordered
    # generation -> steps done before that do not count any more
    lost: dict[int, int] = field(default_factory=dict)
    reason: str = ""
    cut_off: NodesMute | None = None  # the driver's host is, from all others
    node_speeds: NodeSpeeds = field(default_factory=NodeSpeeds)
    loads: NodeLoads = field(default_factory=NodeLoads)
    launches: Launches = field(default_factory=Launches)
    at_s: float = 0.0

    @property
    def job(self) -> Job:
        return self.state.job

    @property
    def steps(self) -> int:
        """Steps that the job asks for."""
        return self.job.steps

    @property
    def phase(self) -> str:
        return "stopping" if self.state.stop and not self.ended else self.state.phase

    @property
    def pools(self) -> Mapping[str, Pool]:
        return self.state.pool_by_name

    @property
    def started_at_s(self) -> float:
        """When the run was, whatever drivers it has had since."""
        return self.state.first_started_at_s or 0.0

    @property
    def wanted(self) -> dict[str, int]:
        """Nodes that are requested, per pool."""
        found: dict[str, int] = {}
        for asked in self.state.requests.values():
            found[asked.pool] = found.get(asked.pool, 0) + asked.count
        return found

    @property
    def progress(self) -> str:
        """`40 of 300`; of a script that is restarted, whose end nobody knows, `40`."""
        return f"{self.step} of {self.steps}" if self.steps else str(self.step)

    @property
    def job_phase(self) -> dict[str, int] | None:
        """Which of the job's phases it is in, counted from 1, of how many, and its last step; None
        = the job has none."""
        job = self.job
        if not job.phases:
            return None
        now = job.in_phase(job.phase_at(self.step))
        return {"number": now.phase + 1, "of": len(job.phases), "until_step": now.until_step}

    @property
    def place(self) -> str:
        """`40 of 300`, with the phase that this is in, where there is one."""
        if (found := self.job_phase) is None:
            return self.progress
        phase = f"phase {found['number']} of {found['of']}, to step {found['until_step']}"
        return f"{self.progress} ({phase})"

    @property
    def ended(self) -> bool:
        return self.state.phase in ENDED

    @property
    def copies_failed(self) -> int:
        """Checkpoints that were not made, or could not be read."""
        return sum(note.kind in ("CopyFailed", "CopyDamaged") for note in self.notes)

    @property
    def copies_skipped(self) -> int:
        """Checkpoints that fell due while the one before was being written."""
        return sum(note.kind == SKIPPED for note in self.notes)

    @property
    def drill_left(self) -> list[str]:
        """What the job's drill had for steps that no driver of this run has reached."""
        return [
            event_messages.drill(dict(entry))
            for entry in self.job.drill
            if (entry.get("at_step") or 0) > self.reached
        ]

    @property
    def unusable(self) -> dict[str, str]:
        """Axes (and layouts) that may not be used, and why: what is known of the model, and what
        this run has found out."""
        model = self.state.model
        return {**(model.closed if model else {}), **self.state.unusable}

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.saved.copy.step if self.saved else None

    def recent(self) -> list[Point]:
        """The last steps of the running generation."""
        points = self.points[-RECENT:]
        return [p for p in points if p.generation == points[-1].generation]

    def step_time_s(self) -> float | None:
        times = [p.step_time_s for p in self.recent()]
        return median(times[1:] or times) if times else None

    def tokens_per_s(self) -> float | None:
        points = self.recent()
        seconds = sum(p.step_time_s for p in points)
        return sum(p.tokens for p in points) / seconds if seconds > 0 else None

    @property
    def unit(self) -> str:
        """What the losses are summed over. Where each step counts as many as it has samples, it
        counts samples."""
        batch, recent = self.job.global_batch, self.points[-RECENT:]
        counts = batch and recent and all(p.tokens == batch for p in recent)
        return "samples" if counts else "tokens"

    def eta_s(self) -> float | None:
        """With what lies between the steps, evaluations and stalls of checkpoints among it, as over
        the later half of the running generation."""
        each = self.step_time_s()
        if each is None or not self.steps:
            return None
        last, (begin, begin_s) = self.points[-1], self.pace[(len(self.pace) - 1) // 2]
        work = self.state.work_between(begin, last.step)
        return self.state.rest_work * max(each, (last.at_s - begin_s) / work if work > 0 else 0.0)

    @property
    def validation_loss(self) -> float | None:
        """Of the newest validation."""
        newest = max(self.evaluations, default=0)
        return self.evaluations.get(newest, {}).get("validation_loss")

    def validation_losses(self) -> dict[int, float]:
        """By step, in order."""
        key = "validation_loss"
        return {
            step: found[key] for step, found in sorted(self.evaluations.items()) if key in found
        }

    def curve(self) -> list[Point]:
        """The steps that count: of a step that was trained again, the time that the last state
        comes of, which need not be the newest (a checkpoint may be committed after an older one was
        resumed from). A step that was undone is none of them, also where a driver was killed before
        it wrote down that the step was trained again."""
        found: dict[int, Point] = {}
        told: dict[int, list[Point]] = {}  # by generation
        for point in self.points:
            told.setdefault(point.generation, []).append(point)
        # of which no more may have been written down
        began = {generation: points[0].step - 1 for generation, points in told.items()}
        began |= {event.generation: event.step for _, event in self.entered}
        generation, last = max(began, default=0), self.step
        while generation in self.planned:
            resume = self.planned[generation].resume
            left_at = _left_at(resume, told.get(resume.generation, ()))
            first = began.get(generation, left_at)
            found |= {p.step: p for p in told.get(generation, ()) if first < p.step <= last}
            generation, last = resume.generation, min(last, first)
        # where these lines do not tell of its plan
        before = {p.step: p for p in self.points if p.step <= last}
        return sorted((before | found).values(), key=lambda p: p.step)

    def add(self, line: Line) -> list[Note]:
        """Take in one line; returns what it adds to `notes`."""
        if line.epoch < self.state.epoch:
            return []  # the writer had lost its lease
        n_before = len(self.notes)
        for change in changes((line,), self.state):
            self.take(change)
        return self.notes[n_before:]

    def take(self, change: Change) -> None:
        """Take in one entry."""
        event, self.at_s = change.event, change.at_s
        text = event_messages.of(event, self) if event is not None else None
        self.launches.take(change)
        self.node_speeds.take(change, self.plan)
        if event is not None:
            self._keep(event)
        self._follow(change.after)
        if event is None:
            self._begin_at(change.after)
        if text:
            skipped = isinstance(event, CopyFailed) and event.skipped
            self._note(SKIPPED if skipped else type(event).__name__, text, event)
        if isinstance(event, DriverStarted) and not event.attached:
            for text in event_messages.of_model(event.model):
                self._note("ModelNoted", text)
        elif isinstance(event, Decided) and event.decision.actions and event.decision.reason:
            self._note("Decision", event.decision.reason, _without_plans(event))

    def _begin_at(self, now: State) -> None:
        """Of the lines that `now` stands for nothing more is known."""
        if now.last_step is not None and not self.points:
            at_s, self.at_s = self.at_s, now.last_step_at_s
            self._keep(now.last_step)
            self.at_s = at_s
        self.step, self.reached = now.step, max(self.reached, now.step)

    def _note(self, kind: str, text: str, about: Event | None = None) -> None:
        self.notes.append(Note(self.at_s, self.step, kind, text, about))

    def _follow(self, now: State) -> None:
        """What the State will forget."""
        before, self.state = self.state, now
        if now.nodes is not before.nodes:
            self.nodes |= now.nodes
        if now.plans is not before.plans:
            self.planned |= now.plans
        self.plan = now.plan or self.plan

    def listed(self) -> tuple[list[Node], int]:
        """The nodes that are there and, of those that are gone, the newest, in order of their first
        arrival; and how many more are gone."""
        gone = [node.node_id for node in self.nodes.values() if node.status == "lost"]
        old = {*gone[:-MOST_GONE]}
        listed = [node for node in self.nodes.values() if node.node_id not in old]
        return listed, len(old)

    def forget_nodes(self, most: int) -> None:
        """Where more than twice as many are gone, all but the newest; so seldom, since the letters
        of the others change with it."""
        gone = [node for node in self.nodes.values() if node.status == "lost"]
        old = [node for node in gone[:-most] if node.node_id not in self.state.nodes]
        if len(gone) > 2 * most:
            more = Counter((node.pool, self.status(node)) for node in old)
            self.forgotten = more + Counter(self.forgotten)
            names = {node.node_id for node in old}
            self.nodes = {name: node for name, node in self.nodes.items() if name not in names}
            self.released -= names
            self.node_speeds.aside = {
                name: why for name, why in self.node_speeds.aside.items() if name not in names
            }

    def status(self, node: Node) -> str:
        """In a word, for a person."""
        released = node.status == "lost" and node.node_id in self.released
        return "released" if released else node.status

    def _keep(self, event: Event) -> None:
        """What the State has no place for."""
        self.loads.take(event, self.at_s)
        match event:
            case StepDone():
                self.step, self.reached = event.step, max(self.reached, event.step)
                self._pace(event)
                self.points.append(
                    Point(
                        event.step, event.train_loss, self.at_s, event.generation, event.tokens,
                        event.step_time_s, event.digest, event.imbalance, event.pad_share,
                        event.grad_norm, event.logged, event.expert_load,
                    )
                )  # fmt: skip
            case Decided(decision):
                self.reason = decision.reason or self.reason
                for action in decision.actions:
                    if isinstance(action, EnterPlan):
                        self.orders[action.plan.generation] = decision.reason
            case DriverStarted():
                self.cut_off = None
                if not event.attached:
                    self.nodes, self.plan = {}, None
                    self.forgotten = {}
            case NodesMute():
                self.cut_off = None if event.over else event
            case NodeReady(node):
                self.released.discard(node.node_id)
            case NodeLost(node_id, cause="released"):
                self.released.add(node_id)
            case PlanEntered():
                self.lost[event.generation] = max(0, self.step - event.step)
                self.step = event.step
                self.entered.append((self.at_s, event))
            case NoiseSeen():
                self.noise[event.step] = (event.trace, event.square_norm)
            case Evaluated():
                self.evaluations[event.step] = event.metrics
            case CopyStored(copy) if copy.kind == "durable":
                # an older one may be committed after a newer one
                known = self.saved.copy if self.saved else copy
                if (copy.generation, copy.step) >= (known.generation, known.step):
                    self.saved = event
            case _:
                pass

    def _pace(self, event: StepDone) -> None:
        """Before the step is one of the points."""
        if not self.points or self.points[-1].generation != event.generation:
            self.pace, self.pace_every = [], 1
        if not self.pace or event.step - self.pace[-1][0] >= self.pace_every:
            self.pace.append((event.step, self.at_s))
        if len(self.pace) > PACE_POINTS:
            del self.pace[1::2]
            self.pace_every *= 2


def _left_at(resume: Resume, told: Iterable[Point]) -> int:
    """The step that a generation began from, where no line tells: live memory is left later than
    was planned. `told`: of the generation before."""
    if resume.source != "live":
        return resume.step
    return max([resume.step, *(point.step for point in told)])


def _without_plans(event: Decided) -> Decided:
    """A plan names thousands of ranks; those that are asked for later are in `planned`."""
    decision = event.decision
    rest = tuple(action for action in decision.actions if not isinstance(action, EnterPlan))
    return Decided(replace(decision, actions=rest))


def view_of(lines: Iterable[Line]) -> View:
    """The view after all lines."""
    view = View()
    for change in changes(lines):
        view.take(change)
    return view
