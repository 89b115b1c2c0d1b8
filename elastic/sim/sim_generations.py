"""Simulated generations: who is where in which step, who holds what, and what the survivors of a
break report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from elastic.sim.functions import Functions
from elastic.sim.gpu_speeds import FORWARD, Paces, step_s
from elastic.sim.scripted_faults import Delays, Fault, Moment
from elastic.sim.sim_nodes import SimMachines
from elastic.sim.sim_storage import SimStorage
from elastic.types import (
    Abort,
    Copy,
    CopyDamaged,
    CopyFailed,
    CopyStored,
    CopyVerified,
    DigestChecked,
    DropGroups,
    EnterPlan,
    Event,
    FormGroups,
    GroupsFormed,
    Holding,
    Job,
    Plan,
    PlanEntered,
    Pool,
    Quiesce,
    Quiesced,
    RollForward,
    SetCadence,
    SetShares,
    SharesSet,
    Silent,
    StepDone,
    StoreCopy,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
)  # fmt: skip
from elastic.types.grid import axes_of, replica_key
from elastic.types.rank_timing import RankTimes

AHEAD = 2  # steps that ranks have read ahead when other shares are set


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
    # of its ranks, in multiples of the nominal time
    units: list[float] = field(default_factory=list)
    # from the step after this one on
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    times: RankTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = RankTimes(self.plan.generation)

    @property
    def members(self) -> set[WorkerId]:
        return set(self.plan.ranks) | {h.worker for h in self.plan.resume.holdings}


class Generations(SimMachines):
    """Runs plans on machines. `violations`: orders that the contract forbids, as found."""

    def __init__(
        self, pools: tuple[Pool, ...], job: Job, delays: Delays, *, fits: Callable[[Plan], bool]
    ) -> None:
        super().__init__(pools, job, delays)
        self.fits, self.paces, self.functions = fits, Paces(), Functions(job)
        self.violations: list[str] = []
        self._groups: dict[int, SimGeneration] = {}
        # whose process groups are made ahead; `entered`: they are there
        self._forming: SimGeneration | None = None
        self._commits: dict[WorkerId, tuple[float, ...]] = {}
        self._without_device: set[WorkerId] = set()
        self._told_broken: set[WorkerId] = set()  # of these, those that the policy knows of
        self._pending: dict[WorkerId, tuple[int, int]] = {}  # generation, step
        self._spoilt: list[tuple[int, int]] = []  # generation, the last step that was right
        self._finds: dict[int, WrongNumbers] = {}  # to be told when its step is done
        self._wrong: set[int] = set()  # generations whose content is, as the policy knows
        self._told_wrong: set[int] = set()  # those of whose silent data corruption it knows
        self._not_finite: set[int] = set()  # steps that will give no number
        self._for_ever = False  # whenever they are done
        # checkpoints that are in storage, by uri, in the order in which they came
        self.stored: dict[str, Copy] = {}
        self._damaged: set[str] = set()
        self.sim_storage = SimStorage()

    def _running(self) -> list[SimGeneration]:
        return [group for group in self._groups.values() if group.entered and not group.ended]

    # ------------------------------------------------------------------------------------------
    # breaks

    def _kill(self, workers: set[WorkerId], moment: Moment = "inside") -> None:
        """Processes end: what they hold is gone, and their groups break."""
        super()._kill(workers)
        for worker in workers:
            self._commits.pop(worker, None)
            self._pending.pop(worker, None)
        for group in self._groups.values():
            needed = set(group.plan.ranks) if group.entered else group.members
            if not group.ended and needed & workers:
                self._break(group, moment)

    def _lose_device(self, worker: WorkerId, moment: Moment) -> None:
        """Its process lives on: the copies that it keeps in host memory are there, its live state
        and its gradients are not."""
        running = [group for group in self._running() if worker in group.plan.ranks]
        step = max((group.step + 1 for group in running), default=0)
        generation = max((group.plan.generation for group in running), default=0)
        self._without_device.add(worker)
        for group in self._groups.values():
            if not group.ended and worker in (group.plan.ranks if group.entered else group.members):
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

    def _say(self, event: Event) -> None:
        """From here on the policy knows better."""
        match event:
            case DigestChecked(ok=False):
                self._wrong.add(event.generation)
            case WrongNumbers():
                self._told_wrong.add(event.generation)
            case WorkerFailed(kind="device"):
                self._told_broken.add(event.worker)
        super()._say(event)

    def _break(self, group: SimGeneration, moment: Moment = "inside") -> None:
        group.ended = True
        survivors = {
            w: rank
            for rank, w in enumerate(group.plan.ranks)
            if self._answers(w) and w not in self._without_device
        }
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
                    self._advance(group, rank, group.step + 1)
                else:
                    self._pending[worker] = (group.plan.generation, group.step + 1)

    # ------------------------------------------------------------------------------------------
    # generations

    def _enter(self, action: EnterPlan) -> None:
        plan = action.plan
        if plan.generation <= max(self._groups, default=0):
            self.violations.append(f"generation {plan.generation} after {max(self._groups)}")
        lost = [
            worker
            for worker in plan.ranks
            if worker.node_id in self._told_lost or worker.node_id not in self._machines
        ]
        if lost:
            self.violations.append(
                f"generation {plan.generation} uses {lost[0]}, which was reported lost"
            )
        broken = [worker for worker in plan.ranks if worker in self._told_broken]
        if broken:
            self.violations.append(
                f"generation {plan.generation} uses {broken[0]}, whose device has failed"
            )
        late = [w for w in plan.ranks if w not in lost and self._deadline_s(w) <= self._now_s]
        if late:
            self.violations.append(
                f"generation {plan.generation} uses {late[0]}, whose deadline has passed"
            )
        if plan.resume.source != "fresh" and plan.resume.generation in self._wrong:
            self.violations.append(
                f"generation {plan.generation} comes of {plan.resume.generation}, whose content "
                "is wrong"
            )
        resume = plan.resume
        spoilt = [
            step
            for generation, step in self._spoilt
            if generation == resume.generation and generation in self._told_wrong
        ]
        if resume.source != "fresh" and any(resume.step > step for step in spoilt):
            self.violations.append(
                f"generation {plan.generation} resumes from corrupted state of step "
                f"{plan.resume.step}"
            )
        if (
            len(set(plan.ranks)) != plan.layout.world_size
            or sum(plan.samples) != self.job.global_batch
        ):
            self.violations.append(
                f"generation {plan.generation}: {plan.ranks} and {plan.samples} do not fit "
                f"{plan.layout}"
            )
        group = self._groups[plan.generation] = SimGeneration(plan)
        made, self._forming = self._forming, None
        there = made is not None and made.entered and made.plan.meeting == plan.meeting
        group.set_up_s = 0.0 if there else self._set_up_s(plan)
        for worker in sorted(group.members):
            if not self._lives(worker):
                self._tell(WorkerFailed(worker, plan.generation, "process", "it is not there"))
        failed = self._without_device & set(plan.ranks)
        for worker in sorted(failed):
            self._tell_broken(worker, plan.generation, 0)
        if failed or any(not self._lives(worker) for worker in group.members):
            self._break(group)
        elif any(not self._answers(worker) for worker in group.members):
            self._unanswered(group)
        source = self._groups.get(plan.resume.generation)
        if plan.resume.source == "live" and source is not None and not source.ended:
            source.leave_for = plan
        elif not group.ended:
            self._transition(group)

    def _deadline_s(self, worker: WorkerId) -> float:
        deadline_s = self._machines[worker.node_id].deadline_s
        return float("inf") if deadline_s is None else deadline_s

    def _transition(self, group: SimGeneration) -> None:
        slow = group.plan.resume.source == "durable"
        enter_s = (
            self.sim_storage.read_s(self._now_s, self.delays.restore_s)
            if slow
            else self.delays.enter_s
        )
        self._after(enter_s + group.set_up_s, lambda: self._entered(group))

    def _set_up_s(self, plan: Plan) -> float:
        """The world, the plan's, that of the copies, and one for each axis."""
        return self.delays.groups_s * (3 + len(axes_of(plan.layout)))

    def _form(self, action: FormGroups) -> None:
        forming = self._forming = SimGeneration(action.plan)
        if action.plan.generation <= max(self._groups, default=0):
            self.violations.append(
                f"groups of generation {action.plan.generation} after {max(self._groups)}"
            )

        def made() -> None:
            if self._forming is forming and all(
                self._answers(worker) for worker in forming.members
            ):
                forming.entered = True
                self._tell(GroupsFormed(action.plan.generation, self._set_up_s(action.plan)))

        self._after(self._set_up_s(action.plan), made)

    def _drop_groups(self, action: DropGroups) -> None:
        self._forming = None

    def _damage(self, fault: Fault) -> None:
        readable = [uri for uri in self.stored if uri not in self._damaged]
        if len(readable) > 1:
            self._damaged.add(readable[-1])
            if fault.lasting:
                del self.stored[readable[-1]]

    def _entered(self, group: SimGeneration) -> None:
        plan, resume = group.plan, group.plan.resume
        if not group.ended and any(not self._answers(worker) for worker in group.members):
            self._unanswered(group)
        if group.ended:
            return
        if not self.fits(plan):
            group.ended = True
            self._tell(
                WorkerFailed(
                    plan.ranks[0], plan.generation, "out_of_memory", "out of memory", 1 << 30
                )
            )
            return
        if resume.source == "durable" and resume.uri in self._damaged:
            group.ended = True
            for worker in plan.ranks:
                self._tell(CopyDamaged(resume.uri, f"{resume.uri}/rank-0000: digest differs"))
                self._tell(
                    WorkerFailed(
                        worker, plan.generation, "infrastructure", f"{resume.uri}: damaged"
                    )
                )
            return
        source = self._groups.get(resume.generation)
        group.step = source.step if resume.source == "live" and source else resume.step
        if resume.source in ("live", "peer") and not self._has_source(group):
            self.violations.append(
                f"generation {plan.generation}: nobody holds step {group.step} of "
                f"{resume.generation}"
            )
        told, failed = self.functions.entered(plan, group.step, source.plan if source else None)
        self._tell(told)
        if failed:  # the boxes of the generation before stay where they are
            group.ended = True
            for event in failed:
                self._tell(event)
            return
        for worker in group.members - set(plan.ranks):
            self._held.pop(worker, None)
            self._tell(Quiesced(worker, plan.generation, group.step))
        for rank, worker in enumerate(plan.ranks):
            before = self._held.get(worker, ()) if plan.copies_to and plan.peer_every else ()
            # until a copy counts
            self._held[worker] = (
                Holding(worker, plan.generation, rank, group.step, "live"),
                *before,
            )
            self._commits.pop(worker, None)
            self._pending.pop(worker, None)
        group.entered = True
        self._tell(
            PlanEntered(plan.generation, group.step, {"groups": 0.1, "build": 0.2, "transfer": 0.5})
        )
        self._copy_to_peers(group)
        if group.step >= self.job.steps:
            self._finish(group)
        else:
            self._begin_step(group)

    def _has_source(self, group: SimGeneration) -> bool:
        resume = group.plan.resume
        assert resume.layout is not None
        layout, members = resume.layout, group.members
        there = {
            replica_key(layout, h.rank)
            for worker in members
            for h in self._held.get(worker, ())
            if (h.generation, h.step) == (resume.generation, group.step)
        }
        return there == {replica_key(layout, rank) for rank in range(layout.world_size)}

    def _begin_step(self, group: SimGeneration) -> None:
        plan = group.plan
        group.step_s = self.delays.work_s / len(plan.ranks)
        if self.paces.on:
            group.plan = plan = replace(plan, samples=group.shares.pop(group.step, plan.samples))
            group.units = self.paces.units(plan, self._now_s)
            group.step_s = step_s(
                plan,
                plan.samples,
                group.units,
                work_s=self.delays.work_s,
                n_blocks=sum(plan.layers),
            )
        self._after(group.step_s, lambda: self._step(group))

    def _tell_paces(self, group: SimGeneration) -> None:
        """What rank 0 has to tell of the ranks' speeds."""
        unit_s = FORWARD * self.delays.work_s / (self.job.global_batch * sum(group.plan.layers))
        row = [unit_s * one for one in group.units]
        event = group.times.add(group.step, row, (0.0,) * len(row), now_s=self._now_s)
        if event is not None:
            self._tell(event)

    def _set_shares(self, action: SetShares) -> None:
        group = self._groups.get(action.generation)
        if group is None or group.ended or not group.entered:
            return
        samples, m = action.samples, group.plan.n_microbatches
        if (
            sum(samples) != self.job.global_batch
            or len(samples) != group.plan.layout.dp
            or any(n < m or n % m for n in samples)
        ):
            self.violations.append(
                f"generation {action.generation}: {samples} are no shares of its steps"
            )
        from_step = group.step + AHEAD
        group.shares[from_step] = samples
        self._tell(SharesSet(action.generation, samples, from_step))

    def _advance(self, group: SimGeneration, rank: int, step: int) -> None:
        worker, generation = group.plan.ranks[rank], group.plan.generation
        kept = tuple(
            h for h in self._held.get(worker, ()) if h.kind == "peer" or h.generation != generation
        )
        self._held[worker] = (Holding(worker, generation, rank, step, "live"), *kept)
        self._commits[worker] = (float(group.plan.generation), float(step))
        self._pending.pop(worker, None)

    def _step(self, group: SimGeneration) -> None:
        if group.ended:
            return
        plan, took_s = group.plan, group.step_s
        if group.step + 1 in self._not_finite:
            self._gives_no_number(group)
            return
        group.step += 1
        for rank in range(len(plan.ranks)):
            self._advance(group, rank, group.step)
        copies = bool(plan.peer_every and group.step % plan.peer_every == 0)
        copy_s = self.delays.copy_s * 0.1 if copies else 0.0
        digest = f"sample-{group.step}"
        loss = self.functions.step(plan, group.step)
        self._tell(
            StepDone(
                plan.generation, group.step, loss, 1000, took_s, 0.02 * took_s, copy_s, 1.0, digest
            )
        )
        if self.paces.on:
            self._tell_paces(group)
        self._found_out(group)
        if copies:
            self._copy_to_peers(group)
        last = group.step >= self.job.steps
        saves = plan.durable_every and group.step % plan.durable_every == 0
        if last or group.save or saves:
            self._save(group)
        group.save = False
        if last or group.quiesce:
            self._finish(group)
        elif group.leave_for is not None:
            group.ended = True
            self._tell(self.functions.left(plan, group.step))
            for worker in plan.ranks:
                self._tell(self._report(worker, plan.generation))
            successor = self._groups[group.leave_for.generation]
            if not successor.ended:
                self._transition(successor)
        else:
            self._begin_step(group)

    def _gives_no_number(self, group: SimGeneration) -> None:
        step, group.ended = group.step + 1, True
        if not self._for_ever:
            self._not_finite.discard(step)
        for worker in group.plan.ranks:
            text = (
                f"step {step}: train_loss nan: the loss of rank 0 on {group.plan.ranks[0]} is not "
                "finite; its samples: 1, 2"
            )
            self._tell(WorkerFailed(worker, group.plan.generation, "not_finite", text, 0, step))

    def _corrupt(self, group: SimGeneration) -> None:
        """What the generation took over was not what was sent; found out behind its first steps.
        One that starts over took over nothing, and compares nothing."""
        if group.plan.resume.source == "fresh":
            return
        self._tell(DigestChecked(group.plan.generation, False, 1000))

    def _wrong_numbers(self, group: SimGeneration, node_id: str, n_steps: int) -> None:
        """From the next step on what a node computes is wrong; after `n_steps` steps it is found
        out."""
        generation, good = group.plan.generation, group.step
        self._spoilt.append((generation, good))
        workers = tuple(worker for worker in group.plan.ranks if node_id in ("", worker.node_id))
        self._finds[generation] = WrongNumbers(
            generation, good + max(1, n_steps), good, workers, "replicas differ"
        )

    def _found_out(self, group: SimGeneration) -> None:
        found = self._finds.get(group.plan.generation)
        if found is not None and group.step >= found.step:
            self._tell(self._finds.pop(group.plan.generation))

    def _copy_to_peers(self, group: SimGeneration) -> None:
        plan, step = group.plan, group.step
        if not plan.copies_to or not plan.peer_every:
            return

        def acknowledged() -> None:
            if group.ended:
                return
            if (wait_s := self._cut_s(plan.ranks)) > 0:
                self._after(wait_s, acknowledged)
                return
            fresh: dict[WorkerId, list[Holding]] = {worker: [] for worker in plan.ranks}
            for rank, worker in enumerate(plan.ranks):
                for keeper in (worker, *(plan.ranks[k] for k in plan.copies_to[rank])):
                    fresh[keeper].append(Holding(keeper, plan.generation, rank, step, "peer"))
            for worker, holdings in fresh.items():
                held = self._held.get(worker, ())
                live = tuple(
                    h for h in held if h.kind == "live" and h.generation == plan.generation
                )
                self._held[worker] = (*live, *holdings)
            copy = Copy(step, "peer", plan.generation, plan.layout, plan.layers)
            self._tell(CopyStored(copy, self.delays.copy_s, 0.1 * self.delays.copy_s))

        self._after(self.delays.copy_s, acknowledged)

    def _save(self, group: SimGeneration) -> None:
        plan, step = group.plan, group.step

        def stored() -> None:
            if self._groups.get(plan.generation) is not group or not all(
                self._lives(worker) for worker in plan.ranks
            ):
                return
            # the driver writes the marker, when it has heard of all parts
            if (wait_s := self._cut_s(plan.ranks)) > 0:
                self._after(wait_s, stored)
                return
            if why := self.sim_storage.refusal(self._now_s):
                self._tell(CopyFailed(plan.generation, step, why))
                return
            uri = f"sim://step-{step:08d}.g{plan.generation:04d}"
            self.stored[uri] = Copy(step, "durable", plan.generation, plan.layout, plan.layers, uri)
            self._damaged.discard(uri)
            self._tell(CopyStored(self.stored[uri], 1.0, 0.05))
            self._tell(CopyVerified(uri))

        self._after(self.sim_storage.saved_s(self._now_s, self.delays.store_s), stored)

    def _finish(self, group: SimGeneration) -> None:
        """All ranks leave at this boundary; the last copy is under way."""
        if not group.save and group.step >= self.job.steps:
            self._save(group)
        group.quiesce = True
        self._tell(self.functions.left(group.plan, group.step))
        for worker in group.plan.ranks:
            self._tell(self._report(worker, group.plan.generation), self.delays.quiesce_s)

    def _quiesce(self, action: Quiesce) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.quiesce, group.save = True, action.save

    def _store(self, action: StoreCopy) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.save = True

    def _set_cadence(self, action: SetCadence) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.plan = replace(
                group.plan, peer_every=action.peer_every, durable_every=action.durable_every
            )

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
        for worker in sorted(members):
            if self._answers(worker):
                heard_s = self._cut_s([worker]) + self.delays.quiesce_s
                self._after(heard_s, lambda w=worker: self._answer(w, action.generation))  # type: ignore[misc]

    def _answer(self, worker: WorkerId, generation: int) -> None:
        if self._answers(worker):
            self._untold(worker)
            self._tell(self._report(worker, generation))

    def _report(self, worker: WorkerId, generation: int) -> Quiesced:
        held = self._held.get(worker, ())
        step = max((h.step for h in held if h.kind == "live"), default=0)
        pending_step = self._pending.get(worker, (0, -1))[1]
        return Quiesced(worker, generation, step, held, self._commits.get(worker, ()), pending_step)

    def _untold(self, worker: WorkerId) -> None:
        """The report of a step that nobody has given yet: its commit was seen by this worker."""
        for holding in self._held.get(worker, ()):
            group = self._groups[holding.generation]
            if holding.kind == "live" and group.ended and holding.step == group.step + 1:
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

        def applied(rank: int, worker: WorkerId) -> None:
            if self._answers(worker) and self._pending.get(worker) == (
                action.generation,
                action.step,
            ):
                self._advance(group, rank, action.step)
            self._answer(worker, action.generation)

        for rank, worker in enumerate(group.plan.ranks):
            heard_s = self._cut_s([worker]) + self.delays.quiesce_s
            self._after(heard_s, lambda r=rank, w=worker: applied(r, w))  # type: ignore[misc]

    def _unanswered(self, group: SimGeneration, why: str = "") -> None:
        """Somebody in the group no longer answers: the others wait until he is found silent."""
        group.ended = True
        for worker in sorted(group.members):
            if self._lives(worker) and not self._answers(worker):
                silent = Silent(
                    worker, group.plan.generation, "stepping", self.delays.silent_s, why
                )
                self._tell(silent, self.delays.silent_s)
