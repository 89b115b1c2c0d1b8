"""What happened, in sentences for somebody who has never heard of ranks and layouts. Pure.

A short run has a sentence for each change; a long one has one for each hour, day or week."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from elastic.observe.accounting.accounts import Account
from elastic.observe.accounting.transitions import Transition
from elastic.observe.event_messages import first_line
from elastic.observe.run_view import View
from elastic.policy.state.fold import Change
from elastic.text import DAY_S, duration, n_of, span
from elastic.types import (
    CopyDamaged,
    Decided,
    DriverStarted,
    Event,
    NodeLost,
    NodeReady,
    Notice,
    Quarantine,
    Silent,
    StorageSeen,
    WorkerFailed,
    WrongNumbers,
)

MOST = 24  # sentences about changes; a run with more is described by periods
HOUR_S = 3600.0
PERIODS = (
    ("Hour", HOUR_S), ("Quarter of a day", 6 * HOUR_S), ("Day", DAY_S),
    ("Week", 168 * HOUR_S), ("Month", 720 * HOUR_S),
)  # fmt: skip
# of a worker's failure, in plain words; the others come with the loss of a node
FAILURES = {
    "program": "the training program raised an error",
    "out_of_memory": "a GPU ran out of memory",
    "not_finite": "the loss was no number any more",
    "guard": "a guard of the job tripped",
    "device": "a GPU failed",
    "storage": "storage did not answer",
    "refused": "storage refused to be read",
    "unread": "a node could not read the data",
}
SOURCES = {
    "live": "with everything kept in memory",
    "peer": "from the copy that another machine keeps in memory",
    "durable": "from the last checkpoint in storage",
    "fresh": "from the beginning",
}


@dataclass(frozen=True)
class Incident:
    """`kind`: joined, noticed, lost, quarantined, silent, corrupted, failed, away, back, damaged,
    driver, driver_anew. `what`: a node, or why."""

    at_s: float
    kind: str
    what: str = ""


@dataclass(frozen=True)
class Sentence:
    """`when`: `0:12:05`, or `Day 3`. `mark`: a sign that says the kind without color; see
    MARKS."""

    when: str
    mark: str
    text: str


# kind of a sentence -> a sign, and what it means
MARKS = {
    "start": ("▶", "start"), "notice": ("!", "announced"), "loss": ("✕", "loss"),
    "growth": ("+", "more capacity"), "change": ("~", "other change"), "period": ("•", "a period"),
    "trouble": ("✕", "trouble"), "end": ("■", "end"),
}  # fmt: skip


@dataclass
class Incidents:
    """Built by `take`: what a person would tell of, in order."""

    found: list[Incident] = field(default_factory=list)
    _away: bool = False

    def take(self, change: Change) -> None:
        if change.event is None:
            return
        for kind, what in self._of(change.event, change):
            self.found.append(Incident(change.at_s, kind, what))

    def _of(self, event: Event, change: Change) -> Iterable[tuple[str, str]]:
        match event:
            case DriverStarted() if change.before.run:
                yield ("driver" if event.attached else "driver_anew"), ""
            case NodeReady(node):
                yield "joined", node.node_id
            case Notice(node_id):
                yield "noticed", node_id
            case NodeLost(node_id, cause) if cause != "released":
                yield "lost", node_id
            case Decided(decision):
                yield from (
                    ("quarantined", action.node_id)
                    for action in decision.actions
                    if isinstance(action, Quarantine)
                )
            case Silent(worker):
                yield "silent", worker.node_id
            case WrongNumbers(workers=workers):
                yield "corrupted", workers[0].node_id if workers else ""
            case WorkerFailed() if event.kind in FAILURES:
                yield "failed", f"{FAILURES[event.kind]} ({first_line(event.error)})"
            case StorageSeen(answers) if answers == self._away:
                self._away = not answers
                yield ("back" if answers else "away"), ""
            case CopyDamaged(reason=reason):
                yield "damaged", reason
            case _:
                pass


def story(view: View, books: Account, incidents: Incidents) -> list[Sentence]:
    """From the start to the end, or as far as the run has come."""
    changes = [one for one in books.transitions if one.cause != "start" or one.generation > 1]
    told = _by_change(view, books, incidents.found)
    if len(changes) > MOST:
        told = _by_period(view, books, incidents.found)
    return [*told, _end(view, books)]


# ------------------------------------------------------------------------------- change by change


def _by_change(view: View, books: Account, incidents: Sequence[Incident]) -> list[Sentence]:
    told, since_s = [], float("-inf")
    for one in sorted(books.transitions, key=lambda one: one.at_s):
        around = [i for i in incidents if since_s < i.at_s <= one.at_s]
        told += _troubles(view, around)
        mark = one.cause if one.cause in MARKS else "change"
        told.append(Sentence(_when(view, one.at_s), mark, _change(view, one, around)))
        since_s = one.at_s
    return told + _troubles(view, [i for i in incidents if i.at_s > since_s])


def _troubles(view: View, around: Sequence[Incident]) -> list[Sentence]:
    """What is no change of capacity, each kind once; of a node that was lost its silence is known
    by that."""
    texts = {
        "failed": "Trouble: {what}.",
        "corrupted": "The results of machine {what} differed from those of its replicas: it may "
        "compute wrong.",
        "quarantined": "Machine {what} is not used any more.",
        "silent": "Machine {what} did not answer any more.",
        "away": "Storage did not answer; training continued meanwhile.",
        "back": "Storage answered again.",
        "damaged": "A checkpoint could not be read: {what}.",
        "driver": "The program that steers the run had ended and was started again; training was "
        "not touched.",
        "driver_anew": "The run had been stopped, killed or interrupted, and was started again.",
    }
    told, known = [], set()
    for one in around:
        if one.kind in texts and (one.kind, one.what) not in known:
            known.add((one.kind, one.what))
            text = texts[one.kind].format(what=one.what or "(not known)")
            told.append(Sentence(_when(view, one.at_s), "trouble", text))
    return told


def _change(view: View, one: Transition, around: Sequence[Incident]) -> str:
    plan = view.planned.get(one.generation)
    n = len(plan.ranks) if plan is not None else 0
    on = f"{n_of(n, gpu_word(view))} of {n_of(len(plan.nodes) if plan else 0, 'machine')}"
    if one.cause == "start":
        if one.at_step:
            return f"Training resumed at step {one.at_step} on {on}, {SOURCES[one.source]}."
        return f"Training began on {on}."
    why = {
        "notice": f"The cloud announced that it takes back {_names(around, 'noticed')}",
        "loss": f"{_begun(_names(around, 'lost', 'silent'))} failed without warning",
        "growth": f"{_begun(_names(around, 'joined'))} joined",
        "release": "The run gave up a machine that cost more than it was worth",
        "rebalance": "The machines were not equally fast, so the work was divided anew",
        "infeasible": "The division of the work did not fit into memory, so another one was taken",
        "phase": f"The job came to its phase {plan.phase + 1 if plan is not None else '-'}",
        "rollback": "The numbers had gone wrong, so an earlier state was taken",
    }[one.cause]
    paused = f"It paused for {one.pause_s:.1f} s" if one.pause_s >= 0.05 else "It did not pause"
    again = f"{n_of(one.steps_lost, 'step')} had to be trained again"
    return (
        f"{why}: training continued at step {one.at_step} on {on}, {SOURCES[one.source]}. "
        f"{paused}, and {again if one.steps_lost else 'no work was lost'}."
    )


def _names(around: Sequence[Incident], *kinds: str) -> str:
    names = list(dict.fromkeys(one.what for one in around if one.kind in kinds and one.what))
    if not names:
        return "a machine"
    if len(names) > 4:
        return f"{len(names)} machines"
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"machine {listed}" if len(names) == 1 else f"machines {listed}"


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


def gpu_word(view: View) -> str:
    """What does the work."""
    kinds = {pool.accelerator_type for pool in view.state.pools}
    return "GPU" if kinds - {"CPU"} else "worker"


# ------------------------------------------------------------------------------- period by period


def _by_period(view: View, books: Account, incidents: Sequence[Incident]) -> list[Sentence]:
    whole_s = max(0.0, view.at_s - view.started_at_s)
    name, length_s = next((p for p in PERIODS if whole_s / p[1] <= MOST), PERIODS[-1])

    def period(at_s: float) -> int:
        return int(max(0.0, at_s - view.started_at_s) // length_s)

    in_order = sorted(books.transitions, key=lambda one: one.at_s)
    changes = {k: list(g) for k, g in groupby(in_order, lambda one: period(one.at_s))}
    events = {k: list(g) for k, g in groupby(incidents, lambda one: period(one.at_s))}
    reached = {period(point.at_s): point.step for point in view.curve()}
    told = [one for one in _by_change(view, books, incidents)[:1] if one.mark == "start"]
    return told + [
        Sentence(
            f"{name} {k + 1}",
            "period",
            _told(changes.get(k, []), events.get(k, []), reached.get(k)),
        )
        for k in sorted(changes.keys() | events.keys() | reached.keys())
    ]


def _told(changes: Sequence[Transition], events: Sequence[Incident], step: int | None) -> str:
    counted = [
        f"{n} {words}"
        for kind, words in (
            ("noticed", "announced to be taken back"), ("lost", "lost without warning"),
            ("joined", "joined"), ("quarantined", "not used any more"),
        )
        if (n := _n_machines(events, kind))
    ]  # fmt: skip
    said = f"Machines: {', '.join(counted)}. " if counted else "No machine came or left. "
    entered = [one for one in changes if one.cause != "start"]
    if entered:
        pause_s, lost = sum(t.pause_s for t in entered), sum(t.steps_lost for t in entered)
        said += (
            f"The work was divided anew {n_of(len(entered), 'time')}, with pauses of "
            f"{span(pause_s)} in all"
        )
        said += f" and {n_of(lost, 'step')} trained again. " if lost else " and no work lost. "
    return said + (f"Reached step {step:,}." if step is not None else "No step was finished.")


def _n_machines(events: Sequence[Incident], kind: str) -> int:
    """A machine that was announced to be taken back is not counted again when it goes."""
    names = {one.what for one in events if one.kind == kind}
    if kind == "lost":
        names -= {one.what for one in events if one.kind == "noticed"}
    return len(names)


# --------------------------------------------------------------------------------------- the end


def _end(view: View, books: Account) -> Sentence:
    steps, wall = books.totals.steps, span(books.totals.wall_s)
    how = {
        "succeeded": f"The run finished all of its {steps:,} steps after {wall}.",
        "failed": f"The run failed after {wall}, at step {steps:,}: {view.reason}.",
        "stopped": f"The run was stopped after {wall}, at step {steps:,}: {view.reason}.",
    }
    text = how.get(view.phase, f"So far: step {view.progress}, {view.phase}, after {wall}.")
    if view.phase == "succeeded" and not steps:
        text = f"The run finished after {wall}."
    return Sentence(_when(view, view.at_s), "end", text.replace("..", "."))


def _when(view: View, at_s: float) -> str:
    since_s = max(0.0, at_s - view.started_at_s)
    return f"day {since_s / DAY_S:.1f}" if since_s >= 2 * DAY_S else duration(since_s)
