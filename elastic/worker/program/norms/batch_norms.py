"""What a BatchNorm computes in the place of its own forward pass: each group of samples, in the
order of the step, by its own statistics, or all samples of the step by theirs.

A program's BatchNorms are met where its model is built (`with_norms`); their classes, parameters
and buffers stay what they are. In training mode their buffers stay too: what running statistics are
made of is noted, and applied once a step (step_norms.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.overrides import TorchFunctionMode

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import Job
from elastic.types.typed_job import AUTO_NORM, STEP, group_of

MARK = "_elastic_norm"  # of a module: its StepNorm
PLAIN = {_BatchNorm.forward, nn.SyncBatchNorm.forward}
HALF = (torch.float16, torch.bfloat16)
_under_way = threading.local()


@dataclass(frozen=True)
class NormRule:
    """`group`: samples that have their own statistics, 0 = all of a step. `given`: the job says
    so."""

    group: int
    given: bool = False
    compiled: bool = False

    @classmethod
    def of(cls, job: Job) -> NormRule | None:
        """None: each micro-batch has its own statistics, as torch has them."""
        group = group_of(job)
        given = job.batch_norm != AUTO_NORM
        return None if group is None else cls(group, given, job.compile)


@dataclass(frozen=True)
class NormPass:
    """A forward pass of a micro-batch. `first`: its first sample among those that this rank has in
    the step; `n` samples."""

    first: int
    n: int


@dataclass
class StepPasses:
    """What the BatchNorms of a rank share. `now`: the pass under way, None = none of a step;
    `over`: groups of ranks that statistics of a whole step are taken over."""

    now: NormPass | None = None
    over: Sequence[dist.ProcessGroup] = ()


class ModelWithNorms:
    """Makes a program's model, with its BatchNorms by the rule; without one, as torch has them."""

    def __init__(self, build: Callable[[], Any], rule: NormRule | None) -> None:
        self.build, self.rule = build, rule

    def __call__(self) -> Any:
        model = self.build()
        if not isinstance(model, nn.Module):
            return model
        norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
        if self.rule is None:
            for name, module in norms:
                module.register_forward_pre_hook(partial(_check_values, name))
            return model
        if not norms and self.rule.given:
            raise SpecError("job.yaml: key 'batch_norm': the model has no BatchNorm; leave it out")
        for name, module in norms:
            if isinstance(module, _LazyNormBase) and module.has_uninitialized_params():
                raise ProgramError(
                    f"{name} is a {type(module).__name__}, whose size is not known before it is "
                    "called; say it: nn.BatchNorm2d(num_features)"
                )
            StepNorm(name, module, self.rule).put()
        return model


def with_norms(program: Program, job: Job) -> Program:
    """The program whose BatchNorms follow the job's `batch_norm`."""
    if isinstance(program.model, ModelWithNorms):
        return program
    return replace(program, model=ModelWithNorms(program.model, NormRule.of(job)))


def _check_values(name: str, module: nn.Module, given: Sequence[Any]) -> None:
    """torch's own error does not say which module, nor what to do. Also trials pass one sample."""
    for x in given[:1]:
        if module.training and x.ndim > 1 and x.numel() == x.shape[1]:
            raise ProgramError(
                f"{name} is a {type(module).__name__} that is given one value of each channel, "
                "which has no statistics: behind a pooling a sample alone cannot be normalized, "
                "and with batch_norm: microbatch there may be one; take batch_norm: {group: N} or "
                "step"
            )


def norms_of(models: Sequence[nn.Module]) -> list[StepNorm]:
    """In the order of the modules."""
    found = (vars(module).get(MARK) for model in models for module in model.modules())
    return [norm for norm in found if norm is not None]


def training_norms(model: nn.Module) -> list[StepNorm]:
    """Without those that the program has frozen."""
    return [norm for norm in norms_of([model]) if norm.module.training]


