"""Forward and backward of one rank: its samples cut into micro-batches, through stages of a
pipeline, on parts of sequences, or in the loop of a user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from elastic.config.masking import masked_text
from elastic.data.budget import TokenBudget, no_rows
from elastic.data.budget import budget_of as token_budget
from elastic.data.streams import Stream
from elastic.errors import ElasticError, ProgramError
from elastic.program import Program
from elastic.reshard.rank_boxes import LOSS_SCALE
from elastic.types import Job, Plan
from elastic.types.grid import axes_text, coordinates, stages_at
from elastic.user_frames import user_traceback
from elastic.worker.parallel.context_parallel import Sequence
from elastic.worker.parallel.keyed_draws import StepDraws, draws_of, row_keys
from elastic.worker.parallel.keyed_numbers import mixed
from elastic.worker.parallel.model_options import begin_microbatch
from elastic.worker.parallel.pipeline import Pipeline
from elastic.worker.parallel.stages.carried_values import carries
from elastic.worker.process.call_log import CallLog
from elastic.worker.process.cuda_errors import of_device_or_memory
from elastic.worker.process.fault_injection import DeviceFaults
from elastic.worker.process.readback import Incoming, Number, read
from elastic.worker.process_groups.axis_ranges import axis_range
from elastic.worker.process_groups.groups import Groups
from elastic.worker.process_groups.transport import is_collective_error
from elastic.worker.program.calls import (
    ModelCall,
    ModelCalls,
    call_model,
    count_of,
    count_there,
    cut_rows,
    first_rows,
    inputs_of,
    keywords_of,
    length_of,
    loss_of,
    rows_in,
)
from elastic.worker.program.loop_program import EVALUATE, LoopProgram, evaluated
from elastic.worker.program.norms.step_norms import StepNorms
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.batch_shares import BatchShares
from elastic.worker.step.block_timing import BlockTiming
from elastic.worker.step.logged_sums import KeptSums, Sums
from elastic.worker.step.loss_scale import LossScale

Batch = dict[str, torch.Tensor]
Loss = Callable[[Any, range], torch.Tensor]  # of a model's output and the numbers of its rows


class BatchScript(Protocol):
    """A user's loop that computes the gradients of a step (loop.script_host)."""

    clip_grad_norm: float | None

    @property
    def calls(self) -> CallLog: ...

    def compute(
        self, batch: Batch, step: int, epoch: int, *, ends_epoch: bool
    ) -> tuple[Number, Number]: ...


def _n_rows(batch: Batch) -> int:
    return int(next(iter(batch.values())).shape[0])


