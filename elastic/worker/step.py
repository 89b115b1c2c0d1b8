"""One optimizer step of one rank: microbatches, the commit all-reduce, guards, the update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastic.data.order import digest, digest_text, sample_ids, share
from elastic.errors import InternalError, ProgramError
from elastic.mesh import coordinates
from elastic.program import Program
from elastic.types import Plan
from elastic.worker.groups import Groups
from elastic.worker.parallelize import local
from elastic.worker.pipeline import Pipeline
from elastic.worker.train_state import TrainState

Batch = dict[str, torch.Tensor]
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class Commit:
    """What all ranks know after the commit all-reduce of a step (sums over the generation)."""

    square_norm: float
    loss_sum: float
    tokens: float
    stop: bool
    save: bool
    copies_done: bool  # every rank's part of the peer copy in flight is stored
    digest: str


@dataclass(frozen=True)
class Words:
    """This rank's say in a commit."""

    stop: bool = False
    save: bool = False
    copy_done: bool = False


def inputs_of(program: Program, batch: Batch) -> Any:
    """What the model is called with."""
    if program.inputs is not None:
        return program.inputs(batch)
    for key in ("input", "input_ids"):
        if key in batch:
            return batch[key]
    raise ProgramError(f"a sample has the keys {sorted(batch)}; name one of them 'input', or give Program.inputs")


def count_of(program: Program, batch: Batch) -> int:
    """Tokens (or samples) that the loss sums over."""
    if program.count is not None:
        return int(program.count(batch))
    if "target" in batch and not batch["target"].is_floating_point():
        return int((batch["target"] != -100).sum())
    return int(next(iter(batch.values())).shape[0])


def loss_of(program: Program, output: Any, batch: Batch) -> torch.Tensor:
    """The program's loss, a scalar. Raises ProgramError when it is none."""
    value = program.loss(output, batch)
    if not isinstance(value, torch.Tensor) or value.ndim:
        found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ProgramError(f"Program.loss returned {found}; it must return the sum over the batch, a scalar tensor")
    return value


