"""Distillation (Hinton et al. 2015): a student learns what a frozen teacher says, beside the
targets.

```python
teacher = causal_lm("models/large")                     # any Program; only its model is asked for
program = distilled(student, teacher, temperature=2.0)  # student: a Program with data and optimizer
```
Teacher and student are two groups of blocks of one model: FSDP shards both, pipeline stages are cut
through both. The teacher has no gradients and no optimizer state; with `weights` it is no part of
the elastic state: it is read again by who needs it. A student of another architecture (a draft
model, say) is distilled in the same way: both only have to speak of the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.errors import SpecError
from elastic.models.experts import expert_modules
from elastic.models.huggingface import count as count_of_next
from elastic.models.huggingface import next_tokens
from elastic.program import Program, Weights, patterns_of

TEACHER, STUDENT = "teacher", "student"
NOT_COUNTED = -100  # of targets


def logits_of(output: Any) -> Tensor:
    """Of a model's output: the tensor that it is, `logits` of one of transformers, or the first of
    a tuple."""
    if isinstance(output, Tensor):
        return output
    found = output[0] if isinstance(output, tuple) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise SpecError(f"distilled: no logits in what a model gives, a {type(output).__name__}")
    return found


class Distilled(nn.Module):
    """Gives the logits of both, those of the student first."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), student

    def train(self, mode: bool = True) -> Distilled:
        super().train(mode)
        self.teacher.eval()  # whose dropout would be noise
        return self

    def forward(self, x: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            said = logits_of(self.teacher(x, **keywords))
        return logits_of(self.student(x, **keywords)), said


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """[..., classes] -> [...]: the Kullback-Leibler divergence from what the teacher says to what
    the student does, both at a temperature, times its square, so that gradients are of one size at
    every temperature (Hinton et al. 2015, section 2)."""
    says = F.log_softmax(student.float() / temperature, -1)
    wanted = F.log_softmax(teacher.float() / temperature, -1)
    return temperature**2 * F.kl_div(says, wanted, reduction="none", log_target=True).sum(-1)


def counted(batch: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Positions of the logits that have a target; all of them where the batch names none. `labels`
    are targets where a sample has one row of logits; of a sequence they may be those of the next
    position. Raises SpecError where it tells in another way which positions count."""
    one_each = logits.ndim == 2
    target = batch.get("target", batch.get("labels") if one_each else None)
    own = next((key for key in ("labels", "attention_mask") if key in batch), "")
    if target is None and own and not one_each:
        raise SpecError(
            f"distilled: a sample has '{own}' and no 'target': which positions does the student "
            "learn? give counts=lambda batch, logits: a mask of the shape of logits[..., 0]"
        )
    if target is None or target.shape != logits.shape[:-1]:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    return target != NOT_COUNTED


def counted_next(batch: Mapping[str, Tensor], logits: Tensor) -> Tensor:
    """Of rows as `causal_lm` has them: positions that are followed by a token to be learned."""
    return next_tokens(batch) != NOT_COUNTED


def distilled(
    student: Program,
    teacher: Program,
    *,
    temperature: float = 2.0,
    share: float = 0.5,
    counts: Callable[[Any, Tensor], Tensor] | None = None,
) -> Program:
    """The student's program with a teacher beside it. Its loss is `share` times the divergence from
    the teacher, summed over the positions that `counts(batch, logits)` marks (None: those that the
    student has targets for), and 1 - `share` times its own. Both models are called with the
    student's input and keywords.

    Of `teacher` are taken: model, weights (without: init, and it is kept in the state), blocks, tp,
    experts and buffers. Raises SpecError where the two cannot go together.
    """
    _check(student, teacher, temperature, share=share)
    if counts is None:
        counts = counted_next if student.count is count_of_next else counted
    return replace(
        student,
        model=lambda: Distilled(teacher.model(), student.model()),
        init=_init(student, teacher),
        weights=_weights(student, teacher.weights) if teacher.weights is not None else None,
        optimizer=_optimizer(student.optimizer) if student.optimizer is not None else None,
        loss=_loss(student, temperature, share, counts=counts),
        metrics=_of_student(student.metrics),
        log=_of_student(student.log),
        evaluate=_of_module(student.evaluate),
        sample=_of_module(student.sample),
        blocks=[
            f"{name}.{pattern}"
            for name, one in ((TEACHER, teacher), (STUDENT, student))
            for pattern in patterns_of(one.blocks)
        ],
        tp={
            f"{name}.{pattern}": style
            for name, one in ((TEACHER, teacher), (STUDENT, student))
            for pattern, style in one.tp.items()
        },
        tp_limit=gcd(student.tp_limit, teacher.tp_limit),
        experts=_experts(student, teacher),
        buffers=_buffers(student, teacher),
        pipeline=student.pipeline and teacher.pipeline,
        stage=None,
        no_cp=student.no_cp or teacher.no_cp,
        exports=STUDENT,
    )


def _check(student: Program, teacher: Program, temperature: float, *, share: float) -> None:
    if temperature <= 0 or not 0 <= share <= 1:
        raise SpecError(
            f"distilled: temperature={temperature:g}, share={share:g}; a temperature is above 0, a "
            "share from 0 to 1"
        )
    if student.weights is not None:
        raise SpecError(
            f"distilled: the student's first values come from {student.weights.path}, and values "
            "come from one place, the teacher's; begin with those of `init`, or import them into "
            "the run (elastic checkpoint import)"
        )
    if student.adapter is not None or teacher.adapter is not None:
        raise SpecError(
            "distilled: a program with adapters is neither teacher nor student; export it --merged"
        )
    if student.optimizer is None:
        return
    cut = [one for one in (student, teacher) if "sequence_colwise_loss" in one.tp.values()]
    if cut:
        raise SpecError(
            "distilled: tp style 'sequence_colwise_loss' leaves logits cut, which only torch's "
            "cross_entropy takes; take 'sequence_colwise_gather'"
        )


def _experts(student: Program, teacher: Program) -> tuple[str, ...]:
    """Of both; what one of them names does not hide what the other is found to have."""
    if not (student.experts or teacher.experts):
        return ()
    found = []
    for name, one in ((TEACHER, teacher), (STUDENT, student)):
        with torch.device("meta"):
            modules = expert_modules(one.model(), one.experts)
        found += [f"{name}.{module}" for module in modules]
    return tuple(found)


def _init(student: Program, teacher: Program) -> Callable[[Any], Any] | None:
    if student.init is None and teacher.init is None:
        return None

    def init(model: Distilled) -> None:
        for one, module in ((teacher, model.teacher), (student, model.student)):
            if one.init is not None:
                one.init(module)

    return init


def _weights(student: Program, given: Weights) -> Weights:
    """The teacher's files; the student is made as it would be alone."""

    def rest() -> dict[str, Tensor]:
        seed = torch.initial_seed()
        model = student.model()
        if student.init is not None:
            torch.manual_seed(seed)
            student.init(model)
        return {f"{STUDENT}.{name}": p.detach() for name, p in model.state_dict().items()}

    def name(of: str) -> str:
        return given.name(of.removeprefix(f"{TEACHER}.")) if of.startswith(f"{TEACHER}.") else of

    return Weights(given.path, name, rest=rest)


Optimizer = Callable[[Iterable[tuple[str, Any]]], Any]


def _optimizer(made: Optimizer) -> Optimizer:
    """It is given the student's names."""

    def optimizer(named: Iterable[tuple[str, Any]]) -> Any:
        begin = f"{STUDENT}."
        return made([(n.removeprefix(begin), p) for n, p in named if n.startswith(begin)])

    return optimizer


def _loss(
    student: Program, temperature: float, share: float, *, counts: Callable[[Any, Tensor], Tensor]
) -> Callable[[Any, Any], Tensor]:
    def loss(output: Any, batch: Any) -> Tensor:
        says, wanted = output
        apart = divergence(says, wanted, temperature)[counts(batch, says)].sum()
        own: Tensor = student.loss(says, batch)
        return share * apart + (1 - share) * own

    return loss


def _of_student(told: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any] | None:
    return None if told is None else lambda output, batch: told(output[0], batch)


def _of_module(told: Callable[..., Any] | None) -> Callable[..., Any] | None:
    return None if told is None else lambda model, *more: told(model.student, *more)


def _buffers(student: Program, teacher: Program) -> Callable[[Any], bool] | None:
    """None where one of the two does not say how: both are then built whole for them."""
    both = ((teacher, TEACHER), (student, STUDENT))
    if all(one.buffers is None for one, _ in both):
        return None

    def fill(model: nn.Module) -> bool:
        for one, name in both:
            part = model.get_submodule(name)
            kept = set(part.state_dict())
            if any(n not in kept for n, _ in part.named_buffers()) and not (
                one.buffers is not None and one.buffers(part)
            ):
                return False
        return True

    return fill
