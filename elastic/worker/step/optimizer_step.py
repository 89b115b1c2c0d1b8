"""One optimizer step of one rank: microbatches, the commit all-reduce, guards, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from elastic.data.batches import item_of
from elastic.data.budget import TokenBudget, budget_of
from elastic.data.order import digest
from elastic.data.streams import N_POSITIONS
from elastic.errors import InternalError, ProgramError
from elastic.program import Program
from elastic.reshard.rank_boxes import LOSS_SCALE
from elastic.types import Job, Plan
from elastic.types.grid import coordinates, stages_at
from elastic.worker.parallel.context_parallel import Sequence
from elastic.worker.parallel.model_options import begin_microbatch
from elastic.worker.parallel.parallelize import local
from elastic.worker.parallel.pipeline import Pipeline
from elastic.worker.process.doing import doing
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.readback import Incoming, Number, read
from elastic.worker.process_groups.groups import Groups
from elastic.worker.program.calls import (
    call_model,
    count_of,
    count_there,
    cut_rows,
    first_rows,
    inputs_of,
    keywords_of,
    loss_of,
    rows_in,
)
from elastic.worker.program.commit import Commit
from elastic.worker.program.guards import GuardMemory, Trip, judge, trip_of
from elastic.worker.program.loop_program import LoopProgram
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.batch_shares import BatchShares
from elastic.worker.step.block_timing import BlockTiming
from elastic.worker.step.commit_vector import CommitFields, CommitReport, RankPart, Slots
from elastic.worker.step.evaluation import modes_kept
from elastic.worker.step.faulty_rank import UNNAMED, FaultyRank, Tripped, find_faulty_rank
from elastic.worker.step.gradient_noise import LocalGradients, cannot, noise
from elastic.worker.step.loss_scale import LossScale
from elastic.worker.step.sums import Sums

Batch = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]
Loss = Callable[[Any, range], torch.Tensor]  # of a model's output and the numbers of its rows
CLIP_EPSILON = 1e-6


class BatchScript(Protocol):
    """A user's loop that computes the gradients of a step (loop.script_host)."""

    clip_grad_norm: float | None

    def compute(self, batch: Batch, step: int, epoch: int) -> tuple[Number, Number]: ...


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


