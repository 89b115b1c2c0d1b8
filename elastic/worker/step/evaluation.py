"""Forward passes that leave no trace: evaluation mode, numbers drawn from a seed, buffers and modes
as they were afterwards. And what they are for: loss and metrics of a validation set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from elastic.data.collate import collate
from elastic.data.open_datasets import Sets
from elastic.data.sample_draws import SampleDraws
from elastic.program import drawing
from elastic.types import Job
from elastic.worker.process.doing import doing
from elastic.worker.process_groups.groups import Groups
from elastic.worker.state.train_state import TrainState
from elastic.worker.step.forward_backward import Batch, ForwardBackward
from elastic.worker.step.logged_sums import Sums


@contextmanager
def modes_kept(models: list[nn.Module]) -> Iterator[None]:
    """Each module is in training or evaluation mode afterwards as it was before: what the program
    has frozen stays so."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def drawing_on(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """As `drawing`, on the device too."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with drawing(seed), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(state: TrainState, job: Job, device: torch.device) -> Iterator[None]:
    """Of a generation's own model, without gradients; the same kernels as ever but for a job that
    compiles them."""
    buffers = state.buffers.watched
    before = [buffer.clone() for buffer in buffers]
    eager = torch.compiler.set_stance("force_eager") if job.compile else nullcontext()
    try:
        with modes_kept(state.models), drawing_on(job.seed, device), torch.no_grad(), eager:
            state.train(False)
            yield
    finally:
        state.buffers.settle()
        with torch.no_grad():
            for buffer, was in zip(buffers, before, strict=True):
                buffer.copy_(was)


def is_due(job: Job, step: int) -> bool:
    return step == job.steps or bool(step and job.eval_every and step % job.eval_every == 0)


def newest(groups: Groups, mine: int) -> int:
    """The newest step that any rank has made a validation of; every rank calls it."""
    return int(groups.commit.gather(torch.tensor(mine)).max())


def validate(
    passes: ForwardBackward,
    validation: Any,
    n_samples: int,
    *,
    draws: SampleDraws,
    tick: Callable[[], None],
) -> dict[str, float]:
    """What `validate_set` finds; of several sets, each by its name, `validation_loss` is the mean
    of theirs."""
    if not isinstance(validation, Sets):
        return validate_set(passes, validation, n_samples, draws=draws, tick=tick)
    each = {
        name: validate_set(passes, one, n_samples, draws=draws, tick=tick)
        for name, one in validation.items()
    }
    mean = sum(metrics["validation_loss"] for metrics in each.values()) / len(each)
    named = {
        f"{key}.{name}": value for name, metrics in each.items() for key, value in metrics.items()
    }
    return {"validation_loss": mean} | named


def validate_set(
    passes: ForwardBackward,
    dataset: Any,
    n_samples: int,
    *,
    draws: SampleDraws,
    tick: Callable[[], None],
) -> dict[str, float]:
    """Validation loss and the program's metrics, per token, and what its `evaluate` sums, per its
    own count, over `n_samples` samples spread evenly over the set, which are the same each time;
    every rank gets the result. `tick` is called before each batch."""
    total, step, commit = len(dataset), passes.state.step, passes.groups.commit
    n_samples = min(n_samples or total, total)
    ids = [i * total // n_samples for i in range(n_samples)]
    per_call, budget = passes.job.global_batch, passes.budget_of(dataset)
    mine = passes.shares.samples(step)[passes.dp]
    least = 1 if budget is not None else mine  # rows of a batch: every rank calls the model
    sums = torch.zeros(2, dtype=torch.float64)
    passes.metrics, own = Sums(), Sums()
    with modes_kept(passes.state.models), torch.no_grad():
        passes.state.train(False)
        for start in range(0, n_samples, per_call):
            tick()
            batches, valid = [], []
            some = ids[start : start + per_call]
            for part in passes.shares.cut_of(some, step, budget)[passes.dp]:
                rows = [*part.ids, *[0] * (least - len(part.ids))]
                with doing("batch"):
                    batches.append(collate([draws.item(dataset, i, part.length) for i in rows]))
                valid.append(len(part.ids))
            value, tokens = passes.forward_backward(batches, train=False, valid=valid)
            for batch, n in zip(batches, valid, strict=True):
                _add_own(own, passes, batch, n_valid=n)
            sums[0] += value if passes.speaks else 0.0
            sums[1] += tokens if passes.counts else 0
    commit.all_reduce(sums)
    passes.groups.check()
    n_tokens = float(sums[1].clamp(min=1))
    metrics, passes.metrics = passes.metrics.over(commit), None
    found = {key: value / n_tokens for key, value in metrics.items()} | own.over(commit).means()
    return {"validation_loss": float(sums[0]) / n_tokens} | found


def _add_own(sums: Sums, passes: ForwardBackward, batch: Batch, *, n_valid: int) -> None:
    """Program.evaluate on the rows that count; ranks without any call it too, since its collectives
    need all of them."""
    if passes.program.evaluate is None:
        return
    kept = {key: value[: max(1, n_valid)].to(passes.device) for key, value in batch.items()}
    found = passes.program.evaluate(passes.state.model, kept)
    sums.add(found, "Program.evaluate", bool(n_valid) and passes.counts)
