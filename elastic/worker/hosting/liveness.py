"""Which worker does not answer any more. Fed with the calls that were made and the answers that
came; no Ray, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest

from elastic.types import Event, FailureKind, Job, Plan, Silent, WorkerFailed, WorkerId
from elastic.worker.hosting.absent_ranks import RankSite, absent_ranks, unlike_collectives
from elastic.worker.process.beat import Beat
from elastic.worker.process.call_log import PartCalls, difference, unshared
from elastic.worker.process.doing import PATIENT, WAITING

STEPPING_LEAST_S, STEP_TIMES = 1.0, 5.0
# of the machine's lateness, half of which is forgotten in this time
LATE_TIMES, LATE_HALF_S = 4.0, 15.0
LATE_S = 0.25
SLOW_KEPT = 0.9  # of the slowest step's time, with each step that follows
STUCK_LEAST_S, STUCK_TIMES = 30.0, 3.0  # all answer and none makes progress
# all answer, and all but some wait for those; programs do stall for some seconds at times
MISSING_LEAST_S = 10.0
PATIENT_LEAST_S = 60.0  # the same where those wait for their batch, compile, or store a copy
COMPILING_S = 300.0  # the same where blocks are compiled, anew for shares of another size
# the same within one batch of a validation set: the program may make whole texts of it
EVALUATING_STUCK_S = 600.0
TIMEOUT_LEAST_S, TIMEOUT_STEPS = 60.0, 20.0  # of a generation's groups: the last resort
# supervising: a script that is restarted, whose supervisor answers whatever that does
BOUNDS_S = {"idle": 10.0, "starting": 120.0, "supervising": 10.0}
# of that bound: a process that is started anew has twice as long as the one before it, at most
STARTING_TIMES_MOST = 4
OTHER_BOUND_S = 60.0  # preparing, building, loading, compiling, evaluating, saving ...
GAP_MOST_S = 0.5  # a longer pause between two looks was the driver's own,
OWN_LATE_MOST_S = 2.0  # and what is more, up to this, tells how late this machine is
# in other phases a worker's own work, such as an import, may hold up its answer
PROMPT = ("idle", "stepping")


@dataclass
class _Seen:
    generation: int = 0
    phase: str = "starting"
    progress: int = -1
    waited_s: float = 0.0  # since the call that is not answered yet was made; 0 = none is open
    may_wait_s: float = 0.0  # that call
    open: bool = False
    still_s: float = 0.0  # since its progress changed
    quiet_s: float = 0.0  # the same, or since it began a collective
    at: RankSite = RankSite()
    calls: tuple[PartCalls, ...] = ()
    told: bool = False
    times: int = 1  # of its bound, as it starts


def patience_s(job: Job) -> float:
    """How long ranks wait at least for one that does not come: a script that has the loop may do on
    one rank what takes its time, and compiled code is made anew for other shares."""
    return COMPILING_S if job.compile else PATIENT_LEAST_S if job.script else 0.0


@dataclass
class Liveness:
    """`wait_s`: how long a call may take anyway, where `called` says nothing else. `most_s`: the
    job's upper bound on every bound (None = none); where it is given, ranks wait just so long for
    one that does not come. `patience_s`: what they wait at least, where a rank may do by itself
    what takes its time.

    A machine under load is late without any worker being silent. Its lateness is the worst lately
    of the answers of workers that should answer at once and of the driver's own looks, so that the
    bound is wider before a worker passes it.
    """

    wait_s: float
    most_s: float | None = None
    patience_s: float = 0.0
    step_time_s: dict[int, float] = field(default_factory=dict)  # generation -> newest
    # generation -> of the slowest lately
    _slow_step_s: dict[int, float] = field(default_factory=dict)
    # that others waited for, in that generation
    _named: set[tuple[int, WorkerId]] = field(default_factory=set)
    _aborted: set[int] = field(default_factory=set)  # generations that were stuck
    _workers: dict[WorkerId, _Seen] = field(default_factory=dict)
    _looked_at_s: float | None = None
    _late_s: float = 0.0  # the machine's lateness
    # how many processes of it, in a row, were silent as they started
    _unstarted: dict[WorkerId, int] = field(default_factory=dict)

    def called(self, worker: WorkerId, may_wait_s: float | None = None) -> None:
        """A call to the worker is open now. `may_wait_s`: in place of `wait_s`."""
        times = min(STARTING_TIMES_MOST, 2 ** self._unstarted.get(worker, 0))
        seen = self._workers.setdefault(worker, _Seen(times=times))
        if not seen.open:
            seen.open, seen.waited_s = True, 0.0
            seen.may_wait_s = self.wait_s if may_wait_s is None else may_wait_s

    def answered(self, worker: WorkerId, beat: Beat) -> None:
        seen = self._workers.setdefault(worker, _Seen())
        self._unstarted.pop(worker, None)
        if seen.open and not seen.told and seen.phase in PROMPT and beat.phase in PROMPT:
            self._late_s = max(self._late_s, seen.waited_s - seen.may_wait_s)
        before, now = ((x.generation, x.phase, x.progress) for x in (seen, beat))
        moved = before != now
        if moved or beat.phase == "idle":
            seen.still_s = 0.0
        if moved or beat.phase == "idle" or beat.arrived != seen.at.arrived:
            seen.quiet_s = 0.0
        seen.at = RankSite(beat.arrived, beat.doing, beat.where, beat.collective)
        seen.calls = beat.calls
        seen.generation, seen.phase, seen.progress = now
        seen.open, seen.waited_s, seen.told = False, 0.0, False

    def stepped(self, generation: int, step_time_s: float) -> None:
        """A step of the generation is done."""
        self.step_time_s[generation] = step_time_s
        self._slow_step_s[generation] = max(
            step_time_s, SLOW_KEPT * self._slow_step_s.get(generation, 0.0)
        )

    def late(self) -> list[WorkerId]:
        """Workers whose answer should have come by now: no silence yet, but reason to look at their
        nodes."""
        return [
            worker
            for worker, seen in self._workers.items()
            if seen.open and seen.waited_s > seen.may_wait_s + LATE_S
        ]

    def is_silent(self, worker: WorkerId) -> bool:
        """It was reported and has not answered since."""
        seen = self._workers.get(worker)
        return seen is not None and seen.told

    def forget(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)

    def bound_s(self, phase: str, generation: int) -> float:
        """How long a worker may be silent in this phase."""
        bound_s = BOUNDS_S.get(phase, OTHER_BOUND_S)
        if phase == "stepping":
            step_s = self.step_time_s.get(generation, OTHER_BOUND_S / STEP_TIMES)
            bound_s = max(STEPPING_LEAST_S, STEP_TIMES * step_s, LATE_TIMES * self._late_s)
        return min(bound_s, self.most_s) if self.most_s is not None else bound_s

    def look(self, now_s: float) -> list[Silent]:
        """Workers whose bound is passed while no peer of their generation makes progress; each once
        per silence."""
        gap_s = 0.0 if self._looked_at_s is None else max(0.0, now_s - self._looked_at_s)
        passed_s = min(GAP_MOST_S, gap_s)
        self._looked_at_s = now_s
        own_late_s = min(OWN_LATE_MOST_S, gap_s - passed_s)
        self._late_s = max(own_late_s, self._late_s * 0.5 ** (passed_s / LATE_HALF_S))
        for seen in self._workers.values():
            seen.waited_s += passed_s if seen.open else 0.0
            seen.still_s += passed_s
            seen.quiet_s += passed_s
        overdue = [(worker, seen) for worker, seen in self._workers.items() if self._overdue(seen)]
        moving = self._moved_last() if overdue else {}
        return [
            Silent(worker, seen.generation, seen.phase, round(seen.waited_s, 2))
            for worker, seen in overdue
            if not self._peer_moves(seen, moving.get(seen.generation, ()))
            and self._tell(worker, seen)
        ]

    def _overdue(self, seen: _Seen) -> bool:
        times = seen.times if seen.phase == "starting" else 1
        most_s = seen.may_wait_s + times * self.bound_s(seen.phase, seen.generation)
        return seen.open and seen.waited_s > most_s

    def _moved_last(self) -> dict[int, list[_Seen]]:
        """Of each generation the two that got on last: one of them is a peer of whoever is asked
        about."""
        by_generation: dict[int, list[_Seen]] = {}
        for seen in self._workers.values():
            if seen.generation and seen.phase != "idle":
                by_generation.setdefault(seen.generation, []).append(seen)
        each = by_generation.items()
        return {n: nsmallest(2, found, key=lambda seen: seen.still_s) for n, found in each}

    def _peer_moves(self, seen: _Seen, moved_last: Iterable[_Seen]) -> bool:
        bound_s = self.bound_s(seen.phase, seen.generation)
        return any(peer.still_s < bound_s for peer in moved_last if peer is not seen)

    def _tell(self, worker: WorkerId, seen: _Seen) -> bool:
        first, seen.told = not seen.told, True
        if first and seen.phase == "starting":
            self._unstarted[worker] = self._unstarted.get(worker, 0) + 1
        return first

    def stalled(self, plan: Plan) -> list[Event]:
        """All workers answer and none makes progress: the ones that the others wait for are named,
        and a script that has them wait, which ends the run. Where nobody can tell: aborted, so that
        the one that does not obey is found; once."""
        if plan.generation in self._aborted:
            return []
        if unequal := self.unequal_calls(plan) or self.unshared_collective(plan):
            self._aborted.add(plan.generation)
            return [WorkerFailed(plan.ranks[0], plan.generation, "program", unequal)]
        sure, unlike = self.mismatch(plan)
        if unlike:
            self._aborted.add(plan.generation)
            # what looks so may be a network that has lost something
            kind: FailureKind = "mismatch" if sure else "collective"
            return [WorkerFailed(plan.ranks[0], plan.generation, kind, unlike)]
        found = self.absent_ranks(plan)
        if found:
            return [*found]
        still_s = self.stuck_s(plan.generation)
        if not still_s:
            return []
        self._aborted.add(plan.generation)
        text = (
            f"no worker of generation {plan.generation} has made progress for {still_s:.0f} s "
            "although all answer"
        )
        return [WorkerFailed(plan.ranks[0], plan.generation, "collective", text)]

    def stuck_s(self, generation: int) -> float:
        """How long no worker of a stepping or evaluating generation got on although all answer, if
        that is too long; else 0."""
        members = [seen for seen in self._workers.values() if seen.generation == generation]
        if not members or any(
            seen.phase not in ("stepping", "evaluating") or self._overdue(seen) for seen in members
        ):
            return 0.0
        most_s = max(STUCK_LEAST_S, STUCK_TIMES * self.bound_s("stepping", generation))
        if any(seen.phase == "evaluating" or seen.at.doing in PATIENT for seen in members):
            most_s = max(most_s, EVALUATING_STUCK_S)
        if generation in self.step_time_s:  # whoever is waited for is named first, if it can be
            most_s = max(most_s, self.missing_bound_s(generation, False) + STUCK_LEAST_S)
        still_s = min(seen.still_s for seen in members)
        return still_s if still_s > most_s else 0.0

    def absent_ranks(self, plan: Plan) -> list[Silent]:
        """Ranks that all others wait for in a collective: all answer, none makes progress, for too
        long; each once. Not before the generation's first step is done: until then nobody knows how
        long one takes."""
        generation = plan.generation
        seen = {worker: self._workers[worker] for worker in plan.ranks if worker in self._workers}
        steps = all(
            one.generation == generation and one.phase == "stepping" and self._answers_now(one)
            for one in seen.values()
        )
        if len(seen) < len(plan.ranks) or not steps or generation not in self.step_time_s:
            return []
        quiet_s = min(one.quiet_s for one in seen.values())
        if quiet_s <= self._least_s:
            return []
        found = absent_ranks({worker: one.at for worker, one in seen.items()}, plan.layout.pp > 1)
        patient = any(seen[worker].at.doing in PATIENT for worker in found)
        if quiet_s <= self.missing_bound_s(generation, patient):
            return []
        new = [worker for worker in found if (generation, worker) not in self._named]
        self._named.update((generation, worker) for worker in new)
        return [
            Silent(worker, generation, seen[worker].phase, round(quiet_s, 2), found[worker])
            for worker in new
        ]

    def unequal_calls(self, plan: Plan) -> str:
        """Of ranks that stand still: what the script of one calls and those of others do not; '' =
        they may still come to it. What was called stays so, so there is nothing to wait for."""
        seen = [self._workers.get(worker) for worker in plan.ranks]
        if any(one is None or not one.calls or one.generation != plan.generation for one in seen):
            return ""
        return difference({rank: one.calls for rank, one in enumerate(seen) if one is not None})

    def unshared_collective(self, plan: Plan) -> str:
        """Of ranks that all wait in collectives, some in one that their script calls: which ones,
        and in which line; '' = that cannot be told yet. None of them can do without the others."""
        ranks, quiet_s = self._all_waiting(plan)
        alone = {rank: at.where for rank, at in enumerate(ranks) if at.doing == "script"}
        if not 0 < len(alone) < len(ranks) or quiet_s <= self._least_s:
            return ""
        return unshared(alone, len(ranks))

    def mismatch(self, plan: Plan) -> tuple[bool, str]:
        """Of ranks that all wait in collectives: whether these surely do not match, and how; '' =
        they do, as far as can be told. What is not sure gets the time that a rank gets which does
        not come, and in a first step, of which nobody knows how long it takes, that of one
        collective on a slow network; of stages of a pipeline only what is sure counts."""
        ranks, quiet_s = self._all_waiting(plan)
        if not ranks or quiet_s <= self._least_s:
            return False, ""
        sure, text = unlike_collectives(ranks, plan.layout.pp > 1)
        timed = plan.generation in self.step_time_s
        most_s = self._many_steps_s(plan.generation) if timed else max(self._least_s, STUCK_LEAST_S)
        return sure, text if sure or quiet_s > most_s else ""

    def _answers_now(self, seen: _Seen) -> bool:
        """Is its newest answer that of just now?"""
        return not seen.open or seen.waited_s <= seen.may_wait_s + STEPPING_LEAST_S

    @property
    def _least_s(self) -> float:
        return MISSING_LEAST_S if self.most_s is None else self.most_s

    def _all_waiting(self, plan: Plan) -> tuple[list[RankSite], float]:
        """The ranks, if all of them wait in collectives of a step of this generation, and for how
        long none has begun another."""
        seen = [one for worker in plan.ranks if (one := self._workers.get(worker)) is not None]
        ranks = [
            one
            for one in seen
            if (one.generation, one.phase) == (plan.generation, "stepping")
            and one.at.doing in WAITING
            and self._answers_now(one)
        ]
        if len(ranks) < len(plan.ranks):
            return [], 0.0
        return [one.at for one in ranks], min(one.quiet_s for one in ranks)

    def missing_bound_s(self, generation: int, patient: bool) -> float:
        """How long all may stall before the ones that they wait for are named: many times what a
        step takes, so that one that has become slow is not taken for one that does not come."""
        if self.most_s is not None:
            return self.most_s
        patient_s = PATIENT_LEAST_S if patient else 0.0
        return max(self._many_steps_s(generation), self.patience_s, patient_s)

    def _many_steps_s(self, generation: int) -> float:
        step_s = STEP_TIMES * self._slow_step_s.get(generation, 0.0)
        return max(self._least_s, STUCK_TIMES * max(step_s, self.bound_s("stepping", generation)))

    def timeout_s(self, step_s: float) -> float:
        """How long gloo lets a rank wait in a collective. It ends the generation for all without
        saying who was missing, so it comes behind what ranks may wait here: a new rank may compile
        for minutes while the others stand in the first commit."""
        allowed_s = self.most_s if self.most_s is not None else self.patience_s
        return max(allowed_s + TIMEOUT_LEAST_S, TIMEOUT_STEPS * step_s)