def _n_rows(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


def seed(number: int, device: torch.device) -> None:
    """As torch.manual_seed, of the CPU's generator and the device's: that formats a traceback for
    each other kind of device."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


class Stepper:
    """Runs the steps of one generation on one rank."""

    def __init__(
        self, program: Program, job: Job, plan: Plan, *, state: TrainState, groups: Groups,
        faults: DeviceFaults | None = None,
    ) -> None:  # fmt: skip
        self.program, self.job, self.plan, self.state, self.groups = (
            program,
            job,
            plan,
            state,
            groups,
        )
        self.rank = state.rank
        self.at = coordinates(plan.layout, self.rank)
        self.dp = self.at.dp(plan.layout)
        self.device = groups.device
        # and the rows and microbatches that it was made for
        self._pipeline: tuple[tuple[int, int], Pipeline] | None = None
        self._staged: list[nn.Module] | None = None
        self.spans = BlockTiming(
            state.models, program, self.device, faults=faults or DeviceFaults()
        )
        self._incoming = Incoming(self.device)
        # batches of the step behind the one under way, if they are read
        self.coming: Callable[[], list[Batch]] = list
        last_stage = self.at.pp == plan.layout.pp - 1
        # for the loss of its part of the sequences of its samples
        self.speaks = last_stage and self.at.tp == 0
        self.counts = self.speaks and self.at.cp == 0  # its samples and their tokens
        self.sequence = Sequence(program, plan.layout, self.at, groups=groups)
        self.shares = BatchShares(job, plan)
        self.has_blocks = not plan.layers or any(
            plan.layers[stage] for stage in stages_at(plan.layout, self.at.pp)
        )
        cut = plan.layout.tp > 1 and "sequence_colwise_loss" in program.tp.values()
        self.cut_loss: Callable[[], AbstractContextManager[None]] = (
            loss_parallel if cut else nullcontext
        )
        self.first_step = True
        self._metrics: Sums | None = None  # while evaluating
        self.pending: Pending | None = None
        box = state.tensors.get(LOSS_SCALE)
        self.loss_scale = LossScale(box[1] if box is not None else None)
        self.script: BatchScript | None = None  # whose loop computes the gradients
        self.clip_grad_norm: float | None = job.clip_grad_norm
        # of the newest step: tokens per sample of the rank that had the most, over the mean of all
        self.imbalance = 0.0
        # what the commit of the newest step that was done gave
        self.committed: tuple[float, ...] = ()
        self.rules = job.guards
        self.memory: GuardMemory | None = None  # of the guards, in the training state
        self.trip: Trip | None = None  # of the newest step, where a guard has skipped it
        self.noise_every = (
            0
            if cannot(plan, state.profile, isinstance(program, LoopProgram))
            else job.noise_scale.every
            if job.noise_scale
            else 0
        )
        self.local = LocalGradients(state.models) if self.noise_every else None
        self.noise: tuple[float, float] | None = None  # of the newest step, where it was measured
        self._told: Pending | None = None  # what this rank has put into the newest commit

    def read_by(self, dataset: Any) -> None:
        """What the steps are cut by, where the job gives micro-batches a budget of tokens."""
        self.shares = BatchShares(self.job, self.plan, self._budget_of(dataset))

    def _budget_of(self, dataset: Any) -> TokenBudget | None:
        return budget_of(self.job, dataset, self.sequence.multiple)

    # ------------------------------------------------------------------------------------------
    # forward and backward

    def forward_backward(
        self,
        batches: Iterable[Batch],
        train: bool,
        valid: Iterable[int] | None = None,
        *,
        n_microbatches: int = 0,
    ) -> tuple[float, int]:
        """Loss sum and token count of this rank's samples; `valid`: only so many rows of each batch
        count (the rest is filling). A single batch is cut into the plan's micro-batches (or
        `n_microbatches`); several are micro-batches themselves."""
        (loss_sum,), (tokens,) = read(
            self._computed(batches, train, valid, n_microbatches=n_microbatches)
        )
        return loss_sum, int(tokens)

    def _computed(
        self,
        batches: Iterable[Batch],
        train: bool,
        valid: Iterable[int] | None = None,
        *,
        n_microbatches: int = 0,
    ) -> tuple[Number, Number]:
        """The same as scalar tensors, where they are still on the device; tokens are counted before
        a batch is copied there."""
        given = list(batches)
        counting = list(valid) if valid is not None else [_n_rows(batch) for batch in given]
        if isinstance(self.program, LoopProgram):
            return self._by_script(
                self._here(given, train)[0], train, None if valid is None else counting[0]
            )
        tokens = 0
        for batch, n in zip(given, counting, strict=True):
            tokens += count_of(self.program, {k: v[:n] for k, v in batch.items()}) if n else 0
        batches = self._here(given, train)
        scale = self.loss_scale.value if train else 1.0
        parts = [
            (batch, self._loss_on(batch, n, scale))
            for batch, n in zip(map(self.sequence.cut, batches), counting, strict=True)
        ]
        with self.sequence.running(blocks_here=self.has_blocks), self.cut_loss():
            loss_sum = self._passes(parts, train, n_microbatches or self.n_microbatches)
        return loss_sum if scale == 1.0 else loss_sum / scale, tokens

    def _here(self, batches: Iterable[Batch], train: bool) -> list[Batch]:
        """On the device; those of the next training step, if they were read already, are sent there
        meanwhile."""
        here = [self._incoming.take(batch) for batch in batches]
        if train:
            self._incoming.send(self.coming())
        return here

    def _loss_on(self, batch: Batch, valid: int, scale: float) -> Loss:
        """The loss of these rows of the batch, of those that count: the first `valid`."""

        def loss(output: Any, rows: range) -> torch.Tensor:
            if rows.stop > valid:
                rows = range(rows.start, max(rows.start, valid))
                output = first_rows(output, len(rows))
            chosen = rows_in(batch, rows)
            if self._metrics is not None and self.program.metrics is not None and len(rows):
                # on every tp rank: of logits that are cut it has collectives
                found = self.program.metrics(output, chosen)
                self._metrics.add(found, "Program.metrics", self.speaks)
            value = loss_of(self.program, output, chosen)
            return value if scale == 1.0 else value * scale

        return loss

    def _passes(
        self, parts: Iterable[tuple[Batch, Loss]], train: bool, n_microbatches: int
    ) -> torch.Tensor:
        """Forward (and backward) of every microbatch: the loss sum, a float64 scalar on the device;
        0 where another stage has it."""
        whole, *others = parts
        pipeline = self.pipeline_of(_n_rows(whole[0]), n_microbatches)
        if pipeline is not None:
            batch, loss = whole
            inputs, keywords = inputs_of(self.program, batch), keywords_of(self.program, batch)
            return pipeline.run(inputs, keywords, _n_rows(batch), loss=loss, train=train).double()
        n = 1 if others else n_microbatches
        pieces = [
            (batch, loss, rows)
            for batch, loss in (whole, *others)
            for rows in cut_rows(_n_rows(batch), n)
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (batch, loss, rows) in enumerate(pieces, 1):
            if train and len(pieces) > 1:
                begin_microbatch(self.state.model, self.plan.layout.zero_stage, i == len(pieces))
            value = loss(call_model(self.program, self.state.model, rows_in(batch, rows)), rows)
            if train:
                value.backward()
            total.add_(value.detach())
        return total

    @property
    def n_microbatches(self) -> int:
        """Of this rank in the step that comes next or is under way."""
        return self.shares.microbatches(self.state.step)[self.dp]

    def pipeline_of(self, n_rows: int, n_microbatches: int) -> Pipeline | None:
        """For that many rows of a batch: stages know the shape of a microbatch. None = the layout
        has no stages."""
        if self.groups.pp is None:
            return None
        cut = n_rows, n_microbatches
        if self._pipeline is None or self._pipeline[0] != cut:
            self._pipeline = (
                cut,
                Pipeline(
                    self._stages(),
                    self.groups.pp,
                    self.plan.layout,
                    n=n_microbatches,
                    device=self.device,
                ),
            )
        return self._pipeline[1]

    def _stages(self) -> list[nn.Module]:
        """What this rank's stages are called as; made once, since a program may change the module
        that it is given."""
        if self._staged is None:
            self._staged, layout = self.state.models, self.plan.layout
            if self.program.stage is not None:
                numbers = stages_at(layout, self.at.pp)
                each = zip(numbers, self.state.models, strict=True)
                self._staged = [self.program.stage(model, i, layout.n_stages) for i, model in each]
        return self._staged

    def _by_script(self, batch: Batch, train: bool, valid: int | None) -> tuple[Number, Number]:
        """The same where a script computes the loss; in a rehearsal nobody does."""
        if train:
            epoch = self.state.step * self.job.global_batch // self.job.n_samples
            return (
                self.script.compute(batch, self.state.step, epoch)
                if self.script is not None
                else (0.0, 0)
            )
        evaluation = self.program.evaluation  # type: ignore[attr-defined]
        kept = {k: v[: max(1, valid) if valid is not None else None] for k, v in batch.items()}
        # on every rank: its collectives need all of them
        value = evaluation(self.state.model, kept)
        if valid == 0:
            return 0.0, 0
        own = (
            value.detach()
            if isinstance(value, torch.Tensor) and value.numel() == 1
            else float(value)
        )
        return own, count_there(self.program, kept)

    def _check_loop(self) -> None:
        """The optimizer step is about to come: what the script has told with it, and whether it has
        trained this model."""
        assert self.script is not None
        self.clip_grad_norm = self.script.clip_grad_norm or self.job.clip_grad_norm
        if all(parameter.grad is None for parameter in self.state.parameters.values()):
            raise ProgramError(
                "the loss given to run.backward does not depend on run.model: call "
                "run.model(...), not the model that was given to elastic.loop"
            )

    # ------------------------------------------------------------------------------------------
    # one step

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
        local = self.local if self._measures_noise(step + 1) else None
        if local is not None:
            local.begin()
        self.state.buffers.note()
        self.spans.next_step()
        loss_sum, tokens = self._computed(batches, train=True)
        small = (local.end(),) if local is not None else ()
        if self.script is not None:
            self._check_loop()
        if self.first_step:
            self.state.check_storage()
            self.first_step = False
        gradients = self.state.gradients()
        self.add_shared(gradients)
        self.pending = self._read(gradients, (loss_sum, tokens), small)
        self._told = replace(self.pending, gradients={})
        heard = self._commit(self.pending, words)
        commit = heard.commit
        self.trip = self._judged(commit)
        if self.trip is not None and self.trip.do != "skip":
            self.pending = None
            self.state.buffers.take_back()
            raise Tripped(self.trip, self.faulty_rank(self.trip))
        self._done(commit)
        self.noise = (
            self._noise(heard) if small and commit.finite and not commit.overflowed else None
        )
        return heard

    def _read(
        self, gradients: Gradients, sums: tuple[Number, Number], small: tuple[Number, ...]
    ) -> Pending:
        """What the commit is made of; here the host waits for the device, once in a step. `sums`:
        loss and tokens."""
        step, scale = self.state.step + 1, self.loss_scale.value**2
        each = self.state.square_norms(gradients)
        blocks = (each,) if self._looks_at_blocks(step) else ()
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

    def _measures_noise(self, step: int) -> bool:
        return self.noise_every > 0 and step % self.noise_every == 0

    def _noise(self, heard: CommitReport) -> tuple[float, float] | None:
        """Of the step that was just done; None where one micro-batch had all of its samples."""
        sizes = self.shares.sizes(self.state.step - 1)
        if len([size for size in sizes if size]) < 2:
            return None
        return noise(heard.small_square_norm, heard.commit.square_norm, sizes)

    def _looks_at_blocks(self, step: int) -> bool:
        return self.rules.block_norm is not None and step % self.rules.block_norm.every == 0

    def _judged(self, commit: Commit) -> Trip | None:
        """What the guards say of the step that is being done: a function of the commit, the
        training state and the plan."""
        step, n_blocks = self.state.step + 1, self.state.profile.n_blocks
        names = [
            "what is before the blocks",
            *(f"block {i}" for i in range(n_blocks)),
            "what is after the blocks",
        ]
        if commit.overflowed and commit.finite and not self.loss_scale.exhausted:
            return None  # no more than a loss scale that was too large
        found = judge(
            self.rules,
            self.memory,
            commit,
            blocks=dict(zip(names, commit.block_norms, strict=False)),
        )
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
            self.committed = commit.numbers
        if self.memory is not None and self.trip is not None:
            self.memory.skipped()
        elif self.memory is not None and not commit.overflowed:
            self.memory.applied(commit)

    def _apply(self, commit: Commit) -> None:
        assert self.pending is not None
        pending, self.pending = self.pending, None
        clip = self.clip_grad_norm
        factor = min(1.0, float(clip) / (commit.grad_norm + CLIP_EPSILON)) if clip else 1.0
        if commit.overflowed:
            self.state.skip()
        else:
            self.state.apply(
                pending.gradients, factor / max(1.0, commit.tokens) / self.loss_scale.value
            )
        self.loss_scale.after(commit.overflowed)
        self.committed = commit.numbers

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
                dist.all_reduce(gradient, group=self.groups.tie)

    def _add_summed(self, gradients: dict[str, torch.Tensor]) -> None:
        """Parameters of style "summed" are used for a part of the heads on each tp rank: one
        all-reduce for all of them."""
        mine, mesh = (
            [gradients[fqn] for fqn in sorted(self.state.summed) if fqn in gradients],
            self.groups.mesh,
        )
        if not mine or mesh is None or "tp" not in (mesh.mesh_dim_names or ()):
            return
        flat = torch.cat([gradient.flatten() for gradient in mine])
        dist.all_reduce(flat, group=mesh.get_group("tp"))
        for gradient, part in zip(
            mine, flat.split([gradient.numel() for gradient in mine]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def _commit(self, pending: Pending, words: CommitFields) -> CommitReport:
        """The one float64 all-reduce of the generation. Raises InternalError when the samples were
        not those of the step."""
        slots = Slots.of(self.plan.layout, len(pending.block_square_norms), len(pending.small))
        vector = self.groups.commit.all_reduce(self._part(pending, words).pack(slots))
        heard = CommitReport.unpack(vector, slots)
        self._check_samples(heard.commit)
        self._weigh(heard)
        return heard

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
        return RankPart(self.rank, self.dp, sums, words, unit_s, sum(pending.small))

    def _weigh(self, heard: CommitReport) -> None:
        each = zip(heard.tokens, self.shares.samples(self.state.step), strict=True)
        fullest = max(tokens / n_samples for tokens, n_samples in each if n_samples)
        mean = heard.commit.tokens / self.job.global_batch
        self.imbalance = fullest / mean if mean else 0.0

    def _check_samples(self, commit: Commit) -> None:
        expected = digest(self.shares.ids(self.state.step))
        if commit.samples != expected:
            raise InternalError(
                f"step {self.state.step + 1}: the ranks trained on other samples "
                f"({commit.samples}) than the order says ({expected})"
            )

    # ------------------------------------------------------------------------------------------
    # validation

    def evaluate(
        self, dataset: Any, collate: Any, n_samples: int, *, tick: Callable[[], None]
    ) -> dict[str, float]:
        """Validation loss and the program's metrics, per token, and what its `evaluate` sums, per
        its own count, over `n_samples` samples spread evenly over the set; every rank gets the
        result. `tick` is called before each batch."""
        total = len(dataset)
        n_samples = min(n_samples or total, total)
        ids = [i * total // n_samples for i in range(n_samples)]
        per_call, budget = self.job.global_batch, self._budget_of(dataset)
        mine = self.shares.samples(self.state.step)[self.dp]
        least = 1 if budget is not None else mine  # rows of a batch: every rank calls the model
        sums = torch.zeros(2, dtype=torch.float64)
        self._metrics, own = Sums(), Sums()
        with modes_kept(self.state.models), torch.no_grad():
            self.state.train(False)
            for start in range(0, n_samples, per_call):
                tick()
                batches, valid = [], []
                for part in self.shares.cut_of(
                    ids[start : start + per_call], self.state.step, budget
                )[self.dp]:
                    rows = [*part.ids, *[0] * (least - len(part.ids))]
                    with doing("batch"):
                        batches.append(collate([item_of(dataset, i, part.length) for i in rows]))
                    valid.append(len(part.ids))
                value, tokens = self.forward_backward(batches, train=False, valid=valid)
                for batch, n in zip(batches, valid, strict=True):
                    self._evaluate_own(own, batch, n)
                sums[0] += value if self.speaks else 0.0
                sums[1] += tokens if self.counts else 0
        self.groups.commit.all_reduce(sums)
        self.groups.check()
        n_tokens = float(sums[1].clamp(min=1))
        metrics, self._metrics = self._metrics.over(self.groups.commit), None
        found = {key: value / n_tokens for key, value in metrics.items()} | own.over(
            self.groups.commit
        ).means()
        return {"validation_loss": float(sums[0]) / n_tokens} | found

    def _evaluate_own(self, sums: Sums, batch: Batch, valid: int) -> None:
        """Program.evaluate on the rows that count; ranks without any call it too, since its
        collectives need all of them."""
        if self.program.evaluate is None:
            return
        kept = {key: value[: max(1, valid)].to(self.device) for key, value in batch.items()}
        sums.add(
            self.program.evaluate(self.state.model, kept),
            "Program.evaluate",
            bool(valid) and self.counts,
        )
