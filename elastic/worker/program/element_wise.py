"""What a program's optimizers keep, and which of them may be cut, by dry steps on tiny replicas.

Ranks give an element-wise optimizer their own parts of the tensors. That is exact where the update
of a part is that part of the whole tensor's update, where all state is of the parameter's shape or
scalar, and where it begins as constants. Any other steps whole tensors, each at its owner: that is
exact where the update of a tensor does not depend on the others.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import OptimizerSpec, TensorSpec
from elastic.worker.program.extra_state import encode
from elastic.worker.program.optimizers import JobOptimizer, Optimizers, shown, step_of
from elastic.worker.program.owned.dry_steps import (
    DRY_STEPS,
    ONLY,
    PART,
    WHOLE,
    Dry,
    corner,
    of_torch,
)
from elastic.worker.program.owned.optimizer_counters import (
    COUNTERS,
    OptimizerCounters,
    Values,
    changed,
)
from elastic.worker.program.owned.shape_trial import indexed, other_than_tiny, owned_specs

LARGE = (64, 128)  # of many optimizers' thresholds the commonest is 4096 elements
SMALL = (2, 2)  # what a rank may have of it


@dataclass(frozen=True)
class OptimizerEntries:
    """What each optimizer keeps, and the index there of each trainable parameter's."""

    optimizers: tuple[OptimizerSpec, ...] = ()
    of: Mapping[str, int] = field(default_factory=dict)


def what_they_keep(program: Program, specs: Sequence[TensorSpec]) -> OptimizerEntries:
    """Found by dry steps. Raises ProgramError (SpecError for an optimizer of job.yaml) that names
    the one that can neither be cut nor step whole tensors at their owners, SpecError for a
    parameter that does not belong to exactly one."""
    if program.optimizer is None:
        return OptimizerEntries()
    if not isinstance(program.optimizer, JobOptimizer):
        return _kept(program, specs)
    try:
        return _kept(program, specs)
    except ProgramError as error:
        raise SpecError(f"job.yaml: {error}") from error


def _kept(program: Program, specs: Sequence[TensorSpec]) -> OptimizerEntries:
    every = [spec for spec in specs if spec.trainable and not spec.buffer and spec.tied_to is None]
    if isinstance(program.optimizer, JobOptimizer):
        program.optimizer.check_names(spec.fqn for spec in every)
    made = Optimizers(program, every, {})
    owners = made.of
    names = list(dict.fromkeys(owners.values()))
    foreign = [name for name in names if not of_torch(made.each[name])]
    alike = {
        (owners[spec.fqn], re.sub(r"\d+", "*", spec.fqn), len(spec.shape)): spec
        for spec in reversed(every)
    }
    replicas = list(reversed(alike.values()))
    for name in foreign:  # where all of its are alike, two: what it makes of their order is seen
        mine = [spec for spec in every if owners[spec.fqn] == name]
        if len(mine) > 1 and sum(owners[spec.fqn] == name for spec in replicas) == 1:
            replicas.append(mine[-1])

    whole = Dry(program, every, replicas, WHOLE)
    _note(whole)
    before = whole.beside()
    whole.step(whole.gradients(0))
    found = {name: kept for name in names if (kept := _entries(whole, name))}
    course = Dry(program, every, replicas, WHOLE)
    found = _same_from_constants(program, every, course, kept=found)
    for number in range(1, DRY_STEPS):
        whole.step(whole.gradients(number))
    counters = _counters(program, whole, before)
    _check_moved(whole)
    _check_draws(program, every, owners)
    part = Dry(program, every, [s for s in replicas if owners[s.fqn] in found], PART)
    found = _same_when_large(program, every, _same_in_parts(course, part, found), owners=owners)
    tried = {name: kept for name, kept in found.items() if name in foreign}
    other = other_than_tiny(program, every, owners, kept=tried)
    found = {name: kept for name, kept in found.items() if name not in other}
    at_owners = [name for name in names if name not in found]
    _check_at_owners(course, at_owners)
    in_parts = [s for s in replicas if owners[s.fqn] in found and owners[s.fqn] in foreign]
    each = [[s] for s in replicas if owners[s.fqn] in at_owners]
    for some in (*each, in_parts[::2], in_parts[1::2]):
        _check_alone(course, some, counting=counters)
    _check_carried(program, every, whole, found=found, counters=counters)
    found = {name: replace(kept, counters=counters.get(name, ())) for name, kept in found.items()}
    index = {name: i for i, name in enumerate(found)}
    of = {fqn: index[name] for fqn, name in owners.items() if name in index}
    owned = {
        fqn: replace(kept, counters=counters.get(owners[fqn], ()))
        for fqn, kept in owned_specs(program, every, owners, names=at_owners).items()
    }
    specs_of, of_owned = indexed(owned, len(found))
    return OptimizerEntries((*found.values(), *specs_of), of | of_owned)


