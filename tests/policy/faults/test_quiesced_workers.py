"""What many workers report at once is folded as if they had reported it one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.policy.story import Story

from elastic.policy.faults.failures import failed
from elastic.policy.state import layered
from elastic.policy.state.event_handlers import billed
from elastic.policy.state.fold import Failure, State, fold, folded
from elastic.types import (
    Abort,
    Decided,
    Decision,
    Event,
    Holding,
    NodeLost,
    Notice,
    Pool,
    Quiesce,
    Quiesced,
    RollForward,
    StepDone,
    WorkerFailed,
    WorkerId,
)

NAMES = [f"n{k}" for k in range(16)]
POOL = Pool("spot", "CPU", 1, "spot", 1.0, 0, 16)


def report(chance: Random, story: Story, name: str) -> Quiesced:
    """Of the running generation, of the coming one, or of one that nobody knows."""
    worker, number = WorkerId(name, 0), story.state.generation + chance.choice([-1, 0, 0, 0, 7])
    held = tuple(
        Holding(worker, number, chance.randrange(16), 3, chance.choice(["live", "peer"]))
        for _ in range(chance.randint(0, 3))
    )
    commit = chance.choice([(), (float(number), 3.0)])
    step, pending = chance.choice([0, 3, 100]), chance.choice([-1, -1, 4, 5])
    return Quiesced(worker, number, step, held, commit, pending)


def broken(chance: Random) -> Story:
    """A run of 14 of 16 nodes in one of the situations in which workers leave a generation."""
    story = Story((POOL,), max_workers=14, deadline_h=None, global_batch=28)
    plan = story.running(*NAMES, steps=3)
    kind = chance.choice(["unasked", "asked", "aborted", "forward", "entering", "lost"])
    if kind == "asked":
        order = Decision((Quiesce(plan.generation, save=True),))
        story.state = fold(story.state, Decided(order), story.now_s)
    elif kind == "entering":
        story.tick(Notice(NAMES[0], story.now_s + 0.5))
    elif kind in ("aborted", "forward"):
        failed = WorkerFailed(WorkerId(NAMES[1], 0), plan.generation, "collective", "reset")
        story.tick(failed)
        told: list[Event] = [Decided(Decision((Abort(plan.generation),)))]
        if kind == "forward":
            told += [
                Quiesced(WorkerId(name, 0), plan.generation, 3, pending_step=4) for name in NAMES
            ]
            told.append(Decided(Decision((RollForward(plan.generation, 4, (1.0, 4.0)),))))
        for event in told:
            story.state = fold(story.state, event, story.now_s)
    elif kind == "lost":
        story.tick(NodeLost(NAMES[2], "taken"))
    return story


def alone(state: State, event: Quiesced, at_s: float) -> State:
    """The rule for a single report, with plain mappings."""
    worker, plan, target = event.worker, state.plan, state.target
    node = state.nodes.get(worker.node_id)
    if node is None or node.status == "lost" or worker in state.dead:
        return state

    def changed(of: Mapping[WorkerId, Any], value: Any, there: bool) -> dict[WorkerId, Any]:
        others = {key: one for key, one in of.items() if key != worker or there}
        return others | ({worker: value} if there else {})

    state = replace(
        state,
        holdings=changed(state.holdings, event.holdings, True),
        commits=changed(state.commits, event.commit, bool(event.commit)),
        pending=changed(state.pending, event.pending_step, event.pending_step >= 0),
    )
    if state.aborting is not None:
        forward = state.aborting.forward
        if forward is not None and event.pending_step == forward.step:
            return state
        owing = frozenset(state.aborting.owing) - {worker}
        return replace(state, aborting=replace(state.aborting, owing=owing))
    for current in (plan, target):
        if current and event.generation == current.generation and worker not in current.workers:
            sent = {one for one in state.sent if one[0] == event.generation}
            return replace(state, sent=frozenset({*sent, (event.generation, worker)}))
    if plan is None or event.generation != plan.generation:
        return state
    state = replace(state, quiesced=frozenset({*state.quiesced, worker}))
    if state.quiescing or target or event.step >= state.phase_ends_at:
        return state
    why = f"worker {worker} left generation {plan.generation} unasked"
    return failed(state, Failure("infrastructure", why, at_s))


@pytest.mark.parametrize("seed", range(60))
def test_at_once_is_one_after_the_other(seed: int) -> None:
    chance = Random(seed)
    story = broken(chance)
    events: list[Event] = []
    for _ in range(chance.choice([1, 3, 40])):
        events.append(report(chance, story, chance.choice([*NAMES, "stranger"])))
        if chance.random() < 0.05:
            generation = story.state.generation
            events.append(StepDone(generation, 4, 1.0, 10, 0.1, digest="d4"))
    late_s = chance.choice([0.0, 2.0])
    entries = [
        (story.now_s + (late_s if k > len(events) // 2 else 0.0), event)
        for k, event in enumerate(events)
    ]
    each = by_rule = story.state
    for at_s, event in entries:
        each = fold(each, event, at_s)
        one = alone(billed(by_rule, at_s), event, at_s) if isinstance(event, Quiesced) else None
        by_rule = one or fold(by_rule, event, at_s)
    at_once = folded(story.state, entries)
    assert at_once == each == by_rule
    assert list(at_once.holdings) == list(each.holdings)  # in the order in which they came


def test_the_cases_are_not_of_one_kind() -> None:
    seen: set[str] = set()
    for seed in range(60):
        state: State = broken(Random(seed)).state
        of = "aborting" if state.aborting else "quiescing" if state.quiescing else state.phase
        forward = state.aborting is not None and state.aborting.forward is not None
        seen.add("forward" if forward else of)
    assert seen >= {"aborting", "forward", "quiescing", "running", "entering"}


def test_thousands_of_reports_make_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping is not copied for each of them."""
    story = broken(Random(0))
    monkeypatch.setattr(layered, "with_entry", None)  # which adds one
    entries = [
        (story.now_s, Quiesced(WorkerId(name, 0), story.state.generation, 3)) for name in NAMES
    ]
    assert set(folded(story.state, entries).holdings) >= {WorkerId(name, 0) for name in NAMES[2:]}
