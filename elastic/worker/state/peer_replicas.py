"""Peer replicas: each rank's boxes in the host memory of workers in other failure domains, taken
and sent behind the next steps.

A copy is taken at the same step by all ranks. It counts once every rank has seen in a commit that
all parts are stored, their sums compared; until then the copy before it is kept. While one is in
flight no other is started. Whether one starts, counts or is given up follows from commits alone, so
all ranks do the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from elastic.errors import InternalError
from elastic.reshard.rank_boxes import boxes
from elastic.types import Box, Copy, CopyStored, ModelProfile, Plan
from elastic.worker.process.doing import doing
from elastic.worker.state.host_copy import BufferLease, CopyThreads, Flat, HostCopies, HostCopy
from elastic.worker.state.replica_stream import RateLimit, Wire, receive_boxes, send_boxes
from elastic.worker.state.train_state import Held

TIMED_STEPS = 64
TOLD_APART = 8  # steps of either kind that are needed to tell what copying slows
QUIT_MOST_S = 5.0


@dataclass
class _Flight:
    """A copy that is not acknowledged. Its parts: what is sent, and what comes from each rank whose
    boxes are kept here."""

    number: int
    own: HostCopy
    incoming: dict[int, BufferLease]
    began_s: float
    pace: RateLimit
    quit: threading.Event = field(default_factory=threading.Event)
    problems: list[str] = field(default_factory=list)
    left: int = 0  # parts under way
    over: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False  # its last part lets go of the buffers
    stored_s: float = 0.0
    stall_s: float = 0.0
    n_steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        return self.own.step

    @property
    def ended(self) -> bool:
        return self.left == 0

    @property
    def stored(self) -> bool:
        """Is this rank's part stored at both ends?"""
        return self.ended and not self.problems

    def give_up(self) -> None:
        """Its buffers are free again, once no part writes them any more."""
        with self.lock:
            self.given_up, ended = True, self.ended
        if ended:
            self.release()

    def release(self) -> None:
        self.own.release()
        for lease in self.incoming.values():
            lease.release()


@dataclass
class _Steps:
    """Seconds of the newest steps: of those with a copy under way, and of the others."""

    busy_s: list[float] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, busy: bool) -> None:
        kept = self.busy_s if busy else self.calm_s
        kept.append(seconds)
        del kept[:-TIMED_STEPS]

    @property
    def slowdown_s(self) -> float:
        return slowdown(self.busy_s, self.calm_s)


def kept_by(profile: ModelProfile, plan: Plan, rank: int) -> dict[int, tuple[Box, ...]]:
    """The ranks whose copies this rank keeps -> their boxes."""
    senders = [r for r, keepers in enumerate(plan.copies_to) if rank in keepers]
    return {r: boxes(profile, plan.layout, plan.layers, r) for r in senders}


