"""What must be true of a run, whoever ran it and whatever happened to it: judged from its journal,
beside an undisturbed run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic.api.running.sample_check import Unwritten
from elastic.driver import restored
from elastic.ledger.journal import Line
from elastic.observe.accounting.accounts import account
from elastic.observe.accounting.transitions import Transition
from elastic.observe.run_view import view_of
from elastic.scenarios.check import (
    BILL,
    CONTENTS,
    ENDED,
    NONE_LOST,
    NOT_STARTED,
    ORDERS,
    REPLAY,
    SAMPLES,
    Bound,
    Check,
    judge,
)
from elastic.scenarios.kept_steps import actions, events, kept, plans
from elastic.sim.replay import replay
from elastic.types import (
    Abort,
    CopyStored,
    DigestChecked,
    EnterPlan,
    Event,
    NodeLost,
    NodePrepared,
    NodeReady,
    Notice,
    PlanEntered,
    Stop,
    WorkerFailed,
)  # fmt: skip

SENTENCES = 3  # of what is wrong, that are said
LATER_S = 3600.0
SOON_LOST_S = 5.0  # on a busy machine


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults: its losses and the digests of its samples, from step 1 on. `phase`:
    what the run must end in. `content_harmed`: a fault is that what was sent is not what came.
    `compared`: the contents of each transition were, where that was possible. `end_waits`: its last
    order may wait for storage; what is paid meanwhile is in no bill."""

    losses: Sequence[float]
    digests: Sequence[str]
    tolerance: float = 0.0
    phase: str = "succeeded"
    content_harmed: bool = False
    compared: bool = False
    end_waits: bool = False


def wrong(lines: Sequence[Line], expected: Undisturbed) -> list[str]:
    """All that is wrong with the run, a text for each check that fails."""
    return [check.why for check in judged(lines, expected) if check.verdict == "fail"]


def judged(lines: Sequence[Line], expected: Undisturbed) -> list[Check]:
    """What must hold of any run. One that did not end as it should is judged by that alone."""
    ended = _end(lines, expected)
    if ended.verdict == "fail":
        return [ended]
    return [
        ended,
        _counted("orders", _orders(lines), ORDERS),
        _counted("samples", _steps(lines, expected), SAMPLES, steps=max(kept(lines), default=0)),
        _losses(lines, expected),
        _content(lines, expected),
        replayed(lines),
        _bill(lines, expected),
    ]


def _counted(name: str, sentences: Iterator[str], bound: Bound, **figures: Any) -> Check:
    """Each sentence is something wrong."""
    said = list(sentences)
    check = judge(name, {**figures, bound.figure: len(said)}, [bound])
    more = [f"and {len(said) - SENTENCES} more"] if len(said) > SENTENCES else []
    return replace(check, why="; ".join([*said[:SENTENCES], *more])) if said else check


def _end(lines: Sequence[Line], expected: Undisturbed) -> Check:
    state = restored(lines)
    phase, why = (state.phase, state.outcome_reason) if state else ("has no journal", "")
    said = [f"it {phase}: {why}"] if phase != expected.phase else []
    return _counted("end", iter(said), ENDED, phase=phase)


def _orders(lines: Sequence[Line]) -> Iterator[str]:
    """A reason for each, ever newer generations, on nodes that are not lost; each is entered once
    by a driver, and nothing is ordered once the run has ended."""
    lost: set[str] = set()
    generation, newest = 0, None
    ordered: set[tuple[int, int]] = set()  # epoch, generation
    entered: set[tuple[int, int]] = set()
    over: set[int] = set()  # epochs
    for line in lines:
        for _, event in line.events:
            lost |= {event.node_id} if isinstance(event, NodeLost) else set()
            lost -= {event.node.node_id} if isinstance(event, NodeReady) else set()
            if isinstance(event, PlanEntered):
                if (line.epoch, event.generation) in entered:
                    yield f"generation {event.generation} is entered twice"
                entered.add((line.epoch, event.generation))
        for action in actions([line]):
            if line.decision is not None and not line.decision.reason:
                yield f"{action} without a reason"
            if line.epoch in over:
                yield f"{action} is ordered after the end"
            if not isinstance(action, EnterPlan):
                continue
            if (line.epoch, action.plan.generation) in ordered:
                yield f"generation {action.plan.generation} is ordered twice by one driver"
            ordered.add((line.epoch, action.plan.generation))
            # the same again: by a driver that attaches
            if action.plan != newest:
                if action.plan.generation <= generation:
                    yield f"generation {action.plan.generation} is ordered after {generation}"
                if there := lost & set(action.plan.nodes):
                    yield (
                        f"generation {action.plan.generation} is ordered on "
                        f"{', '.join(sorted(there))}, which is lost"
                    )
                generation, newest = action.plan.generation, action.plan
        if _stops(line):
            over.add(line.epoch)