class ForwardBackward:
    """The passes of one generation on one rank: loss and gradients of its part of the samples."""

    def __init__(
        self, program: Program, job: Job, plan: Plan, *, state: TrainState, groups: Groups,
        faults: DeviceFaults | None = None,
    ) -> None:  # fmt: skip
        self.program, self.job, self.plan = program, job, plan
        self.state, self.groups = state, groups
        self.rank = state.rank
        self.at = coordinates(plan.layout, self.rank)
        self.dp = self.at.dp(plan.layout)
        self.device = groups.device
        self.passes_name = f"passes {axes_text(plan.layout, self.rank)}".rstrip()
        # and the rows and microbatches that it was made for
        # of training, of evaluation, of the probe of a layout
        self._pipelines: dict[str, tuple[Any, Pipeline]] = {}
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
        self.shares = BatchShares(job, plan, together=state.profile.together)
        self.norms = StepNorms(state.models, groups.data_parallel)
        self.has_blocks = not plan.layers or any(
            plan.layers[stage] for stage in stages_at(plan.layout, self.at.pp)
        )
        cut = plan.layout.tp > 1 and "sequence_colwise_loss" in program.tp.values()
        self.cut_loss: Callable[[], AbstractContextManager[None]] = (
            loss_parallel if cut else nullcontext
        )
        self.metrics: Sums | None = None  # while evaluating
        self.kept: KeptSums | None = None  # in steps, where the program tells numbers of its own
        box = state.tensors.get(LOSS_SCALE)
        self.loss_scale = LossScale(box[1] if box is not None else None)
        self.script: BatchScript | None = None  # whose loop computes the gradients
        self.draws = draws_of(program)
        self._stream: Stream | None = None

    def read_by(self, dataset: Any) -> None:
        """What the steps are cut by, where the job gives micro-batches a budget of tokens."""
        together = self.state.profile.together
        self.shares = BatchShares(self.job, self.plan, self.budget_of(dataset), together=together)
        self._stream = dataset if isinstance(dataset, Stream) else None

    def budget_of(self, dataset: Any) -> TokenBudget | None:
        return token_budget(self.job, dataset, self.sequence.multiple)

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
            self.computed(batches, train, valid, n_microbatches=n_microbatches)
        )
        return loss_sum, int(tokens)

    def computed(
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
            n_valid = None if valid is None else counting[0]
            return self._by_script(self._here(given, train)[0], train, n_valid)
        tokens = 0
        for batch, n in zip(given, counting, strict=True):
            tokens += count_of(self.program, {k: v[:n] for k, v in batch.items()}) if n else 0
        batches = self._here(given, train)
        scale = self.loss_scale.value if train else 1.0
        parts = [
            (batch, self._loss_on(batch, n, scale))
            for batch, n in zip(map(self.sequence.cut, batches), counting, strict=True)
        ]
        running = self.sequence.running(blocks_here=self.has_blocks)
        with axis_range(self.passes_name), running, self.cut_loss(), self._in_a_step(train):
            loss_sum = self._passes(parts, train, n_microbatches)
        return loss_sum if scale == 1.0 else loss_sum / scale, tokens

    def _in_a_step(self, train: bool, told: bool = False) -> AbstractContextManager[None]:
        """What is drawn inside is of samples."""
        if self.draws is None or not train:
            return nullcontext()
        return self.draws.step(self.plan.layout, self.at, told=told)

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
                if not rows:  # padding of an evaluation alone: losses need not bear no rows
                    return torch.zeros((), device=self.device)
                output = first_rows(output, len(rows))
            chosen = rows_in(batch, rows)
            if self.metrics is not None and self.program.metrics is not None and len(rows):
                # on every tp rank: of logits that are cut it has collectives
                found = self.program.metrics(output, chosen)
                self.metrics.add(found, "Program.metrics", self.speaks)
            elif self.kept is not None and self.program.log is not None and len(rows):
                with torch.no_grad():
                    found = self.program.log(output, chosen)
                self.kept.add(found, self.speaks, rows=(id(batch), rows.start))
            value = loss_of(self.program, output, chosen)
            return value if scale == 1.0 else value * scale

        return loss

    def _passes(
        self, parts: Iterable[tuple[Batch, Loss]], train: bool, n_microbatches: int
    ) -> torch.Tensor:
        """Forward (and backward) of every microbatch: the loss sum, a float64 scalar on the device;
        0 where another stage has it."""
        whole, *others = parts
        kind = "training" if train else "probe" if n_microbatches else "evaluation"
        n_microbatches = n_microbatches or self.n_microbatches
        given = [batch for batch, _ in (whole, *others)]
        drawing = self._drawing(given, map(self._length, given)) if train else None
        pipeline = self.pipeline_of(_n_rows(whole[0]), n_microbatches, kind)
        if pipeline is not None:
            batch, loss = whole
            if drawing is not None:
                drawing.begin(0, range(_n_rows(batch)))
            inputs, keywords = inputs_of(self.program, batch), keywords_of(self.program, batch)
            if self.draws is not None:
                self.draws.pause()  # a stage is first called with made-up values
            forward = partial(self._forward, drawing) if train else None
            n_rows = _n_rows(batch)
            found = pipeline.run(inputs, keywords, n_rows, loss=loss, train=train, forward=forward)
            return found.double()
        n, unit = 1 if others else n_microbatches, max(1, self.state.profile.together)
        pieces = [
            (which, batch, loss, rows)
            for which, (batch, loss) in enumerate((whole, *others))
            for rows in cut_rows(_n_rows(batch), n, unit if train else 1)
        ]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (which, batch, loss, rows) in enumerate(pieces, 1):
            if train:
                begin_microbatch(self.state.model, self.plan.layout, i, of=len(pieces))
            with self._forward(drawing, rows, which=which) if train else nullcontext():
                output = self._output(batch, rows)
            value = loss(output, rows)
            if train:
                value.backward()
            total.add_(value.detach())
        return total

    def _output(self, batch: Batch, rows: range) -> Any:
        """Of the model. Raises ProgramError where it cannot be called with no rows."""
        try:
            return call_model(self.program, self.state.model, rows_in(batch, rows))
        except ElasticError:
            raise
        except Exception as error:
            if rows or is_collective_error(error) or of_device_or_memory(error):
                raise
            raised = " ".join(f"{type(error).__name__}: {error}".split())
            where = "this rank has fewer samples of the step than another has micro-batches"
            told = ProgramError(no_rows(self.job, raised, where))
            told.add_note(masked_text(user_traceback(error)))
            raise told from None

    @contextmanager
    def _forward(
        self, drawing: StepDraws | None, rows: range, stage: int = 0, *, which: int = 0
    ) -> Iterator[None]:
        """A forward pass of these rows of a batch, through a stage, in a step."""
        if not self.program.batch_dependent:  # else each pass adds its samples to what is kept
            self.state.buffers.again(stage // self.plan.layout.pp)
        if drawing is not None:
            # stages of several groups go through all of the model's forward pass
            drawing.begin(which, rows, 0 if carries(self.program) else stage)
        with self.norms.passing(rows), self.state.routed.counting():
            yield

    def _drawing(self, batches: list[Batch], lengths: Iterable[int]) -> StepDraws | None:
        """None = nothing is drawn, or nobody knows whose samples these are (a rehearsal)."""
        if self.draws is None or self.draws.idle:
            return None
        step, seed = self.state.step, self.job.seed
        stream, shares = self._stream, self.shares
        cut = shares.cut_of(stream.positions(step), step) if stream else shares.cut(step)
        keys = row_keys(seed, step, [part.ids for rank in cut for part in rank])
        first = sum(len(rank) for rank in cut[: self.dp])
        mine = keys[first : first + len(cut[self.dp])]
        if [len(part) for part in mine] != [_n_rows(batch) for batch in batches]:
            return None
        return StepDraws(self.draws, mine, list(lengths), mixed(seed, step))

    def _length(self, batch: Batch) -> int:
        """Of the whole sequences of its samples; 0 where they have none."""
        return length_of(inputs_of(self.program, batch)) * self.plan.layout.cp

    @contextmanager
    def _called(self, drawing: StepDraws | None, call: ModelCall) -> Iterator[None]:
        """A script's call of its model, in a step."""
        with ExitStack() as around:
            if drawing is not None:
                around.enter_context(drawing.of_call(call, self.program, self.state.model))
            around.enter_context(self.norms.of_call(call))
            yield

    @property
    def n_microbatches(self) -> int:
        """Of this rank in the step that comes next or is under way."""
        return self.shares.microbatches(self.state.step)[self.dp]

    def pipeline_of(self, n_rows: int, n_microbatches: int, kind: str) -> Pipeline | None:
        """For that many rows of a batch: stages know the shape of a microbatch. None = the layout
        has no stages.

        torch passes made-up values through a new pipeline's stages to learn their shapes, with all
        collectives of FSDP: the data-parallel ranks, which may have unequal shares, make new ones
        at the same calls, each kind of call with its own."""
        if self.groups.pp is None:
            return None
        everyones = self.shares.samples(self.state.step) if kind == "training" else ()
        cut = n_rows, n_microbatches, everyones
        if self._pipelines.get(kind, ((),))[0] != cut:
            made = Pipeline(
                self._stages(), self.groups.pp, self.plan.layout, n=n_microbatches,
                device=self.device, carrying=carries(self.program),
            )  # fmt: skip
            self._pipelines[kind] = cut, made
        return self._pipelines[kind][1]

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
            step = self.state.step
            epoch, after = (self.job.position_at(n) // self.job.n_samples for n in (step, step + 1))
            ends = after > epoch or step + 1 == self.job.steps
            if self.script is None:
                return 0.0, 0
            # how long its sequences are is told by what it calls the model with
            drawing = self._drawing([batch], [0])
            calls = ModelCalls(_n_rows(batch), partial(self._called, drawing))
            drawn = self._in_a_step(train, told=True)
            with calls.of(self.state.model), self.state.routed.counting(), drawn:
                found = self.script.compute(batch, step, epoch, ends_epoch=ends)
            self.norms.check_all(calls)
            if drawing is not None:
                drawing.check_all(calls)
            return found
        evaluation = self.program.evaluation  # type: ignore[attr-defined]
        kept = {k: v[: max(1, valid) if valid is not None else None] for k, v in batch.items()}
        # on every rank: its collectives need all of them
        value, beside = evaluated(evaluation(self.state.model, kept))
        if valid == 0:
            return 0.0, 0
        if self.metrics is not None:
            self.metrics.add(beside, EVALUATE, self.speaks)
        own = value.detach() if isinstance(value, torch.Tensor) else value
        return own, count_there(self.program, kept)
