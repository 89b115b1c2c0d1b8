"""Where the time of traced steps went: events of torch.profiler in, seconds of each part out. No
torch, so that it can be tested on traces that are made up.

A moment of a rank belongs to exactly one part. On a GPU it is what its streams do: computation
first, then the collectives that nothing hides, by axis, then what the host says it waits for (data,
copies, the commit, which goes over the host). On a CPU it is what the training thread does, by the
innermost event: in an operation it computes, in a collective it waits for that axis. What is left
is idle: Python, and waits that nobody has named.

A wait between pipeline stages is both the transfer and, mostly, the bubble. The shortest of a
rank's waits is taken for what a transfer takes; what the others are longer is the bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastic.worker.process_groups.axis_ranges import PREFIX, STAGE, STEP

Event = Mapping[str, Any]
Interval = tuple[float, float]

AXES = ("fsdp", "dp_replicate", "tp", "cp", "ep", "pp", "commit")
COMPUTE, OPTIMIZER, DATA, COPIES, BUBBLE, IDLE = (
    "compute", "optimizer", "data", "copies", "bubble", "idle",
)  # fmt: skip
ONE_WAIT_US = 50.0  # a shorter interruption of a wait is the code that waits
OTHERS = "other ranks"  # a collective of no axis that is known
PARTS = (COMPUTE, OPTIMIZER, *AXES, OTHERS, BUBBLE, DATA, COPIES, IDLE)
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# what FSDP2 calls its ranges in which it gathers, sums up, or waits for that
FSDP = "FSDP::"
FSDP_WAITS = (
    "FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::post_backward_rs_wait",
    "FSDP::root_post_backward_callback",
)  # fmt: skip
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
FUNCTIONAL = ("_c10d_functional::", "c10d_functional::")  # as DTensor calls them


@dataclass(frozen=True)
class Segment:
    """Microseconds of the trace's clock."""

    begin: float
    end: float
    part: str

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class TraceParts:
    """Of one rank. `parts`: seconds of a step, a mean over the steps; they sum to `step_s`.
    `collectives`: seconds of a step in collectives of each axis, also those that computation
    hides; on a CPU none is hidden."""

    steps: tuple[int, ...]
    step_s: float
    parts: Mapping[str, float]
    collectives: Mapping[str, float]
    segments: tuple[Segment, ...]
    on_device: bool


def parts_of(
    events: Sequence[Event], groups: Mapping[str, str] | None = None, otherwise: str = OTHERS
) -> TraceParts:
    """`groups`: name of a process group -> its axis. `otherwise`: the axis of collectives that say
    nothing of theirs. Raises ValueError where no whole step is in the trace."""
    whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sorted(
        (event for event in whole if str(event["name"]).startswith(f"{PREFIX}{STEP} ")
         and event.get("cat") == "user_annotation"),
        key=lambda event: float(event["ts"]),
    )  # fmt: skip
    if not steps:
        raise ValueError("no whole step is in the trace")
    spans = [_interval(step) for step in steps]
    thread = (steps[0]["pid"], steps[0]["tid"])
    host = _on_thread([e for e in whole if (e.get("pid"), e.get("tid")) == thread], otherwise)
    on_device = any(event.get("cat") in ON_DEVICE for event in whole)
    if on_device:
        layers, gathered = _device_layers(whole, groups or {}, otherwise)
        named = {DATA, COPIES, "commit"}
        waits = [(part, [s for s in host if s.part == part]) for part in named]
        layers += [(part, [(s.begin, s.end) for s in found]) for part, found in sorted(waits)]
    else:
        names = sorted({s.part for s in host} - {IDLE})
        layers = [(name, [(s.begin, s.end) for s in host if s.part == name]) for name in names]
        gathered = {name: found for name, found in layers if name in (*AXES, OTHERS)}
    segments = _with_bubble(_stacked(layers, spans))
    n = len(steps)
    parts = dict.fromkeys(PARTS, 0.0)
    for segment in segments:
        parts[segment.part] += segment.length / 1e6 / n
    return TraceParts(
        tuple(int(str(step["name"]).rpartition(" ")[2]) for step in steps),
        sum(end - begin for begin, end in spans) / 1e6 / n,
        {name: seconds for name, seconds in parts.items() if seconds > 0},
        {a: length(common(union(found), spans)) / 1e6 / n for a, found in gathered.items()},
        tuple(segments),
        on_device,
    )


