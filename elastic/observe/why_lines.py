"""What `elastic why` prints: what changed the run, on one screen; or all that is noted, or a part
of it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.errors import SpecError
from elastic.observe import run_tables
from elastic.observe.diagnosis.verdicts import RunVerdict, percent
from elastic.observe.event_messages import SOURCES
from elastic.observe.reporting.run_seen import RunSeen
from elastic.observe.reporting.savings import against_on_demand
from elastic.observe.run_view import Note, View
from elastic.text import DAY_S, n_of, span
from elastic.types import Decided, PlanEntered, Quarantine, Stop

MOST = 36  # lines about what happened; more are folded, first those of ten minutes, then of an hour
LEAST_SHARE, MOST_PARTS = 0.01, 3  # of the paid time: what else it went to
LONG_S = 3600.0  # a run whose seconds nobody counts
WIDTHS_S = (0.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 2 * 86400.0, 4 * 86400.0, float("inf"))

# word after --kind -> kinds of notes
KINDS: dict[str, tuple[str, ...]] = {
    "plan": ("PlanEntered", "PlanFailed", "PlansFound", "GroupsFormed", "SharesSet"),
    "notice": ("Notice", "NoticeWithdrawn", "NodeWarned"),
    "loss": ("NodeLost", "WorkerFailed", "Silent"),
    "node": ("NodeReady", "NodeRefused", "NodeLost"),
    "capacity": ("RequestFailed",),
    "checkpoint": ("CopyStored", "CopyFailed", "CopySkipped", "CopyDamaged", "CopyRemoved"),
    "decision": ("Decision",),
    "trouble": (
        "GuardTripped", "WrongNumbers", "DigestChecked", "DeviceNoted", "PinningFailed",
        "StorageSeen", "NodesMute", "WorkerFailed", "Silent", "PlanFailed",
    ),
    "driver": ("DriverStarted",),
    "stop": ("StopAsked",),
    "drill": ("DrillAsked",),
    "validation": ("Evaluated",),
}  # fmt: skip
# of what changed the run: these are folded wherever they repeat, the others where there are many
REPEATED = {
    "RequestFailed": "capacity", "NodeRefused": "refused", "CopyFailed": "copy",
    "StorageSeen": "storage", "NodesMute": "network", "WorkerFailed": "failed",
    "NodeWarned": "warned",
}  # fmt: skip
RARE = {
    "DriverStarted": "driver", "Notice": "notice", "NoticeWithdrawn": "withdrawn",
    "NodeLost": "lost", "Silent": "silent", "PlanFailed": "infeasible", "PlansFound": "found",
    "CopyDamaged": "damaged", "GuardTripped": "guard", "WrongNumbers": "wrong",
    "DigestChecked": "content", "StopAsked": "stop", "DrillAsked": "drill",
}  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """Which notes: about a node, of a kind, between two moments before the newest line (seconds;
    None = all)."""

    node: str = ""
    kind: str = ""
    since_s: float | None = None
    until_s: float | None = None


def notes_of(view: View, wanted: Wanted) -> list[Note]:
    """In order. Raises SpecError for a node or a kind that nobody knows."""
    kinds = _kinds(view, wanted.kind)
    if wanted.node and wanted.node not in view.nodes:
        known = ", ".join(list(view.nodes)[-8:]) or "none"
        raise SpecError(f"--node {wanted.node}: no node of this run; the last ones are {known}")
    first = view.at_s - wanted.since_s if wanted.since_s is not None else float("-inf")
    last = view.at_s - wanted.until_s if wanted.until_s is not None else float("inf")
    return [
        note
        for note in view.notes
        if first <= note.at_s <= last
        and (not kinds or note.kind in kinds)
        and (not wanted.node or _speaks_of(view, note, wanted.node))
    ]


def _kinds(view: View, word: str) -> tuple[str, ...]:
    if not word:
        return ()
    exact = {note.kind for note in view.notes} | {
        kind for kinds in KINDS.values() for kind in kinds
    }
    found = KINDS.get(word.lower()) or ((word,) if word in exact else ())
    if not found:
        raise SpecError(f"--kind {word}: must be one of {', '.join(KINDS)}")
    return found


def _speaks_of(view: View, note: Note, node: str) -> bool:
    if isinstance(note.about, PlanEntered):
        plan = view.planned.get(note.about.generation)
        return plan is not None and node in plan.nodes
    return re.search(rf"(?<![\w-]){re.escape(node)}(?![\w-])", note.text) is not None


# ------------------------------------------------------------------------------------ everything


def when(view: View, at_s: float) -> str:
    """`0:12:05` since the run's start; after two days `3d 04:12`."""
    since_s = max(0.0, at_s - view.started_at_s)
    if since_s < 2 * DAY_S:
        minutes, seconds = divmod(round(since_s), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    minutes = round(since_s % DAY_S) // 60
    return f"{int(since_s // DAY_S)}d {minutes // 60:02d}:{minutes % 60:02d}"


def _seconds(view: View, at_s: float) -> str:
    return f"{at_s - view.started_at_s:.1f} s"


class WhyRow(NamedTuple):
    """A line; `kind` of the note that it tells of says its color, HEAD and REST are none."""

    text: str
    kind: str = ""


HEAD, REST = "head", "rest"


def every(view: View, notes: Iterable[Note]) -> list[WhyRow]:
    """A line for each note; decisions are marked. Times are those of the terminal; of a run of more
    than an hour those of the story."""
    long = view.at_s - view.started_at_s > LONG_S
    return [
        WhyRow(
            f"{when(view, note.at_s) if long else _seconds(view, note.at_s):>10}  "
            f"step {note.step:<5} "
            f"{'=> ' if note.kind == 'Decision' else '   '}{note.text}",
            note.kind,
        )
        for note in notes
    ]


def plain(view: View, notes: Iterable[Note]) -> list[dict[str, Any]]:
    """The same as data: events and decisions in order."""
    return [
        {
            "at_s": round(note.at_s - view.started_at_s, 3),
            "step": note.step,
            "kind": note.kind,
            "text": note.text,
        }
        for note in notes
    ]


# ------------------------------------------------------------------------------- what changed it


class Told(NamedTuple):
    """One line of the story, or several that are folded. `key`: of what may stand together; `kind`:
    of the note; `pause_s` and `lost`: what a new plan cost."""

    at_s: float
    step: int
    key: str
    kind: str
    text: str
    n: int = 1
    last_s: float = 0.0
    pause_s: float = 0.0
    lost: int = 0


def story(view: View, notes: Sequence[Note]) -> list[Told]:
    """At most MOST lines: where there are more, those of a kind that lie near each other become
    one."""
    told = [one for note in notes if (one := _told(view, note)) is not None]
    found = told
    for width_s in WIDTHS_S:
        found = _folded(told, width_s)
        if len(found) <= MOST:
            break
    return [_said(view, one) for one in found]


def _told(view: View, note: Note) -> Told | None:
    key, kind, text = "", note.kind, note.text
    if isinstance(note.about, PlanEntered):
        return _entered(view, note, note.about)
    if isinstance(note.about, Decided):
        actions = note.about.decision.actions
        if any(isinstance(action, Stop) for action in actions):
            key, kind = "end", "StopAsked"
        elif any(isinstance(action, Quarantine) for action in actions):
            key, kind = "quarantine", "Silent"
    elif note.kind == "WorkerFailed" and "(collective)" in text:
        return None  # the echo of another one's end
    elif note.kind != "NodeLost" or "was released" not in text:
        key = REPEATED.get(note.kind) or RARE.get(note.kind, "")
    if not key:
        return None
    pool = re.search(r"pool (\S+)|\((\S+)\)", text)
    where = (
        (pool[1] or pool[2]) if pool and key in ("capacity", "notice", "lost", "refused") else ""
    )
    return Told(note.at_s, note.step, f"{key} {where}".strip(), kind, text, last_s=note.at_s)


def _entered(view: View, note: Note, event: PlanEntered) -> Told:
    plan = view.planned.get(event.generation)
    if plan is None:
        return Told(note.at_s, note.step, "plan", note.kind, note.text, last_s=note.at_s)
    why = view.orders.get(event.generation, "").partition("; generation ")[0]
    pause_s, lost = _cost(view, note, event)
    cost = ([f"paused {span(pause_s)}"] if pause_s >= 0.05 else []) + (
        [f"{n_of(lost, 'step')} again"] if lost else []
    )
    text = (
        f"generation {event.generation} ({plan.cause}): {plan.layout} on "
        f"{n_of(len(plan.ranks), 'worker')}, {SOURCES[plan.resume.source]}"
        f"{', ' if cost else ''}{', '.join(cost)}: {why}"
    )
    return Told(
        note.at_s, event.step, f"plan {plan.cause}", note.kind, text.removesuffix(": "),
        last_s=note.at_s, pause_s=pause_s, lost=lost,
    )  # fmt: skip


def _cost(view: View, note: Note, event: PlanEntered) -> tuple[float, int]:
    """From the last step before to the first one after, less an ordinary one, as the report has it:
    the second, where there is one; and steps undone. A generation that another one overtook before
    its first step has no pause of its own."""
    lost = view.lost.get(event.generation, 0)
    after = bisect_left(view.points, note.at_s, key=lambda point: point.at_s)
    if not 0 < after < len(view.points):
        return 0.0, lost
    before, first = view.points[after - 1], view.points[after]
    second = next(iter(view.points[after + 1 : after + 2]), first)
    ordinary = second if second.generation == first.generation else first
    own = first.generation == event.generation
    pause_s = first.at_s - before.at_s - ordinary.step_time_s if own else 0.0
    return max(0.0, pause_s), lost


def _folded(told: Sequence[Told], width_s: float) -> list[Told]:
    """`width_s` 0: only what repeats between two other things. Else what is alike within so long a
    time."""
    found: list[Told] = []
    places: dict[tuple[float, str], int] = {}
    for one in told:
        if width_s:
            place = (one.at_s // width_s if width_s != float("inf") else 0.0, one.key)
            at = places.setdefault(place, len(found))
        else:
            again = found and found[-1].key == one.key and one.kind in REPEATED
            at = len(found) - 1 if again else len(found)
        if at == len(found):
            found.append(one)
        else:
            first = found[at]
            found[at] = one._replace(
                at_s=first.at_s, step=first.step, n=first.n + 1,
                pause_s=first.pause_s + one.pause_s, lost=first.lost + one.lost,
            )  # fmt: skip
    return found


def _said(view: View, one: Told) -> Told:
    if one.n == 1:
        return one
    text = one.text
    if one.key.startswith("plan "):
        lost = f", {n_of(one.lost, 'step')} again" if one.lost else ""
        cause = one.key.removeprefix("plan ")
        said = f"new plans ({cause}), paused {span(one.pause_s)}{lost} in all; the last: "
        text = said + text.partition("): ")[2]
    return one._replace(text=f"{one.n} times: {text}, last at {when(view, one.last_s)}")


def head(view: View, driven: bool = True) -> str:
    """What has come of it, in one sentence; `driven`: by somebody, if it has not ended."""
    causes = Counter(
        plan.cause for _, event in view.entered if (plan := view.planned.get(event.generation))
    )
    told = ", ".join(f"{n} {cause}" for cause, n in causes.most_common())
    state, since_s = view.state, max(0.0, view.at_s - view.started_at_s)
    usd = f", ${state.usd:,.2f}" if state.usd else ""
    return (
        f"{state.run}: {run_tables.phase(view, driven)} at step {view.progress} after "
        f"{span(since_s)}{usd}; {n_of(len(view.entered), 'plan')} entered"
        + (f" ({told})" if told else "")
    )


def summary(seen: RunSeen, found: Sequence[RunVerdict]) -> list[WhyRow]:
    """What it has cost and saved, and what to change first: `found`, what it is bound by."""
    account, share = seen.account, seen.account.totals.goodput
    paid_s = account.totals.gpu_seconds
    rest = sorted(
        ((gpu_s / paid_s, name) for name, gpu_s in account.gpu_seconds.items() if paid_s),
        reverse=True,
    )
    parts = [
        f"{percent(part)} {name.replace('_', ' ')}"
        for part, name in rest
        if name != "productive" and part >= LEAST_SHARE
    ]
    cost = [f"goodput {percent(share)} of the paid GPU time", *parts[:MOST_PARTS]]
    cost += _saved(seen) if account.totals.usd > 0 else []
    bound = found[0].line if found else "nothing stands out"
    spent = run_tables.spent_early(seen.view)
    change = f"budget_usd: {spent}" if spent else bound
    return [WhyRow(f"cost: {', '.join(cost)}"), WhyRow(f"to change: {change}")]


def _saved(seen: RunSeen) -> list[str]:
    found = against_on_demand(seen.account, seen.history)
    if isinstance(found, str):
        return []
    less = "less" if found.saved_usd >= 0 else "more"
    usd, share = abs(found.saved_usd), percent(abs(found.saved_share))
    return [f"${usd:,.2f} ({share}) {less} than the same training on on-demand nodes"]


def short(
    view: View,
    told: Sequence[Told],
    n_notes: int,
    *,
    driven: bool = True,
    summed: Sequence[WhyRow] = (),
) -> list[WhyRow]:
    """The story as lines; `summed`: behind the first, see `summary`."""
    times = [when(view, one.at_s) for one in told]
    width = max([len(text) for text in times], default=0)
    steps = max([len(str(one.step)) for one in told], default=1)
    rows = [
        WhyRow(f"{at:>{width}}  step {one.step:<{steps}}  {one.text}", one.kind)
        for at, one in zip(times, told)
    ]
    n_left = n_notes - sum(one.n for one in told)
    left = [WhyRow(f"({n_left} more notes and decisions: --all)", REST)] if n_left > 0 else []
    first = [WhyRow(head(view, driven), HEAD), *summed]
    return [*first, *(rows or [WhyRow("nothing has changed it")]), *left]
