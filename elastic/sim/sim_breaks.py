"""Simulated breaks: processes, devices and whole groups that fail, what each worker has seen of the
step that was under way, and what the survivors report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic.sim.functions import Functions
from elastic.sim.scripted_faults import Delays, Moment
from elastic.sim.sim_nodes import SimMachines
from elastic.types import (
    Abort,
    Holding,
    Job,
    Plan,
    Pool,
    Quiesced,
    RollForward,
    Silent,
    StepDone,
    WorkerFailed,
    WorkerId,
    holdings,
)
from elastic.types.rank_timing import RankTimes


@dataclass
class SimGeneration:
    """One generation as it really is."""

    plan: Plan
    step: int = 0
    entered: bool = False
    ended: bool = False
    leave_for: Plan | None = None
    set_up_s: float = 0.0  # of its process groups, in the pause
    quiesce: bool = False
    save: bool = False
    step_s: float = 0.0  # of the step under way
    batch: int = 1  # steps that are looked at as one, begun at `began_s`
    began_s: float = 0.0
    turn: int = 0  # of its batches; one that was cut short does not end twice
    # of its ranks, in multiples of the nominal time
    units: list[float] = field(default_factory=list)
    # from the step after this one on
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    times: RankTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = RankTimes(self.plan.generation)

    @property
    def members(self) -> frozenset[WorkerId]:
        plan = self.plan
        return plan.workers | plan.senders if plan.senders else plan.workers

    @property
    def needed(self) -> frozenset[WorkerId]:
        """Who only sends has left when it is entered."""
        return self.plan.workers if self.entered else self.members


class Breaks(SimMachines):
    """Generations that break. `violations`: orders that the contract forbids, as found."""

    def __init__(self, pools: tuple[Pool, ...], job: Job, delays: Delays) -> None:
        super().__init__(pools, job, delays)
        self.functions = Functions(job)
        self.violations: list[str] = []
        self._groups: dict[int, SimGeneration] = {}
        # whose process groups are made ahead; `entered`: they are there
        self._forming: SimGeneration | None = None
        self._commits: dict[WorkerId, tuple[float, ...]] = {}
        self._without_device: set[WorkerId] = set()
        self._told_broken: set[WorkerId] = set()  # of these, those that the policy knows of
        self._pending: dict[WorkerId, tuple[int, int]] = {}  # generation, step

    def _running(self) -> list[SimGeneration]:
        return [group for group in self._groups.values() if group.entered and not group.ended]

    def _kill(self, workers: set[WorkerId], moment: Moment = "inside") -> None:
        """Processes end: what they hold is gone, and their groups break."""
        super()._kill(workers)
        for worker in workers:
            self._commits.pop(worker, None)
            self._pending.pop(worker, None)
        for group in self._groups.values():
            if not group.ended and not group.needed.isdisjoint(workers):
                self._break(group, moment)

    def _lose_device(self, worker: WorkerId, moment: Moment) -> None:
        """Its process lives on: the copies that it keeps in host memory are there, its live state
        and its gradients are not."""
        running = [group for group in self._running() if worker in group.plan.ranks]
        step = max((group.step + 1 for group in running), default=0)
        generation = max((group.plan.generation for group in running), default=0)
        self._without_device.add(worker)
        for group in self._groups.values():
            if not group.ended and worker in group.needed:
                self._break(group, moment)
        self._held[worker] = tuple(h for h in self._held.get(worker, ()) if h.kind == "peer")
        self._commits.pop(worker, None)
        self._pending.pop(worker, None)
        self._tell_broken(worker, generation, step)

    def _come_back(self, node_id: str) -> None:
        """On another machine."""
        super()._come_back(node_id)
        self._without_device = {
            worker for worker in self._without_device if worker.node_id != node_id
        }
        self._told_broken = {worker for worker in self._told_broken if worker.node_id != node_id}

    def _tell_broken(self, worker: WorkerId, generation: int, step: int) -> None:
        """What the process says, if it lives so long; another one on that GPU says so when it is to
        use it."""
        error = "CUDA error: uncorrectable ECC error encountered"

        def told() -> None:
            if self._answers(worker):
                self._tell(WorkerFailed(worker, generation, "device", error, 0, step))

        self._after(self.delays.detect_s, told)

    def _break(self, group: SimGeneration, moment: Moment = "inside") -> None:
        group.ended = True
        plan = group.plan
        out = self._mute(plan.workers, plan.nodes_taking_part) | self._without_device
        survivors = {w: rank for rank, w in enumerate(plan.ranks) if w not in out}
        self._leave(group, survivors, moment)
        if survivors:
            heard = min(survivors, key=lambda worker: self._cut_s([worker]))
            error = "connection reset by peer"
            self._tell(
                WorkerFailed(heard, group.plan.generation, "collective", error),
                self.delays.detect_s,
            )

    def _leave(self, group: SimGeneration, survivors: dict[WorkerId, int], moment: Moment) -> None:
        """What those (worker -> rank) have seen of the step that was under way."""
        if group.entered and group.step < self.job.steps and moment != "inside":
            for k, (worker, rank) in enumerate(survivors.items()):
                if moment == "torn" and k % 2 == 0:
                    self._advance(group, (rank,), group.step + 1)
                else:
                    self._pending[worker] = (group.plan.generation, group.step + 1)

    def _advance(self, group: SimGeneration, ranks: Sequence[int], step: int) -> None:
        """Each of these has its boxes of it."""
        plan, generation, held = group.plan, group.plan.generation, self._held
        commit = float(generation), float(step)
        workers = [plan.ranks[rank] for rank in ranks]
        live = holdings(workers, generation, ranks, step=step, kind="live")
        for worker, holding in zip(workers, live, strict=True):
            kept = [
                h for h in held.get(worker, ()) if h.kind == "peer" or h.generation != generation
            ]
            held[worker] = (holding, *kept)
            self._commits[worker] = commit
            self._pending.pop(worker, None)

    def _unanswered(self, group: SimGeneration, why: str = "") -> None:
        """Somebody in the group no longer answers: the others wait until he is found silent."""
        group.ended = True
        for worker in sorted(group.needed):
            if self._lives(worker) and not self._answers(worker):
                silent = Silent(
                    worker, group.plan.generation, "stepping", self.delays.silent_s, why
                )
                self._tell(silent, self.delays.silent_s)

    # ------------------------------------------------------------------------------------ survivors

    def _abort(self, action: Abort) -> None:
        self._forming = None
        if action.kill:
            self._kill(set(action.kill))
            for worker in action.kill:
                self._machines[worker.node_id].hung = False
        members: set[WorkerId] = set()
        for group in [g for n, g in self._groups.items() if n <= action.generation]:
            recent = group.plan.generation >= action.generation - 1 or not group.ended
            members |= group.members if recent else set()
            group.ended = True
        nodes = {worker.node_id for worker in members}
        answering = sorted(members - self._mute(members, nodes))
        for heard_s, same in self._by_hearing(answering).items():
            self._after(heard_s, lambda same=same: self._answer(same, action.generation))  # type: ignore[misc]

    def _by_hearing(self, workers: Sequence[WorkerId]) -> dict[float, list[WorkerId]]:
        """In how many seconds an order reaches them and is obeyed -> those of whom that is so: of
        an undisturbed network all."""
        if not self._cut_once:
            return {self.delays.quiesce_s: list(workers)} if workers else {}
        found: dict[float, list[WorkerId]] = {}
        for worker in workers:
            heard_s = self._cut_s([worker]) + self.delays.quiesce_s
            found.setdefault(heard_s, []).append(worker)
        return found

    def _answer(self, workers: Iterable[WorkerId], generation: int) -> None:
        held, asked = self._held, frozenset(workers)
        mute = self._mute(asked, {worker.node_id for worker in asked})
        for worker in workers:
            if worker not in mute:
                self._untold(held.get(worker, ()))
                self._tell(self._report(worker, generation, held))

    def _report(
        self, worker: WorkerId, generation: int, held: Mapping[WorkerId, tuple[Holding, ...]]
    ) -> Quiesced:
        mine, step = held.get(worker, ()), 0
        for holding in mine:
            if holding.kind == "live" and holding.step > step:
                step = holding.step
        pending_step = self._pending.get(worker, (0, -1))[1]
        return Quiesced(worker, generation, step, mine, self._commits.get(worker, ()), pending_step)

    def _untold(self, held: Iterable[Holding]) -> None:
        """The report of a step that nobody has given yet: its commit was seen by this worker."""
        for holding in held:
            if holding.kind != "live":
                continue
            group = self._groups[holding.generation]
            if group.ended and holding.step == group.step + 1:
                group.step += 1
                loss = self.functions.step(group.plan, group.step)
                self._tell(
                    StepDone(
                        holding.generation,
                        group.step,
                        loss,
                        1000,
                        0.0,
                        0.0,
                        0.0,
                        1.0,
                        f"sample-{group.step}",
                    )
                )

    def _roll_forward(self, action: RollForward) -> None:
        group = self._groups[action.generation]
        seen = {self._commits[w] for w in group.plan.ranks if w in self._commits and self._lives(w)}
        if action.commit not in seen or action.commit != (
            float(action.generation),
            float(action.step),
        ):
            self.violations.append(
                f"step {action.step} of generation {action.generation}: nobody has seen "
                f"{action.commit}"
            )

        order = (action.generation, action.step)
        rank_of = {worker: rank for rank, worker in enumerate(group.plan.ranks)}

        def applied(workers: Iterable[WorkerId]) -> None:
            waiting = [w for w in workers if self._pending.get(w) == order and self._answers(w)]
            self._advance(group, [rank_of[worker] for worker in waiting], action.step)
            self._answer(workers, action.generation)

        for heard_s, same in self._by_hearing(group.plan.ranks).items():
            self._after(heard_s, lambda same=same: applied(same))  # type: ignore[misc]
