"""One optimizer step of one rank: gradients, the commit all-reduce, guards, the update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from itertools import islice

import torch
import torch.distributed as dist

from elastic.data.order import digest
from elastic.data.streams import N_POSITIONS
from elastic.errors import InternalError, ProgramError
from elastic.program import Program
from elastic.types import Job, Plan
from elastic.types.grid import fullest_experts
from elastic.worker.parallel.parallelize import local
from elastic.worker.process.call_log import RULE, difference, other_settings, parts_of
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.readback import Number, read
from elastic.worker.process_groups.axis_ranges import axis_range
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.wire import gather_numbers, gather_words
from elastic.worker.program.commit import KEPT_COMMITS, Commit
from elastic.worker.program.guards import GuardMemory, Trip, judge, trip_of
from elastic.worker.program.loop_program import LoopProgram, NotOfModel
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.commit_vector import CommitFields, CommitReport, RankPart, Slots
from elastic.worker.step.faulty_rank import UNNAMED, FaultyRank, Tripped, find_faulty_rank
from elastic.worker.step.forward_backward import Batch, ForwardBackward
from elastic.worker.step.gradient_noise import LocalGradients, cannot, noise

Gradients = dict[str, torch.Tensor]
CLIP_EPSILON = 1e-6
SETTINGS_MOST = 5000  # that ranks compare by name; of thousands of groups


@dataclass(frozen=True)
class Pending:
    """Gradients of `step`, summed over all ranks that share them, which no commit has been seen
    for."""

    step: int
    gradients: Gradients
    loss_sum: float  # of this rank's part of its samples; 0 where it does not speak for them
    square_norm: float  # of the elements that this rank owns
    tokens: int = 0  # that `loss_sum` is of
    # the same by block, where a guard looks at them in this step
    block_square_norms: tuple[float, ...] = ()
    # square norms of the gradients of its single microbatches, where they are measured
    small: tuple[float, ...] = ()
    # of mixtures that are balanced by a bias: the step's tokens of each expert, of all ranks
    routed: tuple[torch.Tensor, ...] = ()


def seed(number: int, device: torch.device) -> None:
    """As torch.manual_seed, of the CPU's generator and the device's: that formats a traceback for
    each other kind of device."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