class _Notes(dict[str, Any]):
    """State of one parameter that notes what each entry was at first."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__()
        self.first: dict[str, torch.Tensor] = {}
        self.update(*given, **more)

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.first.setdefault(key, value.detach().clone())
        super().__setitem__(key, value)

    def update(self, *given: Any, **more: Any) -> None:
        for key, value in dict(*given, **more).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


class _State(defaultdict[Any, Any]):
    """Of all parameters of an optimizer, each of which gets notes."""

    def __init__(self) -> None:
        super().__init__(_Notes)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = isinstance(value, dict) and not isinstance(value, _Notes)
        super().__setitem__(key, _Notes(value) if plain and not isinstance(key, str) else value)


def _note(dry: Dry) -> None:
    """From now on the first value of each state entry is noted; some are there before the first
    step."""
    for optimizer in dry.optimizers.each.values():
        before, optimizer.state = optimizer.state, _State()
        for inner in vars(optimizer).values():  # one around another that has its state
            if isinstance(inner, torch.optim.Optimizer) and inner.state is before:
                inner.state = optimizer.state
        optimizer.state.update(before)
        for parameter in [p for p in before if not isinstance(p, str)]:
            optimizer.state[parameter] = dict(before[parameter])


def _entries(dry: Dry, name: str) -> OptimizerSpec | None:
    """What it keeps for each of its parameters; None where that is not the same for all of them,
    scalars and tensors of the parameter's shape."""
    found: set[OptimizerSpec] = set()
    for fqn in dry.owned(name):
        state, parameter = dry.state(fqn), dry.named[fqn]
        there = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        like = tuple(k for k, v in there.items() if v.shape == parameter.shape and v.ndim)
        scalar = tuple(k for k, v in there.items() if v.ndim == 0)
        if any(k not in like and k not in scalar and v is not None for k, v in state.items()):
            return None
        if not isinstance(state, _Notes) or not there.keys() <= state.first.keys():
            return None  # it was made in a way that nobody noticed
        first = tuple(
            (key, value) for key in (*like, *scalar) if (value := _constant(state.first[key]))
        )
        found.add(OptimizerSpec(like, scalar, first, name))
    if len(found) > 1:
        return None
    return next(iter(found), OptimizerSpec(name=name))


def _constant(value: torch.Tensor) -> float:
    """The number that all elements are, 0 where they differ."""
    flat = value.flatten()
    return float(flat[0]) if flat.numel() and bool((flat == flat[0]).all()) else 0.0


def _same_from_constants(
    program: Program, every: list[TensorSpec], course: Dry, *, kept: dict[str, OptimizerSpec]
) -> dict[str, OptimizerSpec]:
    """Those of which a state that was filled with constants beforehand gives the same steps and
    becomes the same state: one that is a copy of the weights at first (what another optimizer
    returns to, an average of them) is not."""
    filled = Dry(program, every, course.specs, WHOLE)
    for fqn, parameter in filled.named.items():
        wanted = kept.get(filled.optimizers.of[fqn])
        if wanted is None:
            continue
        state, first = filled.state(fqn), dict(wanted.first)
        for key in wanted.scalars:
            state[key] = torch.tensor(first.get(key, 0.0))
        for key in wanted.entries:
            state[key] = torch.full_like(parameter, first.get(key, 0.0), requires_grad=False)
    same = dict(kept)
    for done in course.course():
        filled.step(done.gradients)
        for fqn, parameter in course.named.items():
            name = course.optimizers.of[fqn]
            keys = (*kept[name].entries, *kept[name].scalars) if name in same else ()
            one, other = course.state(fqn), filled.state(fqn)
            if not _close(parameter, filled.named[fqn]) or any(
                key in one and not _close(one[key], other[key]) for key in keys
            ):
                same.pop(name, None)
    return same


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-7, equal_nan=True)