def _stops(line: Line) -> bool:
    return any(isinstance(action, Stop) for action in actions([line]))


def _told(lines: Sequence[Line]) -> list[tuple[float, Event]]:
    return [told for line in lines for told in line.events]


# ---------------------------------------------------------------------------------------- the steps


def _steps(lines: Sequence[Line], expected: Undisturbed) -> Iterator[str]:
    """Each once, on its own samples, and so on the curve that a user sees."""
    found, curve = kept(lines), {point.step: point for point in view_of(lines).curve()}
    steps, unwritten = range(1, len(expected.digests) + 1), Unwritten.of(lines).steps
    for step in steps:
        event, seen = found.get(step), curve.get(step)
        if event is None:
            if step not in unwritten:
                yield f"step {step} is in no generation that the last state comes of"
            continue
        if event.digest != expected.digests[step - 1]:
            yield f"step {step} of generation {event.generation} was trained on other samples"
        if seen is None or (seen.digest, seen.train_loss) != (event.digest, event.train_loss):
            yield f"the curve that a user sees has another step {step}"
    if more := set(found) - set(steps):
        yield f"steps {sorted(more)} are too many"


def _losses(lines: Sequence[Line], expected: Undisturbed) -> Check:
    bound = Bound(
        "worst_loss_difference",
        "of any step, from that of one process (absolute); another layout sums in another order",
        most=expected.tolerance,
    )
    worst = worst_loss(lines, expected)
    check = judge("losses", {"worst_loss_difference": worst[0]}, [bound])
    return replace(check, why=worst[1]) if check.verdict == "fail" else check


def worst_loss(lines: Sequence[Line], expected: Undisturbed) -> tuple[float, str]:
    """The largest difference of a step's loss, and of which step."""
    worst, said = 0.0, ""
    for step, event in kept(lines).items():
        if step <= len(expected.losses):
            loss = expected.losses[step - 1]
            gap = abs(event.train_loss - loss)
            gap = gap if math.isfinite(gap) else math.inf
            if gap > worst:
                worst = gap
                said = (
                    f"step {step} of generation {event.generation} has train_loss "
                    f"{event.train_loss:.6f}, undisturbed {loss:.6f}"
                )
    return worst, said


# -------------------------------------------------------------------------------------- the content


def _content(lines: Sequence[Line], expected: Undisturbed) -> Check:
    said = [
        f"content differs after the transition to generation {event.generation}"
        for event in events(lines, DigestChecked)
        if not event.ok and not expected.content_harmed
    ]
    if expected.compared:
        left_out = not_compared(lines)
        said += [
            f"nobody has compared the contents of generation {one.generation} ({one.cause})"
            for one in account(lines).transitions
            if one.source != "fresh" and one.digest_ok is None and one.generation not in left_out
        ]
    return _counted("content", iter(said), CONTENTS)


def not_compared(lines: Sequence[Line]) -> set[int]:
    """Generations whose contents nobody can have compared: that happens behind the steps, by all
    who gave or took something. No step was made; or one of them was lost within SOON_LOST_S of
    entering, or the generation was aborted then."""
    told = _told(lines)
    entered = {event.generation: at_s for at_s, event in told if isinstance(event, PlanEntered)}
    lost = [(at_s, event.node_id) for at_s, event in told if isinstance(event, NodeLost)]
    lost += [
        (at_s, event.worker.node_id)
        for at_s, event in told
        if isinstance(event, WorkerFailed) and event.kind == "process"
    ]
    found = {
        action.generation
        for line in lines
        for action in actions([line])
        if isinstance(action, Abort)
        and line.at_s < entered.get(action.generation, 0.0) + SOON_LOST_S
    }
    for plan in plans(lines):
        nodes = {*plan.nodes, *(holding.worker.node_id for holding in plan.resume.holdings)}
        since_s = entered.get(plan.generation, 0.0)
        if any(node in nodes and since_s <= at_s < since_s + SOON_LOST_S for at_s, node in lost):
            found.add(plan.generation)
    return found | without_steps(lines)


