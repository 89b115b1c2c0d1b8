"""Events as sentences for a person. None = not worth a line."""

from __future__ import annotations

from typing import Any, Protocol

from elastic import types
from elastic.text import duration, n_of, size
from elastic.types import Event, Node, Plan

# where a generation takes its state from, in the words of a message
SOURCES: dict[str, str] = {
    "fresh": "what the program starts with",
    "live": "live GPUs",
    "peer": "peer memory",
    "durable": "checkpoint",
}


LONG_S = 1.0  # of a phase of a change that is reported


class NamedThings(Protocol):
    """What a message may speak of: nodes and plans by name, and the time (run_view.View)."""

    nodes: dict[str, Node]
    planned: dict[int, Plan]
    at_s: float


def of(event: Event, view: NamedThings) -> str | None:
    """`view` is as it was before the event."""
    match event:
        case types.StepDone() | types.Decided():  # nearly all that there are
            return None
        case types.DriverStarted():
            return _started(event)
        case types.NodeReady(node):
            return f"node {node.node_id} is ready: pool {node.pool}, {n_of(node.gpus, 'worker')}"
        case types.NodePrepared():
            said = f"{node_name(event.node_id, view)} is prepared: its workers have the program"
            return "; note: ".join((said, *event.notes))
        case types.NodeRefused():
            return f"{node_name(event.node_id, view)} is rejected: {event.reason}"
        case types.Notice():
            return (
                f"notice: {node_name(event.node_id, view)} will be preempted in "
                f"{max(0.0, event.deadline_s - view.at_s):.0f} s"
            )
        case types.NoticeWithdrawn():
            return f"notice withdrawn: {node_name(event.node_id, view)} stays"
        case types.NodeWarned():
            return (
                f"{node_name(event.node_id, view)}: {event.what}; it stays until there is a notice"
            )
        case types.NodeLost():
            return (
                f"{node_name(event.node_id, view)} was "
                f"{'released' if event.cause == 'released' else f'lost: {event.cause}'}"
            )
        case types.RequestFailed():
            return (
                f"pool {event.pool} has no further node: "
                f"{event.reason.removeprefix('no capacity: ')}"
                + (f"; {n_of(event.coming, 'node')} of it still starting" if event.coming else "")
            )
        case types.PlanEntered():
            return _entered(event, view)
        case types.GroupsFormed():
            why = (
                f" were not made ahead: {event.error}"
                if event.error
                else f" made ahead in {event.seconds:.1f} s"
            )
            return f"groups of generation {event.generation}{why}"
        case types.PlanFailed():
            return f"generation {event.generation} cannot run: {event.reason}"
        case types.Evaluated():
            return f"validation at step {event.step}: " + ", ".join(
                f"{k} {v:.4f}" for k, v in event.metrics.items()
            )
        case types.CopyStored(copy) if copy.kind == "durable":
            return f"checkpoint of step {copy.step} ({size(copy.n_bytes)}, {event.seconds:.2f} s)"
        case types.StorageSeen(answers=True):
            return f"storage answers again after {duration(view.at_s - event.since_s)}"
        case types.StorageSeen():
            return (
                f"storage has not answered for {max(0.0, view.at_s - event.since_s):.0f} s "
                f"({event.what}): training continues"
            )
        case types.NodesMute():
            return _mute(event, max(0.0, view.at_s - event.since_s))
        case types.PlansFound(plans):
            numbers = ", ".join(str(plan.generation) for plan in plans)
            return (
                f"generation {numbers} was found with the workers: ordered while storage was away"
            )
        case _:
            return _trouble(event)


def _started(event: types.DriverStarted) -> str:
    again = "driver attached again" if event.attached else "driver started"
    found = (
        f", newest checkpoint at step {max(copy.step for copy in event.durable)}"
        if event.durable
        else ""
    )
    cut = f"; {event.cut}" if event.cut else ""
    return f"{again} (run {event.run}, epoch {event.epoch}){found}{cut}"


def _mute(event: types.NodesMute, lasts_s: float) -> str:
    if event.over:
        return f"{event.over}: no other host had answered the driver's for {duration(lasts_s)}"
    return (
        f"none of the {event.hosts} other hosts has answered for {lasts_s:.0f} s: the driver's own "
        "is cut off, no node counts as lost for that"
    )