def _counters(
    program: Program, dry: Dry, before: Mapping[str, Values]
) -> dict[str, tuple[str, ...]]:
    """Optimizer -> what its steps change beside the state of parameters, where they do. Raises
    ProgramError where that cannot be known on every rank alike, or cannot be moved."""
    names = {
        name: tuple(found)
        for name, values in dry.beside().items()
        if (found := changed(before[name], values))
    }
    if not names:
        return {}
    scheduled = [n for n, found in names.items() if "group.lr" in found and program.lr_factor]
    if scheduled:
        raise ProgramError(
            f"optimizer {shown(scheduled[0], dry.optimizers.each[scheduled[0]])}: a step changes "
            "'lr' in its param_groups, which the schedule of learning rates sets as well; leave "
            "one of them out"
        )
    nowhere = Dry(program, dry.every, [], WHOLE, counting=names)
    for _ in range(DRY_STEPS):
        nowhere.step({})
    elsewhere = nowhere.beside()
    for name, values in dry.beside().items():
        who = f"optimizer {shown(name, dry.optimizers.each[name])}"
        if name in names and (other := changed(elsewhere[name], values)):
            raise ProgramError(
                f"{who}: what it counts beside the state of parameters ({other[0]}) depends on "
                f"their gradients, of which each rank has others; {ONLY}"
            )
    counted = OptimizerCounters(dry.optimizers.each, names)
    for name, counts in names.items():
        try:
            encode(COUNTERS, counted.state_dict()[name])
        except ProgramError as error:
            raise ProgramError(
                f"optimizer {shown(name, dry.optimizers.each[name])}: a step changes "
                f"{', '.join(counts)}, which cannot be moved between ranks: {error}"
            ) from error
    return names


def _check_carried(
    program: Program, every: list[TensorSpec], done: Dry, *,
    found: Mapping[str, OptimizerSpec], counters: Mapping[str, tuple[str, ...]],
) -> None:  # fmt: skip
    """Each generation makes new objects, and gives them the state of their parameters and these
    counters, nothing else: their steps must be those of the old ones."""
    new = Dry(program, every, done.specs, WHOLE)
    old_counts = OptimizerCounters(done.optimizers.each, counters)
    new_counts = OptimizerCounters(new.optimizers.each, counters)
    new_counts.load_state_dict(old_counts.state_dict())
    there = {}
    for fqn, parameter in new.named.items():
        parameter.data.copy_(done.named[fqn])
        kept = found.get(done.optimizers.of[fqn])
        names = {*kept.entries, *kept.scalars} if kept is not None else {*done.state(fqn)}
        state = {k: copy.deepcopy(v) for k, v in done.state(fqn).items() if k in names}
        new.optimizers.owner(fqn).state[parameter] = state
        there[fqn] = {k for k, v in done.state(fqn).items() if v is not None}
    first = DRY_STEPS if done.more_steps else 0
    for number in range(first, first + (done.more_steps or DRY_STEPS)):
        gradients = done.gradients(number)
        for dry in (done, new):
            dry.step(gradients)
        _check_same(done, new, there)


def _check_same(done: Dry, new: Dry, there: Mapping[str, Collection[str]]) -> None:
    """After each step: a later one may leave NaN in both."""
    for fqn, parameter in done.named.items():
        late = [k for k, v in done.state(fqn).items() if v is not None and k not in there[fqn]]
        if late:
            raise ProgramError(
                f"{done.name(fqn)}: its state '{late[0]}' comes later than with its first "
                f"{DRY_STEPS} steps; what it keeps must be there by then"
            )
        if not _close(parameter, new.named[fqn]):
            raise ProgramError(
                f"{done.name(fqn)}: after some steps a new one with its state and its settings "
                f"steps {fqn} otherwise, so it keeps something elsewhere, which no change of the "
                "layout could move; keep it in `state` or `param_groups` (numbers may stand on "
                "the object)"
            )


def _check_moved(dry: Dry) -> None:
    """One that steps tensors of a list of its own would train nothing here."""
    for name, optimizer in dry.optimizers.each.items():
        still = all(torch.equal(dry.named[fqn], dry.values[fqn]) for fqn in dry.owned(name))
        if still and any(float(group["lr"]) for group in optimizer.param_groups):
            raise ProgramError(
                f"optimizer {shown(name, optimizer)}: {DRY_STEPS} steps leave its parameters as "
                "they are; it must step the tensors that are in its param_groups"
            )


def _same_in_parts(
    course: Dry, part: Dry, kept: dict[str, OptimizerSpec]
) -> dict[str, OptimizerSpec]:
    """Those of which a step on a part of a tensor is that part of a step on all of it."""
    same = dict(kept)
    for done in course.done:
        part.step(done.gradients)
        for fqn, parameter in part.named.items():
            if not _close(corner(done.weights[fqn]), parameter):
                same.pop(part.optimizers.of[fqn], None)

    def state_is(fqn: str, wanted: OptimizerSpec) -> bool:
        there, here = course.state(fqn), part.state(fqn)
        return all(_close(corner(there[key]), here[key]) for key in wanted.entries)

    return {
        name: wanted
        for name, wanted in same.items()
        if all(state_is(fqn, wanted) for fqn in part.owned(name))
    }