def without_steps(lines: Sequence[Line]) -> set[int]:
    moves, last = account(lines).transitions, max(kept(lines), default=0)
    ends = [*(move.at_step for move in moves[1:]), last]
    return {move.generation for move, end in zip(moves, ends) if end <= move.at_step}


# ------------------------------------------------------------------------------ replay and the bill


def replayed(lines: Sequence[Line]) -> Check:
    """All decisions replayed from the journal, without a cluster."""
    found = replay(lines)
    said = [] if found.identical else [f"a replay decides otherwise: {found.first_difference}"]
    if found.state != restored(lines):
        said.append("a replay ends in another state")
    return _counted("replay", iter(said), REPLAY, decisions=found.n_decisions)


def _bill(lines: Sequence[Line], expected: Undisturbed) -> Check:
    if expected.end_waits:
        last = max((i for i, line in enumerate(lines) if _stops(line)), default=-1)
        lines = lines[: last + 1] or lines
    return _counted("bill", _money(lines), BILL, usd=sum(account(lines).usd.values()))


def _money(lines: Sequence[Line]) -> Iterator[str]:
    """Two counts of the bill agree, nothing is below zero, and nothing is paid once the run is
    over."""
    state, books = restored(lines), account(lines)
    if not _stops(lines[-1]):
        yield "its last line does not end it"
    if min(books.gpu_seconds.values()) < -1e-6:
        yield f"less than no GPU-seconds: {books.gpu_seconds}"
    usd, counted = sum(books.usd.values()), state.usd if state is not None else math.nan
    if not math.isclose(usd, counted, rel_tol=1e-6, abs_tol=1e-9):
        yield f"the ledger says ${usd:.6f}, the policy ${counted:.6f}"
    later = replace(lines[-1], at_s=lines[-1].at_s + LATER_S, events=(), decision=None)
    if account([*lines, later]).gpu_seconds != books.gpu_seconds:
        yield "nodes are paid for after its end"


# ---------------------------------------------------------------------------------- single promises


def survivors(lines: Sequence[Line], hit: set[str]) -> Check:
    """No worker of a node that was not hit was started again or failed with its process."""
    pids: dict[str, set[tuple[int, ...]]] = {}
    for event in events(lines, NodePrepared):
        pids.setdefault(event.node_id, set()).add(event.pids)
    dead = {e.worker.node_id for e in events(lines, WorkerFailed) if e.kind == "process"}
    said = [
        f"{node}: {'its workers were started again' if len(found) > 1 else 'a process ended'}"
        for node, found in sorted(pids.items())
        if node not in hit and (len(found) > 1 or node in dead)
    ]
    return _counted("survivors", iter(said), NOT_STARTED, nodes=len(pids))


def before_acknowledged(move: Transition, lines: Sequence[Line]) -> int:
    """How many steps before the newest peer replica that stood in the journal when its plan was
    made the run continued from; all of them where there was none. A replica of steps that were
    undone since is none."""
    copies: list[int] = []
    for line in lines:
        for _, event in line.events:
            if isinstance(event, PlanEntered):
                copies = [step for step in copies if step <= event.step]
            elif isinstance(event, CopyStored) and event.copy.kind == "peer":
                copies.append(event.copy.step)
        if any(plan.generation == move.generation for plan in plans([line])):
            break
    return max(0, max(copies) - move.at_step) if copies else move.at_step + 1


def planned(lines: Sequence[Line], *, least_notice_s: float) -> Check:
    """Changes that were known beforehand cost no step: whatever grows, is released or rebalanced,
    and notices of at least so many seconds, where nothing was lost between order and entry."""
    told = _told(lines)
    lost = [
        at_s
        for at_s, event in told
        if isinstance(event, WorkerFailed)
        or (isinstance(event, NodeLost) and event.cause != "released")
    ]
    ordered_s = {plan.generation: line.at_s for line in lines for plan in plans([line])}
    # of each node's last notice
    until_s = {e.node_id: e.deadline_s - at_s for at_s, e in told if isinstance(e, Notice)}
    short = min(until_s.values(), default=least_notice_s) < least_notice_s
    said = [
        f"generation {move.generation} ({move.cause}, from {move.source}) lost {move.steps_lost} "
        f"steps at step {move.at_step}"
        for move in account(lines).transitions
        if move.steps_lost
        and move.cause in ("growth", "release", "rebalance", *(() if short else ("notice",)))
        and not any(ordered_s.get(move.generation, 0.0) <= at_s <= move.at_s for at_s in lost)
    ]
    return _counted("planned moves", iter(said), replace(NONE_LOST, figure="moves_with_lost_steps"))
