"""Does the body of a script's loop train on a few samples as on each of them alone? Its own lines
are run: with all samples, with each, and with all once more; with halves, too, where a sample alone
has no finite loss.

Nothing is updated in between: each step begins with the weights, the buffers, the extra state and
the random numbers of the first. What the body finds in `.grad` is what all ranks have summed: that
of all samples.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.user_frames import user_line
from elastic.worker.equivalence.compare_values import (
    LOSS_AGREES,
    REPEATS,
    ROUNDING_MOST,
    unlike_each,
)
from elastic.worker.equivalence.forward_trace import Batch, python_random
from elastic.worker.equivalence.no_randomness import DRAWN, Still, draws_left, quiet
from elastic.worker.equivalence.passes.kept_by_passes import SMALL, buffers_of, put_buffers
from elastic.worker.equivalence.passes.over_a_run import counts_of_others
from elastic.worker.loop.trial import NOT_THE_FIRST, ON_SHAPES
from elastic.worker.process.readback import Number
from elastic.worker.program.extra_state import ExtraState
from elastic.worker.program.loop_program import LoopProgram, OptimizerFactory, Own, clear_by

LOW = (torch.float16, torch.bfloat16)
NOISE = 1e-6  # of the loss of a token: no difference
AGREE = 1e-3  # of a tensor's largest element in the gradients of all samples, or of one
MOST_CALLS = 8  # of run.backward in a step, behind which `.grad` is what all ranks have summed


@dataclass
class _Step:
    """What came of one: `rows` of the samples, None = all."""

    rows: slice | None
    loss: float = 0.0
    count: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    n_backward: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)  # behind it


@dataclass
class BodyPasses:
    """`with_first`: before all that, a step 0, for what its model is called with."""

    with_first: bool = False
    steps: list[_Step] = field(default_factory=list)
    where: str = ""  # of the last run.backward
    low: bool = False  # something was computed in 16 bits
    drawn: set[str] = field(default_factory=set)
    begun: bool = False
    done: bool = False
    _now: _Step | None = None

    def begin(
        self, program: LoopProgram, optimizer: Own, module: nn.Module, *, batch: Batch
    ) -> None:
        """`module`: that is trained, with the script's own weights."""
        self._program, self._module, self._batch, self.begun = program, module, batch, True
        self.n = len(next(iter(batch.values())))
        order = [None, *(slice(i, i + 1) for i in range(self.n)), None]
        self._left: list[slice | None] = [None, *order] if self.with_first else order
        quiet(module)
        for norm in module.modules():  # statistics of a group of samples are those of a layout
            if isinstance(norm, _BatchNorm):
                norm.eval()
                norm.__dict__["train"] = lambda mode=True, own=norm: own
        if isinstance(program.optimizer, OptimizerFactory):
            clear_by(program.optimizer, optimizer, module)
        self._buffers = buffers_of(module)
        self._weights = {n: p.detach().clone() for n, p in module.named_parameters()}
        self._extra = ExtraState(program.extra_state)
        self._boxes = {
            spec.fqn: (None, torch.zeros(spec.shape, dtype=torch.uint8))
            for spec in self._extra.specs()
        }
        self._summed: list[dict[str, Tensor]] = []  # behind each run.backward of all samples
        self._around = ExitStack()

    # --------------------------------------------------------------------------- what the body sees

    @property
    def here(self) -> Mapping[str, int]:
        """A rank has all samples, or each has one (or a half)."""
        if self._now is None or self.with_first and len(self.steps) < 1:
            return NOT_THE_FIRST
        rows = self._now.rows
        n = 1 if rows is None else self.n // (rows.stop - rows.start)
        return ON_SHAPES | {"world_size": n, "n_shares": n}

    def next(self) -> Batch | None:
        """The samples of the next step; None: there is none."""
        self._end()
        if not self._left and self._alone_not_finite():
            self._left = [slice(0, self.n // 2), slice(self.n // 2, self.n)]
        if not self._left:
            self.done = True
            return None
        rows = self._left.pop(0)
        self._now = _Step(rows)
        self._restore()
        self._around = ExitStack()
        self._around.enter_context(warnings.catch_warnings(action="ignore"))  # none are shown
        self._around.enter_context(Still())
        self._python = self._around.enter_context(python_random(0.999))
        self._around.enter_context(_Precision(self))
        some = slice(None) if rows is None else rows
        return {key: x[some].clone() for key, x in self._batch.items()}

    def backward(self, call: Callable[[], None]) -> None:
        """`call` adds to `.grad` what this run.backward gives."""
        step, self.where = self._now, user_line()
        assert step is not None
        before = _gradients(self._module)
        self._module.zero_grad()
        call()
        own = _gradients(self._module)
        for name, gradient in own.items():
            known = step.gradients.get(name)
            step.gradients[name] = gradient.clone() if known is None else known + gradient
        if step.rows is None:
            summed = {**before, **own}
            summed |= {name: before[name] + own[name] for name in before.keys() & own.keys()}
            if len(self.steps) == self.with_first and step.n_backward < MOST_CALLS:
                self._summed.append({name: x.clone() for name, x in summed.items()})
        else:
            at = min(step.n_backward, len(self._summed) - 1)
            summed = {name: x.clone() for name, x in self._summed[at].items()}
        for name, p in self._module.named_parameters():
            p.grad = summed.get(name)
        step.n_backward += 1

    def stepped(self, loss_sum: Number, count: Number) -> None:
        assert self._now is not None
        self._now.loss, self._now.count = float(loss_sum), int(count)

    def close(self) -> None:
        if self.begun:
            self._around.close()

    # ---------------------------------------------------------------------------- between two steps

    def _end(self) -> None:
        """What stands behind run.step() has been done too."""
        self._around.close()
        if self._now is None:
            return
        self.drawn |= {*self._python, *DRAWN}
        self._extra.note(self._boxes)
        state = {name: box.clone() for name, (_, box) in self._boxes.items()}
        state |= buffers_of(self._module)
        state |= {name: p.detach().clone() for name, p in self._module.named_parameters()}
        self._now.state = state
        if self._now.rows is not None and self._now.rows.start:  # one is enough
            self._now.state = {}
        self.steps.append(self._now)
        self._now = None

    def _alone_not_finite(self) -> bool:
        """Has a sample alone no finite loss, where all have one, and no half was tried yet?"""
        whole, *rest = [math.isfinite(step.loss) for step in self.steps[self.with_first :]]
        return whole and len(rest) == self.n + 1 and not all(rest)

    @torch.no_grad()
    def _restore(self) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        put_buffers(self._module, self._buffers)
        for name, p in self._module.named_parameters():
            p.copy_(self._weights[name])
            p.grad = None
        self._extra.fresh(self._boxes)
        self._extra.load(self._boxes)

    # --------------------------------------------------------------------------------- what is said

    def lost(self) -> str:
        """What no new worker gets. '' = nothing, or it cannot be told."""
        first, *_, again = self._judged()
        if _alike(first.loss, again.loss, REPEATS, least=self._least()):
            return ""
        return (
            f"{self.where}: the loss of the same {self.n} samples is {first.loss:.6g} in one step "
            f"and {again.loss:.6g} in a later one, with the same weights and extra_state: the body "
            "of the loop keeps something from step to step that no new worker gets, and that other "
            "ranks have other values of; keep it in an object of extra_state, equal on every rank, "
            "and let nothing in it follow from samples"
        )

    def sees_others(self) -> str:
        """What ranks with other samples have another value of. '' = nothing, or it cannot be
        told."""
        whole, *ones, again = self._judged()
        if why := counts_of_others(self._program, self._batch):
            return why
        if why := self._kept_of_samples(whole, ones[0], again):
            return why
        agrees = ROUNDING_MOST if self.low else LOSS_AGREES
        losses = [one.loss for one in ones]
        size = max(abs(whole.loss), sum(map(abs, losses)))
        if not _alike(whole.loss, sum(losses), agrees, least=self._least(), size=size):
            more = "; what is added once for all samples (a penalty on weights): times their number"
            told = unlike_each(whole.loss, losses, self._program.anyway, n=self.n)
            return f"{self.where}: in run.backward {told}{more}"
        least = self._least() / max(_largest([*self._weights.values()]), 1e-30)
        name, off = ("", 0.0) if self.low else _apart(whole, ones, least)
        if off <= AGREE:
            return ""
        return (
            f"{self.where}: the gradients that run.backward gives for {self.n} samples are not the "
            f"sum of those of each: that of {name} differs by {off:.1%} of its largest element; "
            f"compute each sample by itself, or say {self._program.anyway} to train on all the same"
        )

    def note(self, why: str) -> str:
        """Why nothing can be told, '' = it can. `why`: the body was left there."""
        if self.done:
            why, judged, steps = "", self._judged(), self.steps[self.with_first :]
            broken = next((step for step in steps if not math.isfinite(step.loss)), None)
            nothing = not any(map(_is_something, judged))
            looks = self.drawn or broken or nothing
            can = all(math.isfinite(step.loss) for step in judged)
            if looks and can and (self.lost() or self.sees_others()):
                why = f"{self._draws()}, each rank its own" if self.drawn else ""
            elif broken is not None:
                which = f"{self.n} samples" if broken.rows is None else "a sample alone"
                why = f"{self.where}: the loss of {which} is {broken.loss}"
            elif nothing:
                why = (
                    f"{self.where}: the loss of {self.n} samples is 0, with gradients of 0, and so "
                    "is that of each alone"
                )
        return why and not_known(why)

    def _draws(self) -> str:
        python = [name for name in self.drawn if name not in DRAWN]
        return f"it draws by {', '.join(sorted(python))}" if python else draws_left()

    def _judged(self) -> Sequence[_Step]:
        """That of all samples, of each (of halves, where there are any), of all once more."""
        whole, *rest = self.steps[self.with_first :]
        return [whole, *(rest[self.n + 1 :] or rest[: self.n]), rest[self.n]]

    def _least(self) -> float:
        return NOISE * max(1, self._judged()[0].count)

    def _kept_of_samples(self, whole: _Step, one: _Step, again: _Step) -> str:
        """What becomes another value of the same samples in a later step follows from steps, as by
        a schedule that is not in extra_state."""
        for name, value in whole.state.items():
            if _near(value, one.state[name]) or not _near(value, again.state[name]):
                continue
            extra = name in self._boxes
            what = f"extra_state['{name.partition('.')[2]}']" if extra else f"{name} of run.model"
            return (
                f"{what} is another one after a step with one sample than after one with {self.n}: "
                "it follows from the samples of one rank, of which others have others; let it "
                f"follow from weights or from what all ranks have (run.train_loss), or say "
                f"{self._program.anyway} to train on all the same"
            )
        return ""


def not_known(why: str) -> str:
    return (
        "whether the body of its loop trains on samples together as on each alone is not known: "
        f"{why}; compare its first losses with those of one worker (--layout dp_shard=1)"
    )


class _Precision(TorchDispatchMode):
    """Notes where something is computed in 16 bits."""

    def __init__(self, passes: BodyPasses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._passes = passes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype in LOW:
            self._passes.low = True
        return out


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach() for n, p in module.named_parameters() if p.grad is not None}


def _is_something(step: _Step) -> bool:
    return bool(step.loss or _largest([*step.gradients.values()]))


def _near(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=AGREE, atol=SMALL, equal_nan=True
    )


def _alike(one: float, other: float, agrees: float, *, least: float, size: float = 0.0) -> bool:
    return abs(one - other) <= max(least, agrees * max(size, abs(one), abs(other)))


def _apart(whole: _Step, ones: Sequence[_Step], least: float) -> tuple[str, float]:
    """The parameter whose gradient of all samples differs most from the sum of those of each, and
    by how much of its largest element. `least`: what is less is no difference."""
    each = {n: [one.gradients[n] for one in ones if n in one.gradients] for n in whole.gradients}
    most = max((_largest([g]) for g in whole.gradients.values()), default=0.0)
    worst = ("", 0.0)
    for name, gradient in whole.gradients.items():
        off = _largest([gradient - sum(each[name], torch.zeros_like(gradient))])
        size = max(_largest([gradient, *each[name]]), SMALL / AGREE * most, least / AGREE)
        worst = max(worst, (name, off / size), key=lambda one: one[1])
    return worst


def _largest(tensors: Sequence[Tensor]) -> float:
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)
