"""What forward and backward passes of a small copy keep for later ones: what no new worker gets, or
what follows from the samples of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elastic.worker.equivalence.compare_values import double
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import Still
from elastic.worker.equivalence.passes.python_numbers import numbers_beside, numbers_of
from elastic.worker.equivalence.small_copy import SmallCopy
from elastic.worker.program.calls import call_model, loss_of
from elastic.worker.program.norms.batch_norms import norms_of

ROWS = 2  # of the samples in a pass
LARGE_BUFFER = 1 << 20  # elements; those of more are tables
MOST_FLOP = 1e11  # of the passes here
STEEP = 1e4  # times a loss, so that whoever limits gradients does
AGREE, SMALL = 3e-4, 1e-6  # of a tensor's largest element, and of that of all gradients


@dataclass(frozen=True)
class KeptByPasses:
    """'' = nothing. `lost`: what no new worker gets; `of_samples`: what ranks have different
    values of."""

    lost: str = ""
    of_samples: str = ""


def kept_by_passes(small: SmallCopy, batch: Batch) -> KeptByPasses:
    """Of passes of the same samples, one after another. What raises, or takes too long, is not
    judged here."""
    if flop_of(small, batch) * 3 > MOST_FLOP:
        return KeptByPasses()
    try:
        model = small.anew(small.dtype)
        model.train(not small.program.batch_dependent)
        trial = ModelPasses(small, model)
        with Still(), python_random(0.999):
            first = trial.run(rows_of(batch, 0, ROWS))
            once = trial.run(rows_of(batch, 0, ROWS))
            if once.changed:
                return KeptByPasses(_number(once.changed))
            if weights := first.weights or once.weights:
                return KeptByPasses(_weight(weights[0]))
            if name := next((n for n in once.forward if n not in trial.persistent), ""):
                return KeptByPasses(_lost_buffer(name))
            written = [name for name in once.backward if name not in once.forward]
            if not written or small.program.batch_dependent:
                return KeptByPasses()
            trial.put(once.before)
            again = trial.run(rows_of(batch, ROWS, 2 * ROWS))
    except Exception:  # noqa: BLE001 - the user's model: the layouts tell what it raises
        return KeptByPasses()
    for name in written:
        if not torch.equal(once.after[name], again.after[name]):
            return KeptByPasses(of_samples=_written_backward(name, small))
    return KeptByPasses()


def gradients_see_others(small: SmallCopy, batch: Batch) -> str:
    """Are the gradients of samples others than the sum of those of each, where they are large?
    '' = no, or it cannot be told; else what is said of it."""
    program = small.program
    if program.batch_dependent or norms_of([small.model]) or flop_of(small, batch) * 4 > MOST_FLOP:
        return ""
    try:
        name, off = _apart(small, batch, STEEP)
        if off <= AGREE or off <= 4 * _apart(small, batch, 1.0)[1]:
            return ""
    except Exception:  # noqa: BLE001 - see above
        return ""
    return (
        f"the gradient of {ROWS} samples, where it is large, is not the sum of those of each: that "
        f"of {name} differs by {off:.1%} of its largest element, so something in the backward pass "
        "(a hook, an autograd.Function) acts on the samples of one rank together; let it act on "
        f"each by itself, clip by clip_grad_norm in job.yaml, or say {program.anyway} to train on "
        "all the same"
    )


def _apart(small: SmallCopy, batch: Batch, times: float) -> tuple[str, float]:
    """The parameter whose gradient of two samples differs most from the sum of two, and by how much
    of its largest element."""
    model = small.anew(torch.float64).train()
    trial = ModelPasses(small, model)
    before, found = trial.buffers(), []
    rows = [(0, ROWS), *((i, i + 1) for i in range(ROWS))]
    with Still(), python_random(0.999):
        for start, stop in rows:
            trial.put(before)
            trial.run(double(rows_of(batch, start, stop)), times)
            found.append(
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            )
    together, *each = found
    most = max((float(g.abs().max()) for g in together.values() if g.numel()), default=0.0)
    worst = ("", 0.0)
    for name, gradient in together.items():
        if not gradient.numel():
            continue
        parts = sum((one[name] for one in each if name in one), torch.zeros_like(gradient))
        size = max(float(gradient.abs().max()), SMALL / AGREE * most, 1e-30)
        off = float((gradient - parts).abs().max()) / size
        worst = max(worst, (name, off), key=lambda one: one[1])
    return worst


@dataclass
class _Left:
    """What one pass has changed."""

    before: dict[str, Tensor]
    after: dict[str, Tensor] = field(default_factory=dict)
    forward: list[str] = field(default_factory=list)  # buffers
    backward: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # numbers
    weights: list[str] = field(default_factory=list)


class ModelPasses:
    """Passes of one model."""

    def __init__(self, small: SmallCopy, model: nn.Module) -> None:
        self.program, self.model = small.program, model
        self.persistent = set(model.state_dict())

    def buffers(self) -> dict[str, Tensor]:
        return buffers_of(self.model)

    def put(self, values: Mapping[str, Tensor]) -> None:
        put_buffers(self.model, values)

    def run(self, batch: Batch, times: float = 1.0, *, fresh: bool = True) -> _Left:
        """`fresh`: without the gradients of passes before."""
        left, numbers = _Left(self.buffers()), self._numbers()
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        if fresh:
            self.model.zero_grad()
        loss = self.loss(batch) * times
        between = self.buffers()
        loss.backward()
        left.after = self.buffers()
        left.forward = _changed(left.before, between)
        left.backward = _changed(between, left.after)
        after = self._numbers()
        left.changed = [name for name in after if after[name] != numbers.get(name)]
        left.weights = changed_weights(self.model, weights)
        return left

    def loss(self, batch: Batch) -> Tensor:
        given = {key: x.clone() for key, x in batch.items()}
        return loss_of(self.program, call_model(self.program, self.model, given), given)

    def _numbers(self) -> dict[str, int | float]:
        return numbers_beside(self.program, self.model) | numbers_of(self.model)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of those that are not large."""
    return {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if buffer.numel() <= LARGE_BUFFER
    }


def put_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Also where the model has replaced its own."""
    for name, value in values.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._buffers[leaf] = value.clone()


def changed_weights(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Those whose values are others now."""
    return [
        name
        for name, p in model.named_parameters()
        if name in before and not torch.equal(p.detach(), before[name])
    ]


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    return [n for n, value in after.items() if n in before and not torch.equal(value, before[n])]


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    return {key: x[start:stop] for key, x in batch.items()}


def flop_of(small: SmallCopy, batch: Batch) -> float:
    """Of a pass of so many samples."""
    positions = max((x.shape[1] for x in batch.values() if x.ndim > 1), default=1)
    return small.flop * ROWS * positions


def _number(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return (
        f"each pass changes the number {names[0]}{more}, which no checkpoint has and no new worker "
        "gets: keep it in a buffer of the model (self.register_buffer), which is moved and stored"
    )


def _weight(name: str) -> str:
    return (
        f"a pass writes the weight {name}: what it writes is lost where the weight is cut; compute "
        "a value from the weight and use that"
    )


def _lost_buffer(name: str) -> str:
    return (
        f"each pass changes the buffer {name}, which is not in the model's state_dict, so that no "
        "checkpoint has it and no new worker gets it: register it without persistent=False"
    )


def _written_backward(name: str, small: SmallCopy) -> str:
    return (
        f"the backward pass writes the buffer {name} from the samples of one rank; leave that out, "
        f"or say {small.program.anyway} to train on all the same"
    )