def by_hand(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Is this torch function one that takes statistics of what it is given, outside of any
    BatchNorm that is met here?"""
    if func not in (F.batch_norm, torch.batch_norm) or getattr(_under_way, "n", None):
        return False
    return bool(args[5] if len(args) > 5 else (kwargs or {}).get("training"))


class StepNorm:
    """Of one module. `noted`: of each call in a step the first sample of its micro-batch, means and
    variances (float [groups, channels]); `step` says whether a pass of a step is under way."""

    def __init__(self, name: str, module: _BatchNorm, rule: NormRule) -> None:
        self.name, self.module, self.rule = name, module, rule
        self.group = rule.group
        # of a class with a forward pass of its own (an activation behind, say)
        own = type(module).forward not in PLAIN or "forward" in vars(module)
        self.own: Callable[..., Any] | None = module.forward if own else None
        self.noted: list[tuple[int, Tensor, Tensor]] = []
        self.step = StepPasses()
        self._rows: dict[int, int] = {}  # rows of a pass -> of a group in it

    def put(self) -> None:
        """In the place of the module's forward pass."""
        self.module.__dict__[MARK] = self
        forward = partial(_uncompiled(), self) if self.rule.compiled else self.forward
        vars(self.module)["forward"] = forward

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.own is None:
            self.module._check_input_dim(x)
            return self.normalized(x, self.module.weight, self.module.bias)
        if not self.module.training:
            return self.own(x, *args, **kwargs)
        counted = self.module._buffers.get("num_batches_tracked")
        try:
            self.module.num_batches_tracked = None  # is counted once a step
            with _InPlaceOf(self):
                return self.own(x, *args, **kwargs)
        finally:
            self.module.num_batches_tracked = counted

    def normalized(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        m, kind = self.module, torch.float32 if x.dtype in HALF else x.dtype
        weight, bias = (None if p is None else p.to(kind) for p in (weight, bias))
        with _inside():
            if not m.training and m.running_mean is not None:
                mean, var = m.running_mean, m.running_var
                return F.batch_norm(x, mean, var, weight, bias, False, 0.0, m.eps)
            if m.training and not self.group and self.step.over:
                return self._over_ranks(x, weight, bias, kind=kind)
            size = self._size(x)
            if size == 0:
                mean, var = x.new_zeros(x.shape[1], dtype=kind), x.new_ones(x.shape[1], dtype=kind)
                return F.batch_norm(x, mean, var, weight, bias, False, 0.0, m.eps)
            return self._by_groups(x.split(size), weight, bias, kind=kind)

    def _size(self, x: Tensor) -> int:
        """Rows that are normalized together; 0 = one value has no statistics, of a trial with one
        sample. Raises ProgramError where a step's rows cannot be told apart."""
        rows, now = len(x), self.step.now
        if now is None:  # a trial; or computed again, for a backward pass
            size = self._rows.get(rows, self.group) if self.module.training else 0
            alone = x.numel() == x.shape[1] and self.module.training
            return 0 if alone else rows if not size or rows % size else size
        if not self.module.training or not self.group:
            return rows
        if rows % now.n:
            raise ProgramError(
                f"{self.name} is called with {rows} rows for {now.n} samples, so that nobody knows "
                "whose they are: keep the samples in dimension 0, or take batch_norm: step"
            )
        self._rows[rows] = self.group * (rows // now.n)
        if now.n % self.group:
            raise ProgramError(
                f"{self.name} is called with {now.n} samples, which are no whole groups of "
                f"{self.group} (batch_norm)"
            )
        return self._rows[rows]

    def _by_groups(
        self, parts: Sequence[Tensor], weight: Tensor | None, bias: Tensor | None, *,
        kind: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Each as torch does it alone."""
        channels = parts[0].shape[1]
        mean, var = (parts[0].new_zeros(len(parts), channels, dtype=kind) for _ in range(2))
        eps = self.module.eps
        found = [
            # with a momentum of 1, running statistics are those of the part
            F.batch_norm(part, mean[i], var[i], weight, bias, True, 1.0, eps)
            for i, part in enumerate(parts)
        ]
        self._note(mean, var)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _over_ranks(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, kind: torch.dtype
    ) -> Tensor:
        """By the statistics of all samples that the data-parallel ranks have at once."""
        dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        y, groups = x.to(kind), self.step.over
        count = y.new_full((1,), y.numel() // y.shape[1])
        together = summed(torch.cat([y.sum(dims), count]), groups)
        mean, n = together[:-1] / together[-1], together[-1].detach()
        y = y - mean.view(shape)
        var = summed(y.square().sum(dims), groups) / n
        self._note(mean.detach()[None], (var.detach() * n / (n - 1).clamp(min=1))[None])
        scale = (var + self.module.eps).rsqrt()
        y = y * (scale if weight is None else scale * weight).view(shape)
        return (y if bias is None else y + bias.view(shape)).to(x.dtype)

    def _note(self, mean: Tensor, var: Tensor) -> None:
        if self.step.now is not None and self.module.track_running_stats:
            self.noted.append((self.step.now.first, mean, var))


@cache
def _uncompiled() -> Callable[..., Any]:
    """The forward pass, for blocks that are compiled around it."""
    return torch.compiler.disable(StepNorm.forward)  # type: ignore[no-any-return]


class _InPlaceOf(TorchFunctionMode):
    """What a class of its own normalizes with, done by the rule."""

    def __init__(self, norm: StepNorm) -> None:
        super().__init__()
        self.norm = norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("x", "mean", "var", "weight", "bias"), args, strict=False))
        given |= {"x" if key == "input" else key: v for key, v in (kwargs or {}).items()}
        return self.norm.normalized(given["x"], given.get("weight"), given.get("bias"))


@contextmanager
def _inside() -> Iterator[None]:
    _under_way.n = (getattr(_under_way, "n", None) or 0) + 1
    try:
        yield
    finally:
        _under_way.n -= 1


def summed(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Over all ranks of these groups, of which each adds up what the one before has left; the
    gradients are added up alike."""
    found: Tensor = _Summed.apply(x, tuple(groups))  # type: ignore[no-untyped-call]
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> Tensor:
        ctx.groups = groups
        return _all_reduced(x, groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.groups), None


def _all_reduced(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    found = x.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(found, group=group)
    return found


def chosen(norms: Sequence[StepNorm], keys: str = "in job.yaml") -> str:
    """The line that a person reads of them; `keys`: where those of the job stand."""
    first, more = norms[0], len(norms) - 1
    who = f"{first.name} is a {type(first.module).__name__}" + (
        f" (and {more} more)" if more else ""
    )
    if not first.group:
        return f"{who}: statistics of all samples of a step (batch_norm: {STEP})"
    by = "" if first.rule.given else ", by default"
    other = "" if first.rule.given else f"; batch_norm {keys} says another, or step"
    return (
        f"{who}: statistics of groups of {first.group} samples in the order of the step{by}{other}"
    )
