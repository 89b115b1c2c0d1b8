"""journal lines -> View: what a person wants to know of a run, and Tail, which follows a journal
that is still written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from elastic.ledger.journal import Line, parse_line
from elastic.ledger.launch_times import Launches
from elastic.observe import event_messages
from elastic.observe.node_speeds import NodeSpeeds
from elastic.types import (
    CopyFailed,
    CopyStored,
    Decision,
    DriverStarted,
    EnterPlan,
    Evaluated,
    Event,
    Job,
    ModelProfile,
    Node,
    NodeLost,
    NodePrepared,
    NodeReady,
    NoiseSeen,
    Notice,
    NoticeWithdrawn,
    Plan,
    PlanEntered,
    PlansFound,
    Pool,
    Quarantine,
    RequestNodes,
    Resume,
    SharesSet,
    StepDone,
    Stop,
    StopAsked,
    StorageSeen,
)

RECENT = 20  # steps that rates are measured over
SKIPPED = "CopySkipped"  # kind of the note about a checkpoint that was skipped: none has failed


@dataclass(frozen=True, slots=True)
class Point:
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


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling: `kind` is the event's class name, 'Decision' or SKIPPED."""

    at_s: float
    step: int
    kind: str
    text: str


@dataclass
class View:
    """Built by `add`, one journal line at a time."""

    run: str = ""
    epoch: int = 0
    job: Job = Job()
    # step -> of the gradient, see NoiseSeen
    noise: dict[int, tuple[float, float]] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    model: ModelProfile | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)  # of those that are gone: released
    planned: dict[int, Plan] = field(default_factory=dict)
    # axes and layouts that the run has closed for itself -> why
    closed: dict[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    phase: str = "waiting"
    step: int = 0
    reached: int = 0  # the furthest step ever, also where it was undone
    points: list[Point] = field(default_factory=list)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    copies: dict[str, CopyStored] = field(default_factory=dict)  # newest of each kind
    entered: list[tuple[float, PlanEntered]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    reason: str = ""
    away: StorageSeen | None = None  # storage is, as the last driver has seen it
    wanted: dict[str, int] = field(default_factory=dict)  # nodes that are requested, per pool
    node_speeds: NodeSpeeds = field(default_factory=NodeSpeeds)
    launches: Launches = field(default_factory=Launches)
    started_at_s: float = 0.0
    at_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps that the job asks for."""
        return self.job.steps

    @property
    def progress(self) -> str:
        """`40 of 300`; of a script that is restarted, whose end nobody knows, `40`."""
        return f"{self.step} of {self.steps}" if self.steps else str(self.step)

    @property
    def ended(self) -> bool:
        return self.phase in ("succeeded", "failed", "stopped")

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
        return {**(self.model.closed if self.model else {}), **self.closed}

    @property
    def saved_step(self) -> int | None:
        """Step of the newest checkpoint."""
        stored = self.copies.get("durable")
        return stored.copy.step if stored else None

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
        batch = self.job.global_batch
        return (
            "samples"
            if batch and self.points and all(p.tokens == batch for p in self.points[-RECENT:])
            else "tokens"
        )

    def eta_s(self) -> float | None:
        each = self.step_time_s()
        return None if each is None or not self.steps else (self.steps - self.step) * each

    def curve(self) -> list[Point]:
        """The steps that count: of a step that was trained again, the time that the last state
        comes of, which need not be the newest (a checkpoint may be committed after an older one was
        resumed from). A step that was undone is none of them, also where a driver was killed before
        it wrote down that the step was trained again."""
        found: dict[int, Point] = {}
        # of which no more may have been written down
        began = {p.generation: p.step - 1 for p in reversed(self.points)}
        began |= {event.generation: event.step for _, event in self.entered}
        generation, last = max(began, default=0), self.step
        while generation in self.planned:
            resume = self.planned[generation].resume
            first = began.get(generation, self._left_at(resume))
            found |= {
                p.step: p
                for p in self.points
                if p.generation == generation and first < p.step <= last
            }
            generation, last = resume.generation, min(last, first)
        # where these lines do not tell of its plan
        before = {p.step: p for p in self.points if p.step <= last}
        return sorted((before | found).values(), key=lambda p: p.step)

    def _left_at(self, resume: Resume) -> int:
        """The step that a generation began from, where no line tells: live memory is left later
        than was planned."""
        told = (
            [p.step for p in self.points if p.generation == resume.generation]
            if resume.source == "live"
            else []
        )
        return max([resume.step, *told])

    def add(self, line: Line) -> list[Note]:
        """Take in one line; returns what it adds to `notes`."""
        if line.epoch < self.epoch:
            return []  # the writer had lost its lease
        n_before = len(self.notes)
        self.launches.add(line)
        for at_s, event in line.events:
            self.at_s = at_s
            text = event_messages.of(event, self)
            self._fold(event)
            if text:
                skipped = isinstance(event, CopyFailed) and event.skipped
                kind = SKIPPED if skipped else type(event).__name__
                self.notes.append(Note(at_s, self.step, kind, text))
            if isinstance(event, DriverStarted) and not event.attached:
                self.notes += [
                    Note(at_s, self.step, "ModelNoted", text)
                    for text in event_messages.of_model(event.model)
                ]
        self.at_s = max(self.at_s, line.at_s)
        if line.decision is not None:
            self._decided(line.decision, line.at_s)
        return self.notes[n_before:]

    def _decided(self, decision: Decision, at_s: float) -> None:
        self.node_speeds.decided(decision)
        if decision.actions and decision.reason:
            self.notes.append(Note(at_s, self.step, "Decision", decision.reason))
        self.reason = decision.reason or self.reason
        for action in decision.actions:
            if isinstance(action, EnterPlan):
                self.planned[action.plan.generation] = action.plan
                self.closed = dict(action.plan.unusable)
                self.phase = "entering"
            elif isinstance(action, RequestNodes):
                self.wanted[action.pool] = self.wanted.get(action.pool, 0) + action.count
            elif isinstance(action, Quarantine) and action.node_id in self.nodes:
                self._node(action.node_id, status="quarantined")
            elif isinstance(action, Stop):
                self.phase = action.outcome

    def status(self, node: Node) -> str:
        """In a word, for a person."""
        return (
            "released" if node.status == "lost" and node.node_id in self.released else node.status
        )

    def _node(self, node_id: str, **changes: Any) -> None:
        if node_id in self.nodes:
            self.nodes[node_id] = replace(self.nodes[node_id], **changes)

    def _fold(self, event: Event) -> None:
        self.node_speeds.add(event, self.plan, self.model)
        match event:
            case StepDone():
                self.step = event.step
                self.reached = max(self.reached, event.step)
                self.phase = "running"
                self.points.append(self._point(event))
            case DriverStarted():
                self._started(event)
            case NodeReady(node):
                self.nodes[node.node_id] = node
                self.released.discard(node.node_id)
                self.wanted[node.pool] = max(0, self.wanted.get(node.pool, 0) - 1)
            case NodePrepared(node_id):
                if node_id in self.nodes and self.nodes[node_id].status in ("pending", "ready"):
                    self._node(node_id, status="prepared")
            case Notice(node_id, deadline_s):
                self._node(node_id, status="draining", deadline_s=deadline_s)
            case NoticeWithdrawn(node_id):
                self._node(node_id, status="prepared", deadline_s=None)
            case NodeLost(node_id, cause):
                if cause == "released":
                    self.released.add(node_id)
                self._node(node_id, status="lost", deadline_s=None)
            case PlansFound(plans):
                self.planned |= {plan.generation: plan for plan in plans}
            case StorageSeen():
                self.away = None if event.answers else event
            case PlanEntered():
                self.plan = self.planned.get(event.generation, self.plan)
                self.step = event.step
                self.phase = "running"
                self.entered.append((self.at_s, event))
            case SharesSet() if self.plan is not None and self.plan.generation == event.generation:
                self.plan = replace(self.plan, samples=event.samples)
            case NoiseSeen():
                self.noise[event.step] = (event.trace, event.square_norm)
            case Evaluated():
                self.evaluations[event.step] = event.metrics
            case CopyStored(copy):
                # an older one may be committed after a newer one
                known = self.copies.get(copy.kind, event).copy
                if (copy.generation, copy.step) >= (known.generation, known.step):
                    self.copies[copy.kind] = event
            case StopAsked():
                self.phase = "stopping"
            case _:
                pass

    def _point(self, done: StepDone) -> Point:
        numbers = (
            done.generation,
            done.tokens,
            done.step_time_s,
            done.digest,
            done.imbalance,
            done.pad_share,
            done.grad_norm,
        )
        return Point(done.step, done.train_loss, self.at_s, *numbers)

    def _started(self, event: DriverStarted) -> None:
        self.run, self.epoch, self.job, self.model = (
            event.run,
            event.epoch,
            Job.from_plain(event.job),
            event.model,
        )
        self.pools = {pool.name: pool for pool in event.pools}
        self.started_at_s = self.started_at_s or self.at_s
        self.wanted, self.away = {}, None
        self.phase = "waiting"
        if not event.attached:
            self.nodes, self.plan = {}, None


def view_of(lines: Iterable[Line]) -> View:
    """The view after all lines."""
    view = View()
    for line in lines:
        view.add(line)
    return view


class Tail:
    """Reads what was added to a journal since the last call; half-written lines wait for their end.
    Where another file has taken the place of one that became large, it continues with that."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.skipped = 0  # lines that are none: a driver died while it wrote
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> list[Line]:
        *whole, self._rest = (self._rest + self._added()).split(b"\n")
        lines = []
        for text in whole:
            if not text.strip():
                continue
            try:
                lines.append(parse_line(text.decode()))
            except (ValueError, KeyError, TypeError):
                self.skipped += 1
        return lines

    def skip(self) -> None:
        """What is there now is not read."""
        self._added()

    def _added(self) -> bytes:
        data = self._file.read() if self._file is not None else b""
        try:
            there = self.path.open("rb")
        except FileNotFoundError:
            return data
        if self._file is not None and os.path.sameopenfile(self._file.fileno(), there.fileno()):
            there.close()
            return data
        if self._file is not None:
            data += self._file.read()  # what came before the other took its place
            self._file.close()
        self._file = there
        return data + there.read()

    def close(self) -> None:
        """No more is read."""
        if self._file is not None:
            self._file.close()
            self._file = None
