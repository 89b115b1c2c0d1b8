"""What must hold of each act of a scenario, and of its whole run: checks with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from elastic.data.order import digest, digest_text, sample_ids
from elastic.ledger.journal import Line
from elastic.observe.accounting.accounts import account
from elastic.observe.accounting.transitions import Transition
from elastic.scenarios.check import (
    CONTENT,
    FASTER,
    FOUND,
    FROM_MEMORY,
    KEPT,
    LEFT,
    LOSS,
    MEASURED,
    NONE_LOST,
    NOT_STARTED,
    TOLERANCE,
    Bound,
    Check,
    judge,
)
from elastic.scenarios.judge import (
    Undisturbed,
    before_acknowledged,
    judged,
    not_compared,
    survivors,
    worst_loss,
)
from elastic.scenarios.kept_steps import actions, events, kept, plans
from elastic.scenarios.limit import Limit
from elastic.scenarios.one_process import losses
from elastic.scenarios.play import Played
from elastic.scenarios.scenario import Act, Scenario
from elastic.scenarios.stages import TRAINS
from elastic.types import (
    Abort,
    DrillAsked,
    NodePrepared,
    Probed,
    Quarantine,
    Quiesced,
    Silent,
    StepDone,
    WorkerFailed,
    WrongNumbers,
    agree,
    parse_layout,
)  # fmt: skip

N_SAMPLES = 512  # of programs/small.py
PROBE = 1e-4  # relative, of one sample's loss in two layouts
STALLED = "has not come to collective"
HITS = ("notice", "kill", "hang", "stall", "corrupt", "device_error", "partition")


def undisturbed(n_steps: int, limit: Limit) -> Undisturbed:
    """What a scenario trains, in one process. Raises OutOfTime."""
    batch, seed = int(TRAINS["global_batch"]), int(TRAINS["seed"])
    digests = [
        digest_text(digest(sample_ids(N_SAMPLES, batch, seed, step=step)))
        for step in range(n_steps)
    ]
    alone = losses("unpaced", TRAINS, n_steps, limit=limit)
    return Undisturbed(alone, digests, TOLERANCE, phase="stopped", compared=True)


def checks(scenario: Scenario, played: Played, expected: Undisturbed) -> Iterator[Check]:
    """The judgment of a scenario that was played."""
    lines, worst = played.lines, worst_loss(played.lines, expected)[0]
    yield from _acts(scenario, played, worst)
    whole = judged(lines, expected)
    if len(whole) > 1:
        whole += [survivors(lines, {*played.hit, *_asked(lines, *HITS)}), _left(played)]
    for check in whole:
        yield replace(check, name=f"{scenario.name}: {check.name}")


def _left(played: Played) -> Check:
    figures = {"processes_left": len(played.left), "processes_seen": played.n_processes}
    check = judge("nothing left", figures, [LEFT])
    return replace(check, why="; ".join(played.left)) if played.left else check


# -------------------------------------------------------------------------------------- each act


def _acts(scenario: Scenario, played: Played, worst: float) -> Iterator[Check]:
    """Each by the next transition of its cause. Others than that may come only where the scenario
    says so."""
    moves = list(account(played.lines).transitions)
    causes, besides = [move.cause for move in moves], list[str]()
    left, done = moves[1:], next(iter(moves), None)
    for act in scenario.acts:
        if act.leads_to == "none":
            yield _driver(act, played, worst)
            continue
        if act.replaces and done is not None and _world(done) == _world(moves[0]):
            yield Check(act.name, "pass", why="the transition before has it already")
            continue
        at = next((i for i, move in enumerate(left) if move.cause == act.leads_to), None)
        if at is None:
            why = (
                f"a transition by {act.leads_to} was expected; the run's transitions were {causes}"
            )
            yield Check(act.name, "fail", why=why)
            continue
        besides += [move.cause for move in left[:at]]
        yield _act(scenario, act, left[at], played=played, worst=worst)
        done, left = left[at], left[at + 1 :]
    besides += [move.cause for move in left]
    if unasked := [cause for cause in besides if cause not in scenario.also]:
        why = f"transitions that nobody asked for, by {unasked}; the run's were {causes}"
        yield Check(f"{scenario.name}: acts", "fail", why=why)


def _world(move: Transition) -> int:
    return parse_layout(move.to_layout).world_size


def _act(scenario: Scenario, act: Act, move: Transition, *, played: Played, worst: float) -> Check:
    lines = played.lines
    nothing = move.source == "fresh" or (
        move.digest_ok is None and move.generation in not_compared(lines)
    )
    figures: dict[str, Any] = {
        "pause_s": move.pause_s, "steps_lost": move.steps_lost,
        "content_equal": int(move.digest_ok is True or nothing), "worst_loss_difference": worst,
        "launch_to_first_step_s": played.start_s, "pause_vs_start": move.pause_s / played.start_s,
        "from_memory": int(move.source in ("live", "peer")), "source": move.source,
        "bytes_moved": move.bytes_moved,
    }  # fmt: skip
    bounds = [CONTENT, LOSS, _pause(act)]
    known = act.leads_to in ("notice", "growth")
    if (known or act.leads_to == "loss") and not scenario.job.get("durable_every"):
        bounds = [FROM_MEMORY, *bounds]  # a checkpoint may be the newest copy
    # of a growth all boxes of the boundary are in their place
    if known or (act.strike and act.strike.on == "growth"):
        bounds = [NONE_LOST, *bounds]
    elif act.leads_to == "loss":
        figures["steps_before_acknowledged_copy"] = before_acknowledged(move, lines)
        bounds = [KEPT, *bounds]
    said: list[str] = []
    if find := FINDINGS.get(act.kind or act.leads_to):
        said += find(scenario, lines)
        figures["wrongly_found"] = len(said)
        bounds.append(FOUND)
    if act.kind == "add":
        unmeasured = _not_measured(lines)
        said += unmeasured
        figures["not_measured"] = len(unmeasured)
        bounds.append(MEASURED)
    check = judge(act.name, figures, bounds)
    return replace(check, why="; ".join([*said, check.why])) if said else check


def _pause(act: Act) -> Bound:
    if act.pause_most_s is None:
        return FASTER
    return Bound(
        "pause_s",
        "finding it out takes its time, and nothing may wait for the group's timeout of 60 s",
        most=act.pause_most_s,
    )


def _driver(act: Act, played: Played, worst: float) -> Check:
    """The next driver found the same processes, before anything was done to a node."""
    drilled = [i for i, line in enumerate(played.lines) if events([line], DrillAsked)]
    again = survivors(played.lines[: min(drilled, default=None)], set())
    figures = {
        "workers_started_again": again.figures["workers_started_again"], "away_s": played.away_s,
        "steps": max(kept(played.lines), default=0), "worst_loss_difference": worst,
    }  # fmt: skip
    return judge(act.name, figures, [NOT_STARTED, LOSS])


# ------------------------------------------------------------------------------ what was found out


def _asked(lines: Sequence[Line], *kinds: str) -> set[str]:
    """Nodes that a drill was carried out on."""
    drills = [event.drill for event in events(lines, DrillAsked)]
    return {node for drill in drills for kind in kinds for node in drill.get(kind, ())}


def _named(what: str, asked: set[str], found: set[str]) -> list[str]:
    said = [f"{node} {what}, and nobody found out" for node in sorted(asked - found)]
    return said + [f"{node} was blamed for nothing" for node in sorted(found - asked)]


def _hung(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """Its process does not answer."""
    silent = {event.worker.node_id for event in events(lines, Silent) if STALLED not in event.why}
    return _named("was stopped", _asked(lines, "hang"), silent)


def _stalled(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """Its process answers, and the others wait for it in a collective that is told."""
    silent = [event for event in events(lines, Silent) if STALLED in event.why]
    killed = {
        worker for action in actions(lines) if isinstance(action, Abort) for worker in action.kill
    }
    said = [f"{event.worker} was not killed" for event in silent if event.worker not in killed]
    named = {event.worker.node_id for event in silent}
    return said + _named("stalled", _asked(lines, "stall"), named)


def _corrupt(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """At the next comparison after it; a generation that is left at the step of one makes none."""
    found, every = events(lines, WrongNumbers), scenario.job["check_numbers_every"]
    left = {event.step for event in events(lines, Quiesced)}
    said = [
        f"found at step {event.step}, good was step {event.good_step}"
        for event in found
        if not event.good_step < event.step
        or {*range(event.good_step + every, event.step, every)} - left
    ]
    named = {worker.node_id for event in found for worker in event.workers}
    return said + _named("corrupted its results", _asked(lines, "corrupt"), named)


def _failed_device(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    asked = _asked(lines, "device_error")
    failed = {e.worker.node_id for e in events(lines, WorkerFailed) if e.kind == "device"}
    aside = {
        action.node_id
        for action in actions(lines)
        if isinstance(action, Quarantine) and "uncorrectable ECC error" in action.reason
    }
    return _named("has a GPU that failed", asked, failed) + _named(
        "must be quarantined", asked, aside
    )


def _cut_off(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """What it still does counts for nothing: no step of an older generation comes after the first
    of a newer one; and it takes part again afterwards."""
    asked = _asked(lines, "partition")
    done = [event.generation for event in events(lines, StepDone)]
    said = ["a step of a generation that was over was counted"] if done != sorted(done) else []
    having = [bool(asked & set(plan.nodes)) for plan in plans(lines)]
    if not (len(having) > 2 and having[0] and not having[1] and having[-1]):
        said.append(f"the plans that have {', '.join(asked)}: {having}")
    return said


def _no_room(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    moves = account(lines).transitions
    first, then = moves[0], next(move for move in moves if move.cause == "infeasible")
    said = [] if then.to_layout != first.to_layout else [f"{then.to_layout} was entered again"]
    if not any("does not fit" in text and "GiB measured" in text for text in _reasons(lines)):
        said.append("nobody said how much memory was measured")
    return said


def _refused(scenario: Scenario, lines: Sequence[Line]) -> list[str]:
    """No step of the wrong layout counts, none is lost, and the probe's losses are equal since."""
    failed = [event for event in events(lines, WorkerFailed) if event.kind == "layout"]
    refused = {event.generation for event in failed}
    rows = {move.generation: move for move in account(lines).transitions}
    right = next(move for move in rows.values() if move.cause == "rollback" and move.loss_equal)
    said = [] if refused else ["nobody found out"]
    said += [f"generation {n} counts as right" for n in refused if rows[n].loss_equal]
    if right.steps_lost or {event.step for event in failed} != {right.at_step}:
        said.append(f"the run continued from step {right.at_step}, {right.steps_lost} were lost")
    probed = [event for event in events(lines, Probed) if event.expected is not None]
    if not probed or not all(agree(e.loss, e.expected or 0.0, PROBE) for e in probed):
        said.append("a probe sample's loss is another one")
    if not any("no layout with pp any more" in text for text in _reasons(lines)):
        said.append("the layout's axis was not closed")
    return said


def _reasons(lines: Sequence[Line]) -> list[str]:
    return [line.decision.reason for line in lines if line.decision]


FINDINGS: dict[str, Callable[[Scenario, Sequence[Line]], list[str]]] = {
    "hang": _hung, "stall": _stalled, "corrupt": _corrupt, "device_error": _failed_device,
    "partition": _cut_off, "infeasible": _no_room, "wrong_layout": _refused,
}  # fmt: skip


def _not_measured(lines: Sequence[Line]) -> list[str]:
    """Nodes whose workers were not looked at beside what they do anyway, or that joined a running
    generation without a look at their link."""
    said: list[str] = []
    nodes: set[str] = set()  # of the plans so far
    for line in lines:
        for event in (one for _, one in line.events if isinstance(one, NodePrepared)):
            found = event.admission
            if found is None or found.flop_per_s <= 0 or found.host_bytes <= 0:
                said.append(f"{event.node_id} was not measured")
            elif nodes and (
                found.link_bytes_per_s <= 0 or found.neighbor not in nodes - {event.node_id}
            ):
                said.append(f"the link of {event.node_id} was not measured")
        nodes |= {node for plan in plans([line]) for node in plan.nodes}
    return said