class Stepper:
    """Runs the steps of one generation on one rank."""

    def __init__(self, program: Program, job: Mapping[str, Any], plan: Plan, state: TrainState, groups: Groups) -> None:
        self.program, self.job, self.plan, self.state, self.groups = program, job, plan, state, groups
        self.rank = state.rank
        self.at = coordinates(plan.layout, self.rank)
        self.dp = self.at.dp(plan.layout)
        self.share = share(plan.samples, self.dp)  # of a step's sample ids
        self.device = groups.device
        self.pipeline: Pipeline | None = None
        if groups.pp is not None:
            self.pipeline = Pipeline(state.model, groups.pp, plan.n_microbatches, self.device)
        last_stage = self.at.pp == plan.layout.pp - 1
        self.counts = last_stage and self.at.tp == 0 and self.at.cp == 0  # this rank speaks for its samples
        self.first_step = True

    # ------------------------------------------------------------------------------------------ forward and backward

    def forward_backward(self, batch: Batch, train: bool, valid: int | None = None) -> tuple[float, int]:
        """Loss sum and token count of this rank's samples; `valid`: only the first rows count (the rest is filling)."""
        batch = {k: v.to(self.device) for k, v in batch.items()}
        n_rows = int(next(iter(batch.values())).shape[0])
        valid = n_rows if valid is None else valid
        counted = {k: v[:valid] for k, v in batch.items()}

        def loss(output: Any, rows: torch.Tensor) -> torch.Tensor:
            keep = rows < valid
            if bool(keep.all()):
                return loss_of(self.program, output, {k: v[rows] for k, v in batch.items()})
            kept = rows[keep]
            return loss_of(self.program, output[keep], {k: v[kept] for k, v in batch.items()})

        tokens = count_of(self.program, counted) if valid else 0
        if self.pipeline is not None:
            value = self.pipeline.run(inputs_of(self.program, batch), n_rows, loss, train)
            return float(value), tokens
        total = 0.0
        for rows in torch.arange(n_rows, device=self.device).tensor_split(self.plan.n_microbatches):
            output = self.state.model(inputs_of(self.program, {k: v[rows] for k, v in batch.items()}))
            value = loss(output, rows)
            if train:
                value.backward()
            total += float(value.detach())
        return total, tokens

    # ------------------------------------------------------------------------------------------ one step

    def run(self, batch: Batch, words: Words) -> Commit:
        """Gradients, commit, update. Raises ProgramError for a loss that is not finite; the state then stays as it was."""
        step = self.state.step
        torch.manual_seed((int(self.job["seed"]) * 1_000_003 + step) * 65_537 + self.dp)
        loss_sum, tokens = self.forward_backward(batch, train=True)
        if self.first_step:
            self.state.check_storage()
            self.first_step = False
        gradients = self.state.gradients()
        self._add_tied(gradients)
        commit = self._commit(step, self.state.square_norm(gradients), (loss_sum, tokens), words)
        norm = math.sqrt(commit.square_norm) / commit.tokens if commit.tokens else 0.0
        if not (math.isfinite(commit.loss_sum) and math.isfinite(norm)):
            raise ProgramError(
                f"step {step + 1}: train_loss {commit.loss_sum / max(1.0, commit.tokens)}, gradient norm {norm}: not finite; "
                "lower the learning rate or look at the samples of this step"
            )
        clip = self.job.get("clip_grad_norm")
        factor = min(1.0, float(clip) / (norm + CLIP_EPSILON)) if clip else 1.0
        self.state.apply(gradients, factor / max(1.0, commit.tokens))
        return commit

    def _add_tied(self, gradients: dict[str, torch.Tensor]) -> None:
        """A tensor that stands on the first and on the last stage (tied head) gets the sum of both gradients."""
        if self.groups.tie is None:
            return
        for fqn in sorted({s.tied_to for s in self.state.profile.specs if s.tied_to is not None}):
            if fqn in self.state.parameters:
                gradient = gradients.get(fqn)
                if gradient is None:
                    gradient = gradients[fqn] = torch.zeros_like(local(self.state.parameters[fqn]))
                dist.all_reduce(gradient, group=self.groups.tie)

    def _commit(self, step: int, square_norm: float, loss: tuple[float, int], words: Words) -> Commit:
        """The one float64 all-reduce of the generation. Raises InternalError when the samples were not those of the step."""
        job, layout = self.job, self.plan.layout
        ids = sample_ids(int(job["n_samples"]), int(job["global_batch"]), int(job["seed"]), step)
        mine = digest(ids[self.share]) if self.counts else (0, 0)
        loss_sum, tokens = loss if self.counts else (0.0, 0)
        vector = torch.tensor(
            [square_norm, loss_sum, tokens, words.stop, words.save, words.copy_done, mine[0], mine[1]], dtype=torch.float64
        )
        if layout.world_size > 1:
            dist.all_reduce(vector, group=self.groups.plan)
        values = vector.tolist()
        seen, expected = (int(values[6]), int(values[7])), digest(ids)
        if seen != expected:
            raise InternalError(
                f"step {step + 1}: the ranks trained on other samples ({seen}) than the order says ({expected})"
            )
        done = int(values[5]) == layout.world_size
        return Commit(values[0], values[1], values[2], values[3] > 0, values[4] > 0, done, digest_text(seen))

    # ------------------------------------------------------------------------------------------ validation

    def evaluate(self, dataset: Any, collate: Any, n_samples: int) -> dict[str, float]:
        """Validation loss per token over `n_samples` samples spread evenly over the set; every rank gets the result."""
        total = len(dataset)
        n_samples = min(n_samples or total, total)
        ids = [i * total // n_samples for i in range(n_samples)]
        size, per_call = self.plan.samples[self.dp], sum(self.plan.samples)
        sums = torch.zeros(2, dtype=torch.float64)
        self.state.model.eval()
        with torch.no_grad():
            for start in range(0, n_samples, per_call):
                mine = ids[start : start + per_call][self.share]
                rows = mine + [ids[0]] * (size - len(mine))
                value, tokens = self.forward_backward(collate([dataset[i] for i in rows]), train=False, valid=len(mine))
                if self.counts:
                    sums += torch.tensor([value, tokens], dtype=torch.float64)
        self.state.model.train()
        if self.plan.layout.world_size > 1:
            dist.all_reduce(sums, group=self.groups.plan)
        return {"validation_loss": float(sums[0] / sums[1].clamp(min=1))}
