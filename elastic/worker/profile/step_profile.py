"""A profile of some steps of one rank while it trains: torch.profiler begins before a step and ends
behind one; the trace is written behind the steps that follow."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from elastic.errors import SpecError
from elastic.storage import Storage
from elastic.types import RankProfiled, StartProfile
from elastic.worker.process_groups.axis_ranges import STEP, axis_range, record_ranges
from elastic.worker.profile.trace_parts import OTHERS, TraceParts, parts_of

FOLDER = "profiles"
LANE, LANE_ID = "where the time goes", 1 << 30  # of a trace: its parts, above what they are made of
NO_KERNELS = (
    "no kernel is in it, so CUPTI may not look at this GPU (the driver's option "
    "NVreg_RestrictProfilingToAdminUsers, or another profiler)"
)
_OFF: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class TracedRank:
    """Whom a trace is of. `groups`: name of a process group -> its axis; `otherwise`: the axis of
    collectives that do not say theirs; `refused`: why this rank cannot be traced, '' = it can."""

    rank: int
    worker: str
    at: str  # its coordinates in the layout
    device: torch.device
    groups: Callable[[], Mapping[str, str]] = dict
    otherwise: str = OTHERS
    refused: str = ""


@dataclass(frozen=True)
class ProfileOutlets:
    """Where a profile goes. `background`: runs a function behind the steps; `at_phase`: see
    Workplace."""

    storage: Storage
    report: Callable[[RankProfiled], None]
    background: Callable[..., Any]
    at_phase: Callable[[str, int], None]


class StepProfile:
    """The profiles of one generation on one rank. `ask` and `disturbs` on any thread."""

    def __init__(self, of: TracedRank, outlets: ProfileOutlets) -> None:
        self.of, self.outlets = of, outlets
        self._order: StartProfile | None = None
        self._known: set[str] = set()
        self._traced_steps = (0, -1)  # of any rank: behind the first, up to the last
        self._running: profile | None = None
        self._stop_ranges: Callable[[], None] = lambda: None
        self._begun_at = 0

    def ask(self, order: StartProfile) -> None:
        """Once for each id."""
        if order.profile_id in self._known:
            return
        self._known.add(order.profile_id)
        self._traced_steps = (order.from_step, order.from_step + order.steps)
        if self.of.rank in order.ranks:
            self._order = order

    def disturbs(self, step: int) -> bool:
        """Was the step traced, here or on another rank, or is it the one after that? It then tells
        nothing of how long steps take."""
        first, last = self._traced_steps
        return first < step <= last + 1

    def step(self, step: int) -> AbstractContextManager[None]:
        """The step behind `step` runs in it."""
        if self._order is None or step < self._order.from_step:
            return _OFF
        return self._traced(self._order, step)

    def close(self) -> None:
        """The generation is left: what is not traced to its end is dropped, which is reported."""
        order, running = self._order, self._running
        if running is not None:
            with suppress(RuntimeError):  # of a device that is lost
                self._end(running)
        if order is not None:
            self._failed(order, "its generation was left before the steps were done")

    @contextmanager
    def _traced(self, order: StartProfile, step: int) -> Iterator[None]:
        if self._running is None and not self._begin(order, step):
            yield
            return
        with axis_range(f"{STEP} {step + 1}"):
            yield
        n_done = step + 1 - self._begun_at
        if n_done < order.steps or self._running is None:
            return
        running, self._order = self._running, None
        self.outlets.at_phase("profiling", step + 1)
        self._end(running)
        done = RankProfiled(
            order.generation, order.profile_id, self.of.rank, self._begun_at, n_done
        )
        self.outlets.background(self._write, running, done)

    def _begin(self, order: StartProfile, step: int) -> bool:
        if self.of.refused:
            self._failed(order, self.of.refused)
            return False
        self.outlets.at_phase("profiling", step)
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.of.device.type == "cuda" else []
        running = profile(activities=activities)
        try:
            running.start()
        except RuntimeError as error:  # the program may have a profiler of its own
            self._failed(order, f"torch.profiler does not start: {error}")
            return False
        self._running, self._begun_at = running, step
        self._traced_steps = (order.from_step, max(order.from_step, step) + order.steps)
        self._stop_ranges = record_ranges(self.of.device)
        return True

    def _end(self, running: profile) -> None:
        self._running = None
        self._stop_ranges()
        running.stop()

    def _failed(self, order: StartProfile, why: str) -> None:
        self._order = None
        self.outlets.report(
            RankProfiled(order.generation, order.profile_id, self.of.rank, error=why)
        )

    # ---------------------------------------------------------------------------- behind the steps

    def _write(self, running: profile, done: RankProfiled) -> None:
        """The trace, then what it says, then the word that both are there."""
        try:
            trace = _exported(running)
            found = parts_of(trace["traceEvents"], self.of.groups(), self.of.otherwise)
            if self.of.device.type == "cuda" and not found.on_device:
                raise ValueError(NO_KERNELS)
            trace["traceEvents"] += _lane(trace["traceEvents"], found)
            packed = gzip.compress(json.dumps(trace).encode(), 6)
            place = f"{FOLDER}/{done.profile_id}/rank-{done.rank}"
            self.outlets.storage.put(f"{place}.trace.json.gz", packed)
            self.outlets.storage.put(f"{place}.json", json.dumps(self._said(found, done)).encode())
        except (RuntimeError, OSError, SpecError, ValueError, KeyError, TypeError) as error:
            why = f"its trace could not be written: {type(error).__name__}: {error}"
            self.outlets.report(replace(done, error=why))
        else:
            self.outlets.report(replace(done, n_bytes=len(packed)))

    def _said(self, found: TraceParts, done: RankProfiled) -> dict[str, Any]:
        about = {"rank": done.rank, "worker": self.of.worker, "at": self.of.at}
        return {
            "schema": 1, **about, "generation": done.generation, "steps": found.steps,
            "step_s": found.step_s, "parts": found.parts, "collectives": found.collectives,
            "on_device": found.on_device,
        }  # fmt: skip


def _exported(running: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        running.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text(errors="replace"), strict=False)
        return found


def _lane(events: list[dict[str, Any]], found: TraceParts) -> list[dict[str, Any]]:
    """The parts as a thread of their own, for whoever opens the trace in Perfetto."""
    pid = next(e["pid"] for e in events if str(e.get("name", "")).startswith(f"elastic.{STEP} "))
    lane: dict[str, Any] = {"pid": pid, "tid": LANE_ID}
    names = [
        {"ph": "M", "name": "thread_name", **lane, "args": {"name": LANE}},
        {"ph": "M", "name": "thread_sort_index", **lane, "args": {"sort_index": -1}},
    ]
    return names + [
        {"ph": "X", "cat": "part", "name": s.part, "ts": s.begin, "dur": s.length, **lane}
        for s in found.segments
    ]
