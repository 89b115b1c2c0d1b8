"""One generation as one worker lives it: meet, build, take over the state, step, leave with the
state in hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from elastic.data.budget import Microbatch
from elastic.data.collate import Batch, collate
from elastic.data.loader import Loader, ReadAhead
from elastic.data.streams import Stream
from elastic.errors import InternalError
from elastic.types import (
    Evaluated,
    GuardTripped,
    NoiseSeen,
    Plan,
    PlanEntered,
    Probed,
    SetCadence,
    SetShares,
    SharesSet,
    StartProfile,
    StopAsked,
)
from elastic.types.grid import axes_of, rank_of
from elastic.types.rank_timing import RankTimes
from elastic.worker.parallel.dtensor_random import settle_random
from elastic.worker.parallel.model_options import needs_fsdp
from elastic.worker.process.call_log import PartCalls
from elastic.worker.process.doing import DEVICE, InCollective, doing
from elastic.worker.process.readback import pinned
from elastic.worker.process.side_stream import run_on
from elastic.worker.process_groups.axis_ranges import axis_range
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.calls import count_of
from elastic.worker.program.commit import Commit, step_done
from elastic.worker.program.guards import MEMORY, Trip
from elastic.worker.session.boundary_copies import BoundaryCopies, reserve_buffers
from elastic.worker.session.loss_probe import Probe
from elastic.worker.session.profiled_rank import profile_of
from elastic.worker.session.takeover import Taken, Takeover, digest_of_given, tell_digests
from elastic.worker.session.workplace import EnterOrder, Workplace
from elastic.worker.state.host_copy import HostCopy
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.commit_vector import CommitFields, CommitReport
from elastic.worker.step.evaluation import is_due, newest, validate
from elastic.worker.step.faulty_rank import FaultyRank, Tripped
from elastic.worker.step.logged_sums import KeptSums
from elastic.worker.step.optimizer_step import Stepper
from elastic.worker.step.sdc_check import SdcCheck

log = logging.getLogger(__name__)


def groups_of(place: Workplace, plan: Plan) -> Groups:
    """Not made yet."""
    groups = Groups(
        plan.generation,
        plan.layout,
        place.device,
        fsdp=needs_fsdp(place.job, plan.layout),
        stage=place.profile.by_owners,
    )
    if place.device_lost:
        groups.lose_device()
    return groups


class Generation:
    """Enter, run and leave one generation."""

    def __init__(
        self,
        place: Workplace,
        order: EnterOrder,
        words: Callable[[], tuple[bool, bool]],
        *,
        groups: Groups | None = None,
    ) -> None:
        """`groups`: those that were made ahead."""
        self.place, self.order, self.plan = place, order, order.plan
        place.enter_phase(order.plan.phase)
        # asked before each commit: (stop at this boundary?, save at this boundary?)
        self.words = words
        self.groups = groups or groups_of(place, order.plan)
        self.rank = order.me if order.me < len(order.plan.ranks) else None
        self.state: TrainState | None = None
        self.stepper: Stepper | None = None  # once it runs
        self._built: Stepper | None = None
        self._probe: Probe | None = None
        self.copies: BoundaryCopies | None = None
        # steps between peer and checkpoints, to be told in a commit
        self.new_cadence: tuple[int, int] | None = None
        # samples per data-parallel rank, to be told in a commit
        self.new_shares: tuple[int, ...] | None = None
        self._times = RankTimes(order.plan.generation)
        self.loader: Loader | None = None
        self.entered_step = 0
        self.profile = profile_of(place, order, self.groups)
        self.phases_s: dict[str, float] = {}
        # a CUDA error after which this process can read nothing on its GPU
        self.device_lost = False
        self._mark = time.monotonic()

    @property
    def number(self) -> int:
        return self.plan.generation

    def can_deal(self, samples: Sequence[int]) -> bool:
        """Are these numbers of samples shares of this generation's steps?"""
        n_ranks, batch = len(self.plan.samples), self.place.job.global_batch
        whole = not any(n % max(1, self.place.profile.together) for n in samples)
        return whole and len(samples) == n_ranks and sum(samples) == batch and min(samples) > 0

    def change(self, action: SetCadence | SetShares | StartProfile) -> None:
        """From a later step on; of cadence and shares rank 0 tells the others in a commit."""
        if isinstance(action, StartProfile):
            self.profile.ask(action)
        elif isinstance(action, SetCadence):
            self.new_cadence = (action.peer_every, action.durable_every)
        elif self.can_deal(action.samples):
            self.new_shares = action.samples

    # ---------------------------------------------------------------------------------------- enter

    def enter(self) -> None:
        """Returns when every participant has what it needs. Raises what the groups raise when a
        participant goes away."""
        place, order = self.place, self.order
        if place.device_lost and self.rank is not None:
            raise torch.AcceleratorError(
                "CUDA error: the device of this worker failed in an earlier generation"
            )
        place.at_phase("waiting", 0)
        if self.rank is not None:
            reserve_buffers(place, self.plan, self.rank)
        self.groups.join(order.rendezvous, order.me)
        settle_random(self.groups.mesh, self.groups.device)
        self._lap("groups")
        takeover = Takeover(place, order, self.groups)
        takeover.make_room()
        if self.rank is not None or not place.faults.lost:  # host copies are sent without a device
            place.faults.check("move")
        if self.rank is not None:
            place.at_phase("building", 0)
            plan = self.plan
            place.faults.other = place.faults.layout and not axes_of(plan.layout) <= place.axes
            self.state = TrainState(
                place.program, place.profile, self.groups, layout=plan.layout, layers=plan.layers,
                rank=self.rank, job=place.job,
            )  # fmt: skip
        self._lap("build")
        place.at_phase("loading", 0)
        taken = takeover.run(self.state)
        if self.state is not None:
            self.state.step = int(self.state.rng[1])
        self._lap("transfer")
        if self.state is not None:
            self.groups.first_messages()
        self._report_probe(self._probe_entry())
        self._start(taken)

    def _probe_entry(self) -> Probed | None:
        """Does this layout compute what the one before did? Every participant is here, with all
        boxes of both."""
        place, plan, state = self.place, self.plan, self.state
        step = -1
        if state is not None:
            self._built = Stepper(
                place.program, place.job, plan, state=state, groups=self.groups, faults=place.faults
            )
            if place.script is None:
                place.extra.count_for(state.optimizers.each)
                place.extra.load(state.tensors)
            step = state.step
        # who only sends does not know it
        step = int(self.groups.control.all_reduce(torch.tensor([step]), dist.ReduceOp.MAX))
        place.at_phase("loading", step)
        self._probe = Probe(place, self.order, self.groups, stepper=self._built)
        try:
            return self._probe.at_entry(step)
        finally:
            self._lap("probe")

    def _report_probe(self, probed: Probed | None) -> None:
        if probed is not None and self.rank == 0:
            self.place.report(probed)

    def _lap(self, phase: str) -> None:
        now = time.monotonic()
        self.phases_s[phase] = round(now - self._mark, 4)
        self._mark = now

    def _start(self, taken: Taken) -> None:
        """Everyone has its state: tell the driver, take the first peer replica, check digests
        behind the next steps."""
        place, plan, state = self.place, self.plan, self.state
        after: HostCopy | None = None
        # before anything lets go of them
        leases = [held.lease.retain() for held in taken.before if held.lease is not None]
        if state is not None:
            assert self.rank is not None
            place.axes = axes_of(plan.layout)
            if self.rank == 0:
                entered = PlanEntered(plan.generation, state.step, self.phases_s, taken.n_bytes)
                place.report(
                    replace(entered, peak_bytes=taken.peak_bytes, left_at_s=place.left_at_s)
                )
            self.copies = BoundaryCopies(place, plan, state, groups=self.groups)
            self.copies.begin()
            after = self.copies.take() if plan.resume.source != "fresh" else None
        if plan.resume.source != "fresh":
            gave = taken.given is not None
            old = place.check(digest_of_given, place, [taken], leases)
            tell = partial(tell_digests, place, self.order, old, gave=gave, after=after)
            told = place.background(tell)
            if state is None:
                told.result()  # this worker may be gone soon

    # ------------------------------------------------------------------------------------------ run

    def run(self) -> None:
        """Steps to the end of the plan's phase or a stop word; at its return copies are settled."""
        place, plan, state, job = self.place, self.plan, self.state, self.place.job
        assert state is not None
        stepper, copies = self._built, self.copies
        assert stepper is not None and copies is not None
        self.stepper = stepper
        if stepper.loss_scale.on:
            with doing("batch"):
                first = collate([place.dataset[0]])
            tokens = count_of(place.program, first)
            stepper.loss_scale.begin(tokens * job.global_batch)

        stepper.read_by(place.dataset)

        if place.script is not None:
            stepper.script = place.script
            place.program = place.script.begin(plan, state, job, extra=place.extra)
        elif place.program.log is not None:
            stepper.kept = KeptSums("Program.log")
        stepper.memory = place.extra.objects.get(MEMORY)
        last, end = job.until_step, job.steps
        loader = self.loader = self._loader_of(stepper)
        self.groups.check()  # an abort before that had no loader to close
        stepper.coming = lambda: loader.ready(state.step + 1)
        stop, self.entered_step = False, state.step
        equal = SdcCheck(stepper, plan, place.faults, good_step=min(place.good_step, state.step))
        if self._owes_validation(state.step):
            self._evaluate(stepper, state)
        if state.step >= end:
            self._finish(state)
            # all steps were done before, and the copy of the last was not stored
            place.saving.save(plan, state, must=True)
        while state.step < last and not stop:
            with self.profile.step(state.step):
                stop, batches, step_s = self._step(stepper, copies, loader)
            if not stop and state.step < last:
                found = equal.after(state.step, batches, step_s)
                place.good_step = equal.good_step
                if found is not None and self.rank == 0:  # the driver ends the steps
                    place.report(found)
            if is_due(job, state.step):
                self._evaluate(stepper, state)
            if state.step == end:
                self._finish(state)
                # last of all: once it is stored the run is done
                place.saving.save(plan, state, copies.take(), must=True)
        if state.step < end and self._probe is not None:
            self._report_probe(self._probe.at_boundary(state.step))
        copies.replicas.drop()

    def _step(
        self, stepper: Stepper, copies: BoundaryCopies, loader: Loader
    ) -> tuple[bool, list[Batch], float]:
        """One step and the copies at its boundary: is it the last one here, its batches, its
        seconds."""
        place, state = self.place, stepper.state
        compiles = stepper.first_step and place.job.compile
        place.at_phase("compiling" if compiles else "stepping", state.step)
        began, cpu_s = time.monotonic(), self._cpu_s()
        with doing("batch"), axis_range("data"):
            batches, data_s = loader.take(state.step)
        if isinstance(place.dataset, Stream):
            place.dataset.taken(state.step)
        copies.before_step()
        heard = self._guarded(stepper, batches, data_s)
        self._stepped(heard.commit)
        self._hear(heard, stepper, state)
        if stepper.noise is not None and self.rank == 0:
            place.report(NoiseSeen(self.number, state.step, *stepper.noise))
        place.left_at_s = time.time()
        cpu_s = self._cpu_s() - cpu_s
        with axis_range("copies"):
            copy_s = copies.after_step(heard)
        step_s = time.monotonic() - began
        # others wait for the last one
        data_s = min(max(heard.data_s), max(data_s, step_s - copy_s))
        if state.step > self.entered_step + 1 and not self.profile.disturbs(state.step):
            copies.replicas.timed(step_s - data_s - copy_s, cpu_s, copies.busy)
        self._report_step(stepper, heard.commit, (step_s, data_s, copy_s))
        return heard.stop, batches, step_s

    def _loader_of(self, stepper: Stepper) -> Loader:
        """Of this rank's micro-batches from the next step on."""
        place, data, shares = self.place, self.place.dataset, stepper.shares

        def parts_of_step(step: int) -> Sequence[Microbatch]:
            if isinstance(data, Stream):
                return shares.cut_of(data.positions(step), step)[stepper.dp]
            return shares.cut(step)[stepper.dp]

        return Loader(
            data.reader() if isinstance(data, Stream) else data,
            parts_of_step,
            stepper.state.step,
            draws=None if isinstance(data, Stream) else place.sample_draws,
            ahead=ReadAhead.of(place.job),
            readers=place.readers,
            finish=run_on(place.device, pinned) if place.device.type == "cuda" else dict,
        )

    def _cpu_s(self) -> float:
        """Of this process so far, where its cores are what computes."""
        return time.process_time() if self.groups.device.type == "cpu" else 0.0

    def _guarded(self, stepper: Stepper, batches: list[Batch], data_s: float) -> CommitReport:
        try:
            return stepper.run(batches, replace(self._say(), data_s=data_s))
        except Tripped as error:
            self._tell_of(error.trip, error.faulty_rank)
            raise

    def _tell_of(self, trip: Trip, faulty_rank: FaultyRank) -> None:
        """Every rank does: those that come late may find the groups aborted already."""
        who = (faulty_rank.rank, faulty_rank.worker, faulty_rank.samples or ())
        self.place.report(
            GuardTripped(
                self.number, trip.step, trip.guard, trip.do, faulty_rank.sentence(trip), *who
            )
        )

    def _stepped(self, commit: Commit, live: bool = True) -> None:
        """A step is done: the script continues to its next batch, what the program remembers
        besides the model is noted, and that a guard has left the update out is reported,
        also where the generation aborts meanwhile."""
        assert self.stepper is not None
        state, trip = self.stepper.state, self.stepper.trip
        faulty_rank = self.stepper.faulty_rank(trip, together=False) if trip is not None else None
        try:
            if self.place.script is not None:
                self.place.script.applied(commit, state.step, live)
            if trip is not None and live:
                faulty_rank = self.stepper.faulty_rank(trip)
        finally:
            self.place.extra.note(state.tensors)
            if trip is not None and faulty_rank is not None:
                self._tell_of(trip, faulty_rank)

    def _finish(self, state: TrainState) -> None:
        if self.place.script is not None:
            self.place.script.finish(
                lambda: self.place.at_phase("finishing", state.step), lambda: self.groups.aborted
            )

    def _say(self) -> CommitFields:
        """This rank's words for the next commit."""
        stop, save = self.words()
        cadence, shares = (self.new_cadence, self.new_shares) if self.rank == 0 else (None, None)
        if self.copies is None:
            return CommitFields(stop, save, cadence=cadence, shares=shares)
        replicas = self.copies.replicas
        return CommitFields(
            stop, save, replicas.stored, replicas.failed, replicas.free, cadence, shares=shares
        )

    def _hear(self, heard: CommitReport, stepper: Stepper, state: TrainState) -> None:
        """What the ranks have told each other in the commit of the step that was just done. Other
        shares begin behind the steps that may have been read ahead, the same ones on every rank."""
        assert self.loader is not None
        if heard.shares is not None and heard.shares != stepper.shares.newest:
            from_step = state.step + self.loader.n_ahead
            stepper.shares.set(from_step, heard.shares)
            if self.rank == 0:
                self.place.report(SharesSet(self.number, heard.shares, from_step))
        if heard.shares == self.new_shares:
            self.new_shares = None
        if heard.cadence is not None and heard.cadence == self.new_cadence:
            self.new_cadence = None
        # the same steps on every rank
        if self.rank == 0 and stepper.spans.timing and not self.profile.disturbs(state.step):
            timed = self._times.add(state.step, heard.unit_s, heard.data_s, now_s=time.monotonic())
            if timed is not None:
                self.place.report(timed)

    def _report_step(
        self, stepper: Stepper, commit: Commit, times: tuple[float, float, float]
    ) -> None:
        """By rank 0. A program's own numbers are asked of all ranks, a script's of this one."""
        script, kept, logged = self.place.script, stepper.kept, {}
        if kept is not None:
            logged = kept.taken(self.groups.commit).per_token(commit.tokens, kept.where)
        if self.rank:
            return
        if script is not None:
            logged = script.logged()
        step, skipped = stepper.state.step, stepper.trip is not None
        shape = (stepper.imbalance, stepper.shares.pad_share(step - 1), stepper.expert_load)
        done = step_done(
            self.number, step, commit, times=times, skipped=skipped, shape=shape, logged=logged
        )
        self.place.report(done)
        if script is not None and script.stops():
            self.place.report(StopAsked(f"run.stop() of the script at step {step}", done=True))

    def _owes_validation(self, step: int) -> bool:
        """Was the one that is due at this step cut off with the generation before?"""
        place = self.place
        after = self.plan.resume.source in ("live", "peer") and place.validation is not None
        return after and is_due(place.job, step) and newest(self.groups, place.validated) < step

    def _evaluate(self, stepper: Stepper, state: TrainState) -> None:
        place = self.place
        if place.validation is None:
            return
        began = time.monotonic()
        metrics = validate(
            stepper,
            place.validation,
            place.job.eval_samples,
            draws=place.sample_draws,
            tick=lambda: place.at_phase("evaluating", state.step),
        )
        place.validated = state.step
        if place.script is not None:
            place.script.evaluated(metrics)
        if self.rank == 0:
            seconds = round(time.monotonic() - began, 4)
            place.report(Evaluated(self.number, state.step, metrics, seconds))

    # ---------------------------------------------------------------------------------------- leave

    def take_along(self) -> None:
        """Puts the live state into the workplace, if it is that of a whole step. Of a lost device
        only host copies are left."""
        state = self.state
        if self.device_lost:
            self.place.held = [h for h in self.place.held if h.kind != "live" or h.on_host]
            if self.copies is not None:
                self.place.held += self.copies.replicas.unacknowledged(own=False)
            return
        if state is not None and self.copies is not None:
            self.place.held = [
                h for h in self.place.held if not (h.kind == "live" and h.generation == self.number)
            ]
            try:
                if not state.dirty:
                    state.buffers.take_back()  # what a step that was aborted did to them
                    self.place.held.insert(0, state.held(self.number))
            except RuntimeError as error:
                log.warning(
                    "the buffers of step %s cannot be restored, its state is not taken along: %s",
                    state.step, error,
                )  # fmt: skip
            self.place.held += self.copies.replicas.unacknowledged()

    @property
    def pending_step(self) -> int:
        """The step whose gradients are here, though its commit was not seen; -1 = none, or it could
        not be applied without the others."""
        if self.place.profile.by_owners and self.plan.layout.world_size > self.plan.layout.pp:
            return -1
        if self.stepper is None or self.stepper.pending is None or self.device_lost:
            return -1
        return self.stepper.pending.step

    def roll_forward(self, step: int, numbers: tuple[float, ...]) -> None:
        """After the generation was left: applies the step that only others have seen the commit
        of."""
        if self.stepper is None:
            raise InternalError(
                f"told to apply step {step} of generation {self.number}, which made no step here"
            )
        try:
            commit = Commit.of(numbers)
            self.stepper.roll_forward(step, commit)
            self._stepped(commit, live=False)
        finally:
            self.take_along()

    def arrived(self) -> tuple[tuple[str, int, int], ...]:
        """See Groups.arrived; of a GPU also how far it has come, among the ranks that compute the
        same samples with it. From any thread."""
        stepper, layout = self._built, self.plan.layout
        if stepper is None or self.groups.device.type != "cuda":
            return self.groups.arrived()
        first = rank_of(layout, replace(stepper.at, cp=0, tp=0))
        n, part = stepper.spans.marks.passed()
        return (*self.groups.arrived(), (DEVICE + part, first, n))

    def collective(self, kind: str, group: Any) -> InCollective | None:
        """One of a group whose collectives are counted. From any thread."""
        named = self.groups.named(group)
        return InCollective(kind, *named) if named is not None else None

    def calls(self) -> tuple[PartCalls, ...]:
        """What the script has called in this generation. From any thread."""
        script = self.place.script
        run = script.run if script is not None else None
        return run.calls.parts() if run is not None and run.calls.generation == self.number else ()

    @property
    def next_step(self) -> int:
        """The step under way; 0 = the state was not there yet."""
        return self.state.step + 1 if self.stepper is not None and self.state is not None else 0

    def lose_device(self) -> None:
        """From now on nothing on this process's GPU is offered to others."""
        self.device_lost = True
        self.place.lose_device()

    def break_off(self) -> None:
        """Frees the ranks that wait for this one; on a lost device as far as that can be done."""
        with suppress(RuntimeError) if self.device_lost else nullcontext():
            self.groups.abort()

    def close(self) -> None:
        with suppress(RuntimeError) if self.device_lost else nullcontext():
            self.profile.close()
            if self.copies is not None:
                self.copies.close()
            if self.loader is not None:
                self.loader.close()
            if self.place.script is not None:
                self.place.script.leave()
            if self.state is not None:
                self.state.release_frozen()
            self.groups.close()