# ---------------------------------------------------------------------------------------- intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Where both are; each disjoint and in order."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Where the first is and the second is not; each disjoint and in order."""
    if not other:
        return list(one)
    edges = [(float("-inf"), other[0][0])]
    edges += [(a[1], b[0]) for a, b in pairwise(other)]
    edges.append((other[-1][1], float("inf")))
    return common(one, edges)


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _interval(event: Event) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _stacked(
    layers: Iterable[tuple[str, Iterable[Interval]]], spans: list[Interval]
) -> list[Segment]:
    """Each moment of the steps as the first layer that has it, else as idle; in order."""
    rest, found = union(spans), []
    for part, intervals in layers:
        mine = union(intervals)
        found += [Segment(begin, end, part) for begin, end in common(rest, mine)]
        rest = without(rest, mine)
    found += [Segment(begin, end, IDLE) for begin, end in rest]
    return sorted(found, key=lambda segment: segment.begin)


def _with_bubble(segments: Sequence[Segment]) -> list[Segment]:
    """The waits between stages as a transfer and, before that, a bubble."""
    waits: list[list[Segment]] = []
    for segment in segments:
        if segment.part != "pp":
            continue
        if waits and segment.begin - waits[-1][-1].end <= ONE_WAIT_US:
            waits[-1].append(segment)
        else:
            waits.append([segment])
    transfer = min((sum(s.length for s in wait) for wait in waits), default=0.0)
    found = [segment for segment in segments if segment.part != "pp"]
    for wait in waits:
        rest = transfer  # a wait ends with what it waits for
        for segment in reversed(wait):
            cut = max(segment.begin, segment.end - rest)
            rest -= segment.end - cut
            found += [Segment(segment.begin, cut, BUBBLE), Segment(cut, segment.end, "pp")]
    return sorted((s for s in found if s.length > 0), key=lambda segment: segment.begin)


# ------------------------------------------------------------------------------------------ threads


def _on_thread(events: Sequence[Event], otherwise: str) -> list[Segment]:
    """The training thread's time by its innermost event; its events lie in each other."""
    kept = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    kept.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    found: list[Segment] = []
    open_: list[tuple[float, str]] = []  # end, part
    at = 0.0

    def until(moment: float) -> None:
        nonlocal at
        while open_ and open_[-1][0] <= moment:
            end, part = open_.pop()
            _add(found, Segment(at, end, part))
            at = max(at, end)
        if open_:
            _add(found, Segment(at, moment, open_[-1][1]))
        at = max(at, moment)

    for event in kept:
        begin, end = _interval(event)
        until(begin)
        above = open_[-1][1] if open_ else IDLE
        part = _part(event, above, otherwise)
        # clocks are read one after the other: a part of an event may seem to end behind it
        open_.append((min(end, open_[-1][0]) if open_ else end, part))
    until(float("inf"))
    return found


def _add(found: list[Segment], more: Segment) -> None:
    if more.length <= 0:
        return
    if found and found[-1].part == more.part and found[-1].end == more.begin:
        found[-1] = Segment(found[-1].begin, more.end, more.part)
    else:
        found.append(more)


def _part(event: Event, above: str, otherwise: str) -> str:
    """Of an event's own time; `above`: the part of the event that it lies in."""
    name = str(event["name"])
    if name.startswith(PREFIX):
        word = name[len(PREFIX) :].split(" ")[0]
        return word if word in PARTS else IDLE if word in (STEP, STAGE) else above
    if name.startswith(FSDP_WAITS):
        return "fsdp"
    if name.startswith(FUNCTIONAL):
        return above if above in ("cp", "commit") else "tp"
    if name.startswith(COLLECTIVES):
        if above == "fsdp" and "allreduce" in name:
            return "dp_replicate"
        return above if above in AXES else otherwise
    if event["cat"] == "user_annotation":
        return above
    inside = above in (COMPUTE, OPTIMIZER)
    return above if inside else COMPUTE


# ------------------------------------------------------------------------------------------ devices


def _device_layers(
    events: Sequence[Event], groups: Mapping[str, str], otherwise: str
) -> tuple[list[tuple[str, list[Interval]]], dict[str, list[Interval]]]:
    """What streams do, what counts first, first; and all intervals of collectives by axis."""
    compute: list[Interval] = []
    axes: dict[str, list[Interval]] = {}
    updates: list[Interval] = []
    for event in events:
        name, kind = str(event["name"]), event.get("cat")
        if kind == "gpu_user_annotation" and name == f"{PREFIX}{OPTIMIZER}":
            updates.append(_interval(event))
        if kind not in ON_DEVICE:
            continue
        if "nccl" not in name.lower():
            compute.append(_interval(event))
            continue
        group = str((event.get("args") or {}).get("Process Group Name", ""))
        axes.setdefault(groups.get(group, otherwise), []).append(_interval(event))
    busy, update = union(compute), union(updates)
    layers = [(OPTIMIZER, common(busy, update)), (COMPUTE, without(busy, update))]
    layers += [(axis, axes[axis]) for axis in (*AXES, OTHERS) if axis in axes]
    return layers, axes