class Stepper(ForwardBackward):
    """Runs the steps of one generation on one rank."""

    def __init__(
        self, program: Program, job: Job, plan: Plan, *, state: TrainState, groups: Groups,
        faults: DeviceFaults | None = None,
    ) -> None:  # fmt: skip
        super().__init__(program, job, plan, state=state, groups=groups, faults=faults)
        self.first_step = True
        self.pending: Pending | None = None
        self.clip_grad_norm: float | None = job.clip_grad_norm
        # of the newest step: tokens per sample of the rank that had the most, over the mean of all
        self.imbalance = 0.0
        # of the newest step: tokens at the experts of the fullest rank, over the mean of its stage
        self.expert_load = 0.0
        # what the commit of the newest step that was done gave
        self.committed: tuple[float, ...] = ()
        # what is to be told of the newest steps, should nobody have told of them
        self.done: deque[tuple[int, tuple[float, ...]]] = deque(maxlen=KEPT_COMMITS)
        self.rules = job.guards
        self.memory: GuardMemory | None = None  # of the guards, in the training state
        self.trip: Trip | None = None  # of the newest step, where a guard has skipped it
        self.noise_every = job.noise_scale.every if job.noise_scale else 0
        if cannot(plan, state.profile, isinstance(program, LoopProgram)):
            self.noise_every = 0
        self.local = LocalGradients(state.models) if self.noise_every else None
        self.noise: tuple[float, float] | None = None  # of the newest step, where it was measured
        self._told: Pending | None = None  # what this rank has put into the newest commit

    def run(self, batches: Iterable[Batch], words: CommitFields) -> CommitReport:
        """Gradients, commit, update; or no update, where a guard says so (`trip`). Raises Tripped
        where a guard wants to go back or to stop; the state then stays as it was.

        The gradients are whole before the commit begins: every collective that adds them up has
        returned on this rank. A commit that aborts leaves only its own vector in an unknown state,
        and that is thrown away; `pending` and the state are those of a rank that waits for the word
        to continue (`roll_forward`), or that never heard of this step.
        """
        step = self.state.step
        mine = self.dp * self.plan.layout.cp + self.at.cp
        seed((self.job.seed * 1_000_003 + step) * 65_537 + mine, self.device)
        measured = self.noise_every > 0 and (step + 1) % self.noise_every == 0
        local = self.local if measured else None
        if local is not None:
            local.begin()
        self.state.buffers.note()
        self.state.reached.begin()
        self.norms.begin()
        self.spans.next_step()
        if self.kept is not None:
            self.kept.begin()
        self.state.routed.begin(self.loss_scale.value)
        loss_sum, tokens = self.computed(batches, train=True)
        routed = self._of_all_ranks(self.state.routed.of_step())
        small = (local.end(),) if local is not None else ()
        if self.script is not None:
            self._check_loop()
        if self.first_step:
            self.state.check_storage()
            self.first_step = False
        gradients = self.state.gradients()
        self.add_shared(gradients)
        self.norms.update(sum(self.shares.samples(step)[: self.dp]), self.job.global_batch)
        read = self._read(gradients, (loss_sum, tokens), small)
        self.pending, self._told = replace(read, routed=routed), replace(read, gradients={})
        heard = self._commit(self.pending, words)
        commit = heard.commit
        self.trip = self._judged(commit)
        if self.trip is not None and self.trip.do != "skip":
            self.pending = None
            self.state.buffers.take_back()
            raise Tripped(self.trip, self.faulty_rank(self.trip))
        self._done(commit)
        known = small and commit.finite and not commit.overflowed
        self.noise = self._noise(heard) if known else None
        return heard

    def _read(
        self, gradients: Gradients, sums: tuple[Number, Number], small: tuple[Number, ...]
    ) -> Pending:
        """What the commit is made of; here the host waits for the device, once in a step. `sums`:
        loss and tokens."""
        step, scale = self.state.step + 1, self.loss_scale.value**2
        each = self.state.square_norms(gradients)
        guard = self.rules.block_norm
        blocks = (each,) if guard is not None and step % guard.every == 0 else ()
        self.spans.marks.mark("others")
        (loss_sum,), (tokens,), (square_norm,), *more = read([*sums, each.sum(), *small, *blocks])
        # else gradients that an aborted kernel has left could pass for those of the step
        self.groups.check()
        noise = tuple(square / scale for (square,) in more[: len(small)])
        norms = self.state.by_block(gradients, more[-1]) if blocks else ()
        return Pending(
            step, gradients, loss_sum if self.speaks else 0.0, square_norm / scale,
            int(tokens) if self.counts else 0, tuple(norm / scale for norm in norms), noise,
        )  # fmt: skip

    def roll_forward(self, step: int, commit: Commit) -> None:
        """Applies the pending gradients of `step` by the commit that another rank has seen. Needs
        no group.

        Raises InternalError when this rank has no such gradients, or the commit is not that of the
        step.
        """
        if self.pending is None or self.pending.step != step:
            have = self.pending.step if self.pending else "none"
            raise InternalError(
                f"told to apply step {step}; the gradients here are those of step {have}"
            )
        self._check_samples(commit)
        self.trip = self._judged(commit)
        if self.trip is not None and self.trip.do != "skip":
            raise InternalError(
                f"told to apply step {step}, which no rank can have applied: {self.trip.reason}"
            )
        self._done(commit)

    def _check_loop(self) -> None:
        """The optimizer step is about to come: what the script has told with it, and whether it has
        trained this model."""
        assert self.script is not None
        self.clip_grad_norm = self.script.clip_grad_norm or self.job.clip_grad_norm
        if all(parameter.grad is None for parameter in self.state.parameters.values()):
            raise NotOfModel

    def _noise(self, heard: CommitReport) -> tuple[float, float] | None:
        """Of the step that was just done; None where one micro-batch had all of its samples."""
        sizes = self.shares.sizes(self.state.step - 1)
        if len([size for size in sizes if size]) < 2:
            return None
        return noise(heard.small_square_norm, heard.commit.square_norm, sizes)

    def _judged(self, commit: Commit) -> Trip | None:
        """What the guards say of the step that is being done: a function of the commit, the
        training state and the plan."""
        step, n_blocks = self.state.step + 1, self.state.profile.n_blocks
        blocks = (f"block {i}" for i in range(n_blocks))
        names = ["what is before the blocks", *blocks, "what is after the blocks"]
        if commit.overflowed and commit.finite and not self.loss_scale.exhausted:
            return None  # no more than a loss scale that was too large
        norms = dict(zip(names, commit.block_norms, strict=False))
        found = judge(self.rules, self.memory, commit, blocks=norms)
        if found is None:
            return None
        in_a_row = self.memory.in_a_row if self.memory is not None else 0
        return trip_of(
            found, self.rules.of(found[0]), step, before=self.plan.rolled_back, in_a_row=in_a_row
        )

    def faulty_rank(self, trip: Trip, together: bool = True) -> FaultyRank:
        """Which rank it was; all ranks take part here, or else (`together`) nobody is named."""
        assert self._told is not None
        told = self._told
        mine = (told.loss_sum, float(told.tokens), told.square_norm)
        step, n = trip.step - 1, self.plan.layout.dp
        stream = self.job.n_samples == N_POSITIONS
        ids = None if stream else [self.shares.ids_of(step, dp) for dp in range(n)]
        if not together:
            return FaultyRank(-1, None, UNNAMED, None if stream else tuple(self.shares.ids(step)))
        return find_faulty_rank(trip, mine, ids, plan=self.plan, groups=self.groups)

    def _done(self, commit: Commit) -> None:
        if self.trip is None:
            self._apply(commit)
        else:
            self.pending = None
            self.state.skip()
            self.loss_scale.after(commit.overflowed)
            self._note(commit)
        if self.memory is not None and self.trip is not None:
            self.memory.skipped()
        elif self.memory is not None and not commit.overflowed:
            self.memory.applied(commit)

    def _note(self, commit: Commit) -> None:
        self.committed = commit.numbers
        self.done.append((self.state.step, commit.told(skipped=self.trip is not None)))

    def _apply(self, commit: Commit) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        clip = self.clip_grad_norm
        factor = min(1.0, float(clip) / (commit.grad_norm + CLIP_EPSILON)) if clip else 1.0
        if commit.overflowed:
            self.state.skip()
        else:
            scale = factor / max(1.0, commit.tokens) / self.loss_scale.value
            gradients = self.state.reached.without(pending.gradients, commit.unreached)
            with axis_range("optimizer"):
                self.state.apply(gradients, scale, pending.routed)
        self.loss_scale.after(commit.overflowed)
        self._note(commit)

    def add_shared(self, gradients: dict[str, torch.Tensor]) -> None:
        """Of what several ranks have a part in besides FSDP's axis: a tied head, modules that are
        whole on each tp rank."""
        self._add_tied(gradients)
        self._add_summed(gradients)

    def _add_tied(self, gradients: dict[str, torch.Tensor]) -> None:
        """A tensor that stands on the first and on the last stage (tied head) gets the sum of both
        gradients."""
        if self.groups.tie is None:
            return
        specs, n_blocks = self.state.profile.specs, self.state.profile.n_blocks
        first = {spec.fqn for spec in specs if spec.block == -1}
        for fqn in sorted(
            {s.tied_to for s in specs if s.tied_to in first and s.block == n_blocks and s.trainable}
            - {None}
        ):
            if fqn in self.state.parameters:
                gradient = gradients.get(fqn)
                if gradient is None:
                    gradient = gradients[fqn] = torch.zeros_like(local(self.state.parameters[fqn]))
                with axis_range("pp tied tensor"):
                    self._sum_over(self.groups.tie, gradient)

    def _add_summed(self, gradients: dict[str, torch.Tensor]) -> None:
        """Parameters of style "summed" are used for a part of the heads on each tp rank: one
        all-reduce for all of them."""
        mesh = self.groups.mesh
        mine = [gradients[fqn] for fqn in sorted(self.state.summed) if fqn in gradients]
        if not mine or mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
            return
        flat = torch.cat([gradient.flatten() for gradient in mine])
        with axis_range("tp shared gradients"):
            self._sum_over(mesh.get_group("tp"), flat)
        parts = flat.split([gradient.numel() for gradient in mine])
        for gradient, part in zip(mine, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _sum_over(self, group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        """With `offload` gradients are in host memory; the group may be of devices alone."""
        there = tensor.to(self.groups.device)
        dist.all_reduce(there, group=group)
        if there is not tensor:
            tensor.copy_(there)

    def _of_all_ranks(self, counts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Added up over the ranks that have other samples, or other parts of them."""
        if not counts:
            return ()
        flat = torch.cat(counts)
        for group in self.groups.data_parallel:
            dist.all_reduce(flat, group=group)
        return tuple(torch.split(flat, [len(one) for one in counts]))

    def _commit(self, pending: Pending, words: CommitFields) -> CommitReport:
        """The one float64 all-reduce of the generation. Raises InternalError when the samples were
        not those of the step."""
        n_calls = 0 if self.script is None else 2
        n_blocks, n_small = len(pending.block_square_norms), len(pending.small)
        slots = Slots.of(
            self.plan.layout, n_blocks, n_small=n_small, n_calls=n_calls,
            n_reached=len(self.state.reached.names),
        )  # fmt: skip
        vector = self.groups.commit.all_reduce(self._part(pending, words).pack(slots))
        heard = CommitReport.unpack(vector, slots)
        if heard.calls_differ:
            self._refuse_calls()
        self._check_samples(heard.commit)
        each = zip(heard.tokens, self.shares.samples(self.state.step), strict=True)
        fullest = max(tokens / n_samples for tokens, n_samples in each if n_samples)
        mean = heard.commit.tokens / self.job.global_batch
        self.imbalance = fullest / mean if mean else 0.0
        self.expert_load = fullest_experts(self.plan.layout, heard.routed)
        return heard

    def _refuse_calls(self) -> None:
        """Raises ProgramError, the same on every rank: gradients to which not all have come with
        the same calls may be made of what belongs together in no way."""
        assert self.script is not None
        self.pending = None
        self.state.buffers.take_back()
        said = gather_words(
            [astuple(part) for part in self.script.calls.parts()], self.groups.commit
        )
        ranks = {rank: parts_of(words, rank) for rank, words in enumerate(said)}
        if unequal := difference(ranks):
            raise ProgramError(unequal)
        settings = dict(islice(self.script.calls.settings.items(), SETTINGS_MOST))
        found = other_settings(gather_numbers(settings, self.groups.commit))
        why = found or f"the ranks have not made the same calls; {RULE}"
        raise ProgramError(f"step {self.state.step + 1}: {why}")

    def _part(self, pending: Pending, words: CommitFields) -> RankPart:
        overflowed = self.loss_scale.on and not math.isfinite(pending.square_norm)
        sums = Commit(
            0.0 if overflowed else pending.square_norm, pending.loss_sum, pending.tokens,
            digest(self.shares.ids_of(self.state.step, self.dp)) if self.counts else (0, 0),
            overflowed, pending.block_square_norms,
        )  # fmt: skip
        units = self.shares.work(self.state.step, self.dp) * self.spans.n_blocks
        group = self.plan.layout.tp * self.plan.layout.cp
        unit_s = self.spans.taken_s() * group / units if units else 0.0
        calls = self.script.calls.take_mark() if self.script is not None else 0
        return RankPart(
            self.rank, self.dp, sums, words, unit_s, sum(pending.small), calls,
            self.state.taken_routed(), self.state.reached.flags,
        )  # fmt: skip

    def _check_samples(self, commit: Commit) -> None:
        expected = self.shares.digest(self.state.step)
        if commit.samples != expected:
            raise InternalError(
                f"step {self.state.step + 1}: the ranks trained on other samples "
                f"({commit.samples}) than the order says ({expected})"
            )
