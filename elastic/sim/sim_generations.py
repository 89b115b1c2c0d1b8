"""Simulated generations: who is where in which step, and who holds what of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import count

from elastic.sim.gpu_speeds import FORWARD, Paces, step_s
from elastic.sim.scripted_faults import Delays, Fault
from elastic.sim.sim_breaks import Breaks, SimGeneration
from elastic.sim.sim_storage import SimStorage
from elastic.types import (
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
    SetCadence,
    SetShares,
    SharesSet,
    StepDone,
    StoreCopy,
    WorkerFailed,
    WorkerId,
    WrongNumbers,
    holdings,
)  # fmt: skip
from elastic.types.grid import axes_of, replica_keys

AHEAD = 2  # steps that ranks have read ahead when other shares are set


class Generations(Breaks):
    """Runs plans on machines."""

    def __init__(
        self, pools: tuple[Pool, ...], job: Job, delays: Delays, *, fits: Callable[[Plan], bool]
    ) -> None:
        super().__init__(pools, job, delays)
        self.fits, self.paces = fits, Paces()
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

    # ---------------------------------------------------------------------------------- generations

    def _enter(self, action: EnterPlan) -> None:
        plan = action.plan
        if plan.generation <= max(self._groups, default=0):
            self.violations.append(f"generation {plan.generation} after {max(self._groups)}")
        nodes, now_s = frozenset(plan.nodes), self._now_s
        lost = nodes.difference(self._machines) | (nodes & self._told_lost)
        there = [worker for worker in plan.ranks if worker.node_id not in lost]
        for bad, why in (
            ([w for w in plan.ranks if w.node_id in lost], "which was reported lost"),
            ([w for w in plan.ranks if w in self._told_broken], "whose device has failed"),
            ([w for w in there if self._deadline_s(w) <= now_s], "whose deadline has passed"),
        ):
            if bad:
                self.violations.append(f"generation {plan.generation} uses {bad[0]}, {why}")
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
            len(plan.workers) != plan.layout.world_size
            or sum(plan.samples) != self._job_of(plan).global_batch
        ):
            self.violations.append(
                f"generation {plan.generation}: {plan.ranks} and {plan.samples} do not fit "
                f"{plan.layout}"
            )
        group = self._groups[plan.generation] = SimGeneration(plan)
        made, self._forming = self._forming, None
        met = made is not None and made.entered and made.plan.meeting == plan.meeting
        group.set_up_s = 0.0 if met else self._set_up_s(plan)
        ended = self._ended(group.members, plan.nodes_taking_part)
        for worker in sorted(ended):
            self._tell(WorkerFailed(worker, plan.generation, "process", "it is not there"))
        failed = self._without_device & plan.workers
        for worker in sorted(failed):
            self._tell_broken(worker, plan.generation, 0)
        if failed or ended:
            self._break(group)
        elif self._mute(group.members, plan.nodes_taking_part):
            self._unanswered(group)
        source = self._groups.get(plan.resume.generation)
        if plan.resume.source == "live" and source is not None and not source.ended:
            source.leave_for = plan
            if plan.phase <= source.plan.phase:  # else it ends by itself
                self._cut_short(source)
        elif not group.ended:
            self._transition(group)

    def _parted_s(self, workers: Collection[WorkerId]) -> float:
        """Until all of these are reached, by the driver and by each other."""
        return self._cut_s(workers)

    def _job_of(self, plan: Plan) -> Job:
        """In the phase of the plan."""
        return self.job.in_phase(plan.phase)

    def _deadline_s(self, worker: WorkerId) -> float:
        deadline_s = self._machines[worker.node_id].deadline_s
        return float("inf") if deadline_s is None else deadline_s

    def _transition(self, group: SimGeneration) -> None:
        enter_s = self.delays.entering_s(group.plan)
        if group.plan.resume.source == "durable":
            enter_s = self.sim_storage.read_s(self._now_s, enter_s)
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
            nodes = action.plan.nodes_taking_part
            if self._forming is forming and not self._mute(forming.members, nodes):
                self._formed(forming)

        self._after(self._set_up_s(action.plan), made)

    def _formed(self, forming: SimGeneration) -> None:
        forming.entered = True
        self._tell(GroupsFormed(forming.plan.generation, self._set_up_s(forming.plan)))

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
        if not group.ended and self._mute(group.members, plan.nodes_taking_part):
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
        held, copied = self._held, bool(plan.copies_to and plan.peer_every)
        for worker in sorted(plan.senders):
            held.pop(worker, None)
            self._tell(Quiesced(worker, plan.generation, group.step))
        live = holdings(plan.ranks, plan.generation, count(), step=group.step, kind="live")
        for worker, holding in zip(plan.ranks, live, strict=True):
            before = held.get(worker, ()) if copied else ()  # until a copy counts
            held[worker] = (holding, *before)
            self._commits.pop(worker, None)
            self._pending.pop(worker, None)
        group.entered = True
        self._tell(
            PlanEntered(plan.generation, group.step, {"groups": 0.1, "build": 0.2, "transfer": 0.5})
        )
        self._copy_to_peers(group)
        if group.step >= self._job_of(plan).until_step:
            self._finish(group)
            return
        if plan.phase != self.job.phase_at(group.step):
            self.violations.append(
                f"generation {plan.generation} makes step {group.step + 1} as in phase {plan.phase}"
            )
        self._begin_step(group)

    def _has_source(self, group: SimGeneration) -> bool:
        resume = group.plan.resume
        assert resume.layout is not None
        keys, held = replica_keys(resume.layout), self._held
        there = {
            keys[h.rank]
            for worker in group.members
            for h in held.get(worker, ())
            if h.step == group.step and h.generation == resume.generation
        }
        return there == set(keys)

    def _begin_step(self, group: SimGeneration) -> None:
        plan = group.plan
        group.step_s = self._plan_step_s(plan)
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
        group.batch, group.began_s = self._batch(group), self._now_s
        self._end_batch_after(group, group.batch * group.step_s)

    def _batch(self, group: SimGeneration) -> int:
        """How many steps are looked at as one."""
        return 1

    def _end_batch_after(self, group: SimGeneration, delay_s: float) -> None:
        group.turn += 1
        turn = group.turn

        def ended() -> None:
            if group.turn == turn:
                self._step(group)

        self._after(delay_s, ended)

    def _cut_short(self, group: SimGeneration) -> None:
        """An order counts at the end of the step that is really under way."""
        done = int((self._now_s - group.began_s) / group.step_s) + 1 if group.step_s else 1
        if group.entered and not group.ended and done < group.batch:
            group.batch = done
            self._end_batch_after(group, group.began_s + done * group.step_s - self._now_s)

    def _plan_step_s(self, plan: Plan) -> float:
        return self.delays.work_s / len(plan.ranks)

    def _tell_paces(self, group: SimGeneration) -> None:
        """What rank 0 has to tell of the ranks' speeds."""
        batch = self._job_of(group.plan).global_batch
        unit_s = FORWARD * self.delays.work_s / (batch * sum(group.plan.layers))
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
            sum(samples) != self._job_of(group.plan).global_batch
            or len(samples) != group.plan.layout.dp
            or any(n < m or n % m for n in samples)
        ):
            self.violations.append(
                f"generation {action.generation}: {samples} are no shares of its steps"
            )
        from_step = group.step + AHEAD
        group.shares[from_step] = samples
        self._tell(SharesSet(action.generation, samples, from_step))

    def _step(self, group: SimGeneration) -> None:
        if group.ended:
            return
        plan, took_s = group.plan, group.step_s
        if group.step + 1 in self._not_finite:
            self._gives_no_number(group)
            return
        before, group.step = group.step, group.step + group.batch

        def reaches(every: int) -> bool:
            """A multiple of it, among the steps of the batch."""
            return bool(every) and group.step // every > before // every

        self._hold_step(group, group.step)
        copies = reaches(plan.peer_every)
        copy_s = self.delays.copy_s * 0.1 if copies else 0.0
        digest = f"sample-{group.step}"
        loss = self.functions.step(plan, group.step)
        self._tell(
            StepDone(
                plan.generation,
                group.step,
                loss,
                1000 * group.batch,
                took_s,
                0.02 * took_s,
                copy_s,
                1.0,
                digest,
            )
        )
        if self.paces.on:
            self._tell_paces(group)
        found = self._finds.get(plan.generation)
        if found is not None and group.step >= found.step:
            self._tell(self._finds.pop(plan.generation))
        if copies:
            self._copy_to_peers(group)
        over = group.step >= self._job_of(plan).until_step
        last = over and group.step >= self.job.steps
        if last or group.save or reaches(plan.durable_every):
            self._save(group)
        group.save = False
        next_plan = group.leave_for
        leaves = next_plan is not None and (over or next_plan.phase <= plan.phase)
        if last or group.quiesce or (over and not leaves):
            self._finish(group)
        elif next_plan is not None and leaves:
            group.ended = True
            self._tell(self.functions.left(plan, group.step))
            held = self._held
            for worker in plan.ranks:
                self._tell(self._report(worker, plan.generation, held))
            successor = self._groups[next_plan.generation]
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

    def _copy_to_peers(self, group: SimGeneration) -> None:
        plan, step = group.plan, group.step
        if not plan.copies_to or not plan.peer_every:
            return

        self._after(self.delays.copy_s, lambda: self._acknowledged(group, step))

    def _acknowledged(self, group: SimGeneration, step: int) -> None:
        """Every partner has its copy of that step."""
        plan = group.plan
        if group.ended:
            return
        if (wait_s := self._parted_s(plan.ranks)) > 0:
            self._after(wait_s, lambda: self._acknowledged(group, step))
            return
        self._hold_copies(group, step)
        copy = Copy(step, "peer", plan.generation, plan.layout, plan.layers)
        self._tell(CopyStored(copy, self.delays.copy_s, 0.1 * self.delays.copy_s))

    def _hold_step(self, group: SimGeneration, step: int) -> None:
        """Each rank has its boxes of it."""
        self._advance(group, range(len(group.plan.ranks)), step)

    def _hold_copies(self, group: SimGeneration, step: int) -> None:
        plan, held = group.plan, self._held
        kept: list[list[Holding]] = [
            [
                h
                for h in held.get(worker, ())
                if h.kind == "live" and h.generation == plan.generation
            ]
            for worker in plan.ranks
        ]
        pairs = [(rank, k) for rank, to in enumerate(plan.copies_to) for k in (rank, *to)]
        ranks, keepers = [rank for rank, _ in pairs], [keeper for _, keeper in pairs]
        there = map(plan.ranks.__getitem__, keepers)
        copies = holdings(there, plan.generation, ranks, step=step, kind="peer")
        for keeper, copy in zip(keepers, copies, strict=True):
            kept[keeper].append(copy)
        held.update(zip(plan.ranks, map(tuple, kept), strict=True))

    def _save(self, group: SimGeneration) -> None:
        plan, step = group.plan, group.step

        def stored() -> None:
            there = self._groups.get(plan.generation) is group
            if not there or self._ended(plan.workers, plan.nodes_taking_part):
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
        """All ranks leave at this boundary; at the last one the last copy is under way."""
        if not group.save and group.step >= self.job.steps:
            self._save(group)
        group.quiesce = True
        group.ended |= self._job_of(group.plan).until_step <= group.step < self.job.steps
        self._tell(self.functions.left(group.plan, group.step))
        held = self._held
        left = [self._report(worker, group.plan.generation, held) for worker in group.plan.ranks]

        def told() -> None:
            for event in left:
                self._tell(event)

        if self.delays.quiesce_s:
            self._after(self.delays.quiesce_s, told)
        else:
            told()

    def _quiesce(self, action: Quiesce) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.quiesce, group.save = True, action.save
            self._cut_short(group)

    def _store(self, action: StoreCopy) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.save = True
            self._cut_short(group)

    def _set_cadence(self, action: SetCadence) -> None:
        group = self._groups.get(action.generation)
        if group is not None:
            group.plan = replace(
                group.plan, peer_every=action.peer_every, durable_every=action.durable_every
            )