def _same_when_large(
    program: Program,
    every: list[TensorSpec],
    kept: dict[str, OptimizerSpec],
    *,
    owners: Mapping[str, str],
) -> dict[str, OptimizerSpec]:
    """Those that keep for large matrices what they keep for tiny ones, and step them alike: some
    hold in few bits what is large enough, in blocks that no part may cut."""
    same = {}
    for name, wanted in kept.items():
        fqn = max(
            (spec for spec in every if owners[spec.fqn] == name), key=lambda spec: len(spec.shape)
        ).fqn
        optimizer, large = _large_step(program, every, fqn)
        state = optimizer.state[large]
        plain = all(type(state[key]) is torch.Tensor for key in wanted.entries if key in state)
        _, corner = _large_step(program, every, fqn, shape=SMALL)
        if plain and _close(large[: SMALL[0], : SMALL[1]], corner):
            same[name] = wanted
    return same


def _large_step(
    program: Program,
    every: list[TensorSpec],
    fqn: str,
    *,
    dtype: str = "float32",
    shape: tuple[int, int] = LARGE,
) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """That of a large matrix, or of its corner, in the place of this parameter. What is not torch's
    own makes another, whose gradient is nearly orthogonal to the matrix, and not to its corner."""
    values = torch.linspace(0.5, 1.0, prod(LARGE), dtype=getattr(torch, dtype)).view(LARGE)
    large = nn.Parameter(values[: shape[0], : shape[1]].clone())
    optimizer = Optimizers(program, every, {fqn: large}).owner(fqn)
    large.grad = torch.full_like(large, 0.1)
    step_of(optimizer)
    if not of_torch(optimizer):
        large.grad = torch.full_like(large, 0.1)
        large.grad[:, LARGE[1] // 2 :].neg_()
        step_of(optimizer)
    return optimizer, large


def _check_draws(program: Program, every: list[TensorSpec], owners: Mapping[str, str]) -> None:
    """What a step draws would be another draw on each rank. Some draw for certain types only."""
    asked = {(owners[spec.fqn], spec.dtype): spec.fqn for spec in every}
    for (name, dtype), fqn in asked.items():
        before = torch.get_rng_state()
        optimizer, _ = _large_step(program, every, fqn, dtype=dtype)
        if not torch.equal(torch.get_rng_state(), before):
            raise ProgramError(
                f"optimizer {shown(name, optimizer)}: a step of {fqn} ({dtype}) draws random "
                "numbers, others on each rank; switch that off (in torchao: "
                "bf16_stochastic_round=False)"
            )


def _check_at_owners(course: Dry, names: Sequence[str]) -> None:
    """What their owners could not keep."""
    if not names:
        return
    if course.optimizers.begun:
        raise ProgramError(
            f"optimizer {shown(names[0], course.optimizers.each[names[0]])}: it is not "
            "element-wise and has state before its first step; make that state in its first step"
        )
    parameters = {id(parameter) for parameter in course.named.values()}
    for name in names:
        optimizer = course.optimizers.each[name]
        strange = [k for k in optimizer.state if id(k) not in parameters and not isinstance(k, str)]
        if strange:
            raise ProgramError(
                f"optimizer {shown(name, optimizer)}: it keeps state that belongs to no parameter "
                f"({str(strange[0])[:40]!r}), which cannot be moved between ranks; {ONLY}"
            )


def _check_alone(course: Dry, specs: list[TensorSpec], *, counting: Collection[str]) -> None:
    """An owner steps some of the tensors, and so does a pipeline stage: the update of one must not
    hang on the others, nor on how many stand before it."""
    if not specs:
        return
    alone = Dry(course.program, course.every, specs, WHOLE, counting=counting)
    for done in course.done:
        alone.step(done.gradients)
        for fqn, parameter in alone.named.items():
            if not _close(done.weights[fqn], parameter):
                raise ProgramError(
                    f"{course.name(fqn)}: the step of {fqn} depends on other parameters, "
                    f"or on random numbers; {ONLY}"
                )


def with_kept(specs: Sequence[TensorSpec], kept: OptimizerEntries) -> tuple[TensorSpec, ...]:
    """Each with the index of its optimizer."""
    return tuple(
        replace(spec, optimizer=kept.of.get(spec.tied_to or spec.fqn, 0)) for spec in specs
    )