def of_model(model: types.ModelProfile) -> list[str]:
    """What a person should know before it trains."""
    return [
        *(f"no {axis} for this model: {why}" for axis, why in model.closed.items()),
        *(f"note: {t}" for t in model.notes),
    ]


def _trouble(event: Event) -> str | None:
    match event:
        case types.GuardTripped():
            return f"guard {event.guard} ({event.do}): {event.reason}"
        case types.CopyFailed(skipped=True):
            return f"no checkpoint of step {event.step}, it is skipped: {event.reason}"
        case types.CopyFailed():
            return (
                f"no checkpoint of step {event.step}: {event.reason}; training continues, the "
                "copies before it stay"
            )
        case types.CopyDamaged():
            return f"a checkpoint cannot be read: {event.reason}"
        case types.CopyRemoved():
            return f"removed {event.uri}"
        case types.WorkerFailed(kind="device"):
            at = f" in step {event.step}" if event.step else ""
            return f"the GPU of worker {event.worker} failed{at}: {first_line(event.error)}"
        case types.WorkerFailed(do="retry"):
            return (
                f"worker {event.worker} failed ({event.kind}), to be tried once more: "
                f"{first_line(event.error)}"
            )
        case types.WorkerFailed():
            return f"worker {event.worker} failed ({event.kind}): {first_line(event.error)}"
        case types.Silent():
            why = f": {event.why}" if event.why else ""
            return (
                f"worker {event.worker} is silent for {event.silent_s:.1f} s ({event.phase}){why}"
            )
        case types.SharesSet():
            return (
                f"samples a step from step {event.from_step + 1} on: "
                f"{', '.join(map(str, event.samples))}"
            )
        case types.WrongNumbers():
            who = ", ".join(map(str, event.workers)) or "faulty rank unknown"
            return (
                f"silent data corruption at step {event.step}, right until step {event.good_step} "
                f"({who}): {event.reason}"
            )
        case types.DeviceNoted():
            return f"GPU of worker {event.worker}: {event.note or 'no findings any more'}"
        case types.PinningFailed():
            return (
                f"worker {event.worker} has no pinned host memory, its copies go through pageable "
                f"memory: {event.reason}"
            )
        case types.DigestChecked(ok=False):
            return f"generation {event.generation}: the content of the state changed on its way"
        case types.ProfileAsked():
            return (
                f"profile {event.profile_id} requested: {n_of(event.steps, 'step')}, ranks "
                f"{event.ranks}"
            )
        case types.RankProfiled():
            said = event.error or f"trace written, {size(event.n_bytes)}"
            return f"profile {event.profile_id}: rank {event.rank}: {said}"
        case types.StopAsked():
            return f"stop requested: {event.reason}"
        case types.DrillAsked():
            return f"drill: {drill(event.drill)}"
        case _:
            return None


def _entered(event: types.PlanEntered, view: NamedThings) -> str:
    plan = view.planned.get(event.generation)
    if plan is None:
        return f"generation {event.generation} entered at step {event.step}"
    moved = f", {size(event.bytes_moved)} moved" if event.bytes_moved else ""
    named = f", phase {plan.phase + 1}" if plan.phase else ""
    took = [f"{name} {s:.1f} s" for name, s in event.phases_s.items() if s >= LONG_S]
    long = f" (it took: {', '.join(took)})" if took else ""
    return (
        f"generation {event.generation} started at step {event.step}: {plan.layout} on "
        f"{n_of(len(plan.ranks), 'worker')}, source: {SOURCES[plan.resume.source]}{moved}"
        f"{named}{long}"
    )


def drill(entry: dict[str, Any]) -> str:
    """`{'at_step': 9, 'kill': 'a'}` -> `kill a (at step 9)`."""
    words = []
    for key, value in entry.items():
        if key not in ("at_step", "deadline_s", "error"):
            words.append(key)
            words += [", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
    what = " ".join(words)
    failed = f": not carried out: {entry['error']}" if entry.get("error") else ""
    when = f" (at step {entry['at_step']})" if entry.get("at_step") is not None else ""
    return what.replace(" True", "") + when + failed


def node_name(node_id: str, view: NamedThings) -> str:
    node = view.nodes.get(node_id)
    return f"node {node_id}" + (f" ({node.pool})" if node else "")


def first_line(text: str) -> str:
    """The last line of a traceback, else the first one; at most 160 characters."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or [""]
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line.strip()[:160]