class PeerReplicas:
    """The peer replicas of one generation on one rank. `wire(n)`: messages of the n-th copy; None =
    there is nobody else."""

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        rank: int,
        *,
        host: HostCopies,
        wire: Callable[[int], Wire] | None,
    ) -> None:
        self.plan, self.rank, self.host, self.wire = plan, rank, host, wire
        self.alone = profile.by_owners
        self.to = plan.copies_to[rank] if plan.copies_to else ()
        self.every = plan.peer_every if plan.copies_to else 0
        self.kept = kept_by(profile, plan, rank)
        self._flat = {sender: Flat(theirs) for sender, theirs in self.kept.items()}
        self.flight: _Flight | None = None
        self.acknowledged: list[Held] = []
        self.acknowledged_step = -1
        self.n_started = self.n_given_up = 0
        self._next = 0
        self._hands = CopyThreads(1 + len(self.kept), "peer-copy", host.device) if self.on else None
        self._wall, self._cpu = _Steps(), _Steps()

    @property
    def on(self) -> bool:
        return self.every > 0 and self.wire is not None

    # --------------------------------------------------------------------------- what commits carry

    @property
    def stored(self) -> bool:
        """Is this rank's part of the copy in flight stored?"""
        return self.flight is not None and self.flight.stored

    @property
    def failed(self) -> bool:
        """Is there one that never will be?"""
        return self.flight is not None and self.flight.ended and not self.flight.stored

    @property
    def free(self) -> bool:
        """Could this rank take another copy at the next boundary?"""
        return self.on and self.host.available

    def due(self, step: int, n_free: int) -> bool:
        """The same answer on all ranks. `n_free`: ranks that said that they are free."""
        return (
            self.on
            and self.flight is None
            and step >= self._next
            and n_free == len(self.plan.ranks)
        )

    def set_every(self, step: int, every: int) -> None:
        """Another cadence from this step on."""
        if self.plan.copies_to:
            newest = max(self.acknowledged_step, self.flight.step if self.flight else -1)
            self.every, self._next = (
                every,
                max(step, newest + every) if newest >= 0 else step + every,
            )

    # --------------------------------------------------------------------------------------- a copy

    @doing("copying")
    def start(self, step: int) -> None:
        """Takes the copy of this boundary and sends it, all in the background. Called by all ranks
        at the same step."""
        assert self.wire is not None
        began_s = time.monotonic()
        own = self.host.take(step)
        if own is None:
            raise InternalError(
                f"rank {self.rank} said that it could copy step {step}, and has no free buffer"
            )
        incoming = {
            sender: self.host.memory.lease(theirs.n_bytes) for sender, theirs in self._flat.items()
        }
        if self.n_started < 2:
            self.host.memory.trim()  # what the generation before has left and this one cannot use
        flight = _Flight(
            self.n_started, own, incoming, began_s, RateLimit(self.plan.copy_bytes_per_s)
        )
        self.flight = flight
        self._next, self.n_started = step + self.every, self.n_started + 1
        wire = self.wire(flight.number)
        flight.left = 1 + len(incoming)
        self._begin(flight, lambda: self._send(flight, wire))
        for sender, lease in incoming.items():
            self._begin(flight, partial(receive_boxes, lease.buffer, wire, sender))
        flight.stall_s = time.monotonic() - began_s

    def _begin(self, flight: _Flight, work: Callable[[], str]) -> None:
        def run() -> None:
            try:
                problem = work()
            except (
                RuntimeError,
                ValueError,
            ) as error:  # the group broke: the next collective of this rank says so
                problem = str(error) or type(error).__name__
            with flight.lock:
                if problem:
                    flight.problems.append(problem)
                flight.stored_s = time.monotonic()
                flight.left -= 1
                if flight.ended:
                    flight.over.set()
                last = flight.ended and flight.given_up
            if last:
                flight.release()

        assert self._hands is not None
        self._hands.do(run)

    def _send(self, flight: _Flight, wire: Wire) -> str:
        problem = ""
        try:
            flight.own.wait()
        except InternalError as error:
            problem = str(error)
            flight.quit.set()
        whole = (
            send_boxes(
                flight.own.lease.buffer, wire, self.to, pace=flight.pace, quit_now=flight.quit
            )
            if self.to
            else True
        )
        return problem or ("" if whole else "given up")

    def stalled(self, seconds: float) -> None:
        """A step waited for the copy."""
        if self.flight is not None:
            self.flight.stall_s += seconds

    def stepping(self) -> bool:
        """A step begins; is this rank's part of a copy under way beside it? One that only waits to
        be acknowledged slows nothing."""
        if self.flight is None or self.flight.ended:
            return False
        self.flight.n_steps += 1
        return True

    def timed(self, step_s: float, cpu_s: float, busy: bool) -> None:
        """How long a step took, waiting for data and copies left out, and the processor time of
        this process in it (0 where a GPU computes); `busy`: what `stepping` has said of it."""
        self._wall.add(step_s, busy)
        self._cpu.add(cpu_s, busy)

    # ---------------------------------------------------------------------------------- how it ends

    def heard(self, n_stored: int, n_failed: int) -> CopyStored | None:
        """After a commit: the copy in flight counts when all ranks have stored their parts, and is
        dropped when one cannot."""
        flight = self.flight
        if flight is None:
            return None
        if n_failed:
            self.n_given_up += 1
            self.drop()
            return None
        if n_stored < len(self.plan.ranks):
            return None
        self.acknowledged = self._held(flight)
        self.acknowledged_step, self.flight = flight.step, None
        # where the steps compute on the same cores, what a copy takes of these it takes from them
        slowed_s = flight.n_steps * max(self._wall.slowdown_s, self._cpu.slowdown_s)
        return CopyStored(
            self.copy(flight.step), flight.stored_s - flight.began_s, flight.stall_s, slowed_s
        )

    def _held(self, flight: _Flight, own: bool = True) -> list[Held]:
        """The parts of the copy; without `own` what was received."""
        parts = [(self.rank, flight.own.wait(), flight.own.lease)] if own else []
        for r, lease in flight.incoming.items():
            parts.append((r, self._flat[r].views(lease.buffer), lease))
        of, layout, layers = self.plan.generation, self.plan.layout, self.plan.layers
        return [
            Held(
                of, rank, flight.step, "peer", layout, layers, tensors, lease=lease,
                alone=self.alone,
            )
            for rank, tensors, lease in parts
        ]  # fmt: skip

    @doing("copying")
    def drop(self) -> None:
        """Gives up the copy in flight, at a boundary at which all ranks do; both ends of a stream
        stop after the same chunk."""
        flight, self.flight = self.flight, None
        if flight is None:
            return
        flight.quit.set()
        flight.pace.hurry.set()
        flight.over.wait(QUIT_MOST_S)
        flight.give_up()

    def close(self) -> None:
        if self._hands is not None:
            self._hands.close()

    def unacknowledged(self, own: bool = True) -> list[Held]:
        """The copy in flight, if this rank's part is stored: others may have seen the commit that
        acknowledges it and have dropped the one before. It is handed out once. Without `own`: only
        what was received, which needs no device."""
        flight, self.flight = self.flight, None
        if flight is not None and flight.stored:
            return self._held(flight, own)
        if flight is not None:
            flight.give_up()
        return []

    def copy(self, step: int) -> Copy:
        """The acknowledged copy of `step`; who keeps what of it follows from the plan."""
        plan = self.plan
        n_bytes = sum(box.n_bytes for held in self.acknowledged for box, _ in held.tensors.values())
        return Copy(step, "peer", plan.generation, plan.layout, plan.layers, n_bytes=n_bytes)


def slowdown(busy_s: Sequence[float], calm_s: Sequence[float]) -> float:
    """Seconds by which a step is longer while a copy is in flight: the difference of the medians, 0
    unless it is more than twice its standard error (1.2533 sigma / sqrt(n) for a median of normal
    values, sigma = 1.4826 x the median deviation)."""
    if min(len(busy_s), len(calm_s)) < TOLD_APART:
        return 0.0
    variance = 0.0
    for times in (busy_s, calm_s):
        middle = median(times)
        sigma = 1.4826 * median(abs(t - middle) for t in times)
        variance += (1.2533 * sigma) ** 2 / len(times)
    difference = median(busy_s) - median(calm_s)
    return difference if difference > 2 * variance**0.5 else 0.0
