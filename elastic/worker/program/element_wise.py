"""What a program's optimizers keep, and which of them may be cut, by dry steps on tiny replicas.

Ranks give an element-wise optimizer their own parts of the tensors. That is exact where the update
of a part is that part of the whole tensor's update, where all state is of the parameter's shape or
scalar, and where it begins as constants. Any other steps whole tensors, each at its owner: that is
exact where the update of a tensor does not depend on the others.
"""

from __future__ import annotations

import copy
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import OptimizerSpec, TensorSpec
from elastic.user_frames import raised_at
from elastic.worker.program.calls import tensors_in
from elastic.worker.program.extra_state import encode
from elastic.worker.program.optimizers import (
    JobOptimizer,
    Optimizers,
    by_name,
    line_of,
    shown,
    step_of,
)
from elastic.worker.program.owned.optimizer_counters import (
    COUNTERS,
    OptimizerCounters,
    Values,
    changed,
    values_of,
)
from elastic.worker.program.owned.shape_trial import indexed, owned_specs

DRY_STEPS = 3
# after which steps that are other ones now and then (every 5th, or from the 20th on) have come
MORE_STEPS = 30
STEEP = 1e4  # times the others: the last of the dry gradients, which is beyond whoever clips
ONLY = (
    "an optimizer must step each tensor by itself, without a closure and without communication "
    "(AdamW, Muon, Adafactor ... do)"
)
PART, WHOLE = 2, 3  # rows of a tiny replica; a part has one less in every dimension
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
    owners = Optimizers(program, every, {}).of
    names = list(dict.fromkeys(owners.values()))
    alike = {
        (owners[spec.fqn], re.sub(r"\d+", "*", spec.fqn), len(spec.shape)): spec
        for spec in reversed(every)
    }
    replicas = list(reversed(alike.values()))

    whole = _Dry(program, every, replicas, WHOLE)
    _note(whole)
    before = whole.beside()
    whole.step(0)
    found = {name: kept for name in names if (kept := _entries(whole, name))}
    found = _same_from_constants(program, every, whole, kept=found)
    for number in range(1, DRY_STEPS):
        whole.step(number)
    counters = _counters(program, whole, before)
    _check_moved(whole)
    _check_draws(program, every, owners)
    part = _Dry(program, every, [s for s in replicas if owners[s.fqn] in found], PART)
    found = _same_when_large(program, every, _same_in_parts(whole, part, found), owners=owners)
    at_owners = [name for name in names if name not in found]
    _check_alone(program, every, whole, names=at_owners)
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


@dataclass
class _Dry:
    """The optimizers of `every` parameter over replicas of some of them, of `rows` rows per
    dimension 0, with the same gradients whatever the rows and whatever the others are.

    A part lacks the last index of every dimension: shards cut rows, and tp cuts columns as well.
    """

    program: Program
    every: list[TensorSpec]
    specs: list[TensorSpec]
    rows: int
    counting: Collection[str] = ()

    def __post_init__(self) -> None:
        draws = {
            s.fqn: torch.Generator().manual_seed(zlib.crc32(s.fqn.encode())) for s in self.specs
        }
        self.values = {
            s.fqn: torch.rand(_tiny(s), generator=draws[s.fqn]) + 0.5 for s in self.specs
        }
        self.gradients = [
            {s.fqn: torch.rand(_tiny(s), generator=draws[s.fqn]) - 0.3 for s in self.specs}
            for _ in range(DRY_STEPS)
        ]
        for steep in self.gradients[-1].values():
            steep.mul_(STEEP)
        self.named = {
            fqn: nn.Parameter(self._part(value).clone()) for fqn, value in self.values.items()
        }
        self.optimizers = Optimizers(self.program, self.every, self.named, counting=self.counting)
        for given in self.optimizers.given:
            given.grad = torch.empty_like(given)  # who looks for gradients there is to find some
        if self.optimizers.begun:
            self._begin()

    def _begin(self) -> None:
        """State that is there before the first step is made once more, of tensors that have
        values."""
        assert self.program.optimizer is not None
        fqns = {id(parameter): fqn for fqn, parameter in self.named.items()}
        for optimizer in by_name(self.program.optimizer(list(self.named.items()))).values():
            own = {p: state for p, state in optimizer.state.items() if not isinstance(p, str)}
            for parameter, state in own.items():
                self.optimizers.owner(fqns[id(parameter)]).state[parameter].update(state)

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        return _corner(value) if self.rows == PART else value

    def name(self, fqn: str) -> str:
        """Of a parameter's optimizer, as errors have it."""
        return f"optimizer {shown(self.optimizers.of[fqn], self.optimizers.owner(fqn))}"

    def state(self, fqn: str) -> Any:
        return self.optimizers.owner(fqn).state[self.named[fqn]]

    def owned(self, name: str) -> list[str]:
        return [fqn for fqn in self.named if self.optimizers.of[fqn] == name]

    def step(self, number: int) -> None:
        for fqn, parameter in self.named.items():
            parameter.grad = self._part(self.gradients[number][fqn]).clone()
        for name, optimizer in self.optimizers.each.items():
            try:
                with self.optimizers.made_for(name), _OwnTensors():  # type: ignore[no-untyped-call]
                    step_of(optimizer)
            except _ForeignTensor as error:
                raise ProgramError(
                    f"optimizer {shown(name, optimizer)}: its step uses a tensor that it was made "
                    f"with{_place(error)} and that is no longer in its param_groups; ranks have "
                    "parts of the parameters, in the place of these: take them from "
                    "optimizer.param_groups in each step, and keep what belongs to one (an average "
                    "of weights, say) in optimizer.state[parameter]"
                ) from error
            except Exception as error:  # a boundary: any optimizer may raise anything
                text = f"{type(error).__name__}: {line_of(error)}"
                why = (
                    "it communicates" if "process group" in text.lower() else "a plain step() fails"
                )
                raise ProgramError(
                    f"optimizer {shown(name, optimizer)}: {why} ({text}); {ONLY}"
                ) from error

    def beside(self) -> dict[str, Values]:
        return {name: values_of(optimizer) for name, optimizer in self.optimizers.each.items()}

    @property
    def more_steps(self) -> int:
        """How many tell what the first ones did not: none of what torch itself has."""
        return 0 if all(_of_torch(one) for one in self.optimizers.each.values()) else MORE_STEPS


def _of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """A class of torch.optim as it is: what such a one keeps stands in `state` from its first step
    on, and what a step does there follows from `state` and `param_groups`."""
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_pre_hooks
        and not _global_optimizer_post_hooks
    )


class _ForeignTensor(Exception):
    """A step uses a tensor without values."""


class _OwnTensors(TorchDispatchMode):
    """What a dry step may use has values. What Program.optimizer is called with has none, and a
    hook or a list that kept it would train nothing, without a word."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            raise _ForeignTensor
        return func(*args, **(kwargs or {}))


def _place(error: Exception) -> str:
    place = raised_at(error)
    return f" ({Path(place.filename).name}:{place.lineno})" if place else ""


def _corner(value: torch.Tensor) -> torch.Tensor:
    return value[tuple(slice(n - 1) for n in value.shape)]


def _tiny(spec: TensorSpec) -> list[int]:
    return [WHOLE, *(min(d, 2) + 1 for d in spec.shape[1:])] if spec.shape else []


def _note(dry: _Dry) -> None:
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


def _entries(dry: _Dry, name: str) -> OptimizerSpec | None:
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
    program: Program, every: list[TensorSpec], done: _Dry, *, kept: dict[str, OptimizerSpec]
) -> dict[str, OptimizerSpec]:
    """Those of which a state that was filled with constants beforehand gives the same steps: of a
    copy of the weights it is seen late."""
    own, filled = (_Dry(program, every, done.specs, WHOLE) for _ in range(2))
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
    for number in range(DRY_STEPS + done.more_steps):
        for dry in (own, filled):
            dry.step(number % DRY_STEPS)
        for fqn, parameter in own.named.items():
            if not _close(parameter, filled.named[fqn]):
                same.pop(own.optimizers.of[fqn], None)
    return same


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def _counters(
    program: Program, dry: _Dry, before: Mapping[str, Values]
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
    nowhere = _Dry(program, dry.every, [], WHOLE, counting=names)
    for number in range(DRY_STEPS):
        nowhere.step(number)
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
    program: Program, every: list[TensorSpec], done: _Dry, *,
    found: Mapping[str, OptimizerSpec], counters: Mapping[str, tuple[str, ...]],
) -> None:  # fmt: skip
    """Each generation makes new objects, and gives them the state of their parameters and these
    counters, nothing else: their steps must be those of the old ones."""
    new = _Dry(program, every, done.specs, WHOLE)
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
    for number in range(done.more_steps or DRY_STEPS):
        for dry in (done, new):
            dry.step(number % DRY_STEPS)
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


def _check_moved(dry: _Dry) -> None:
    """One that steps tensors of a list of its own would train nothing here."""
    for name, optimizer in dry.optimizers.each.items():
        still = all(torch.equal(dry.named[fqn], dry.values[fqn]) for fqn in dry.owned(name))
        if still and any(float(group["lr"]) for group in optimizer.param_groups):
            raise ProgramError(
                f"optimizer {shown(name, optimizer)}: {DRY_STEPS} steps leave its parameters as "
                "they are; it must step the tensors that are in its param_groups"
            )


def _same_in_parts(
    whole: _Dry, part: _Dry, kept: dict[str, OptimizerSpec]
) -> dict[str, OptimizerSpec]:
    """Those of which a step on a part of a tensor is that part of a step on all of it."""
    for number in range(DRY_STEPS):
        part.step(number)

    def same(fqn: str, wanted: OptimizerSpec) -> bool:
        pairs = [(whole.named[fqn], part.named[fqn])]
        pairs += [(whole.state(fqn)[key], part.state(fqn)[key]) for key in wanted.entries]
        return all(_close(_corner(mine), other) for mine, other in pairs)

    return {
        name: wanted
        for name, wanted in kept.items()
        if all(same(fqn, wanted) for fqn in part.owned(name))
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
    """That of a large matrix, or of its corner, in the place of this parameter."""
    values = torch.linspace(0.5, 1.0, prod(LARGE), dtype=getattr(torch, dtype)).view(LARGE)
    large = nn.Parameter(values[: shape[0], : shape[1]].clone())
    optimizer = Optimizers(program, every, {fqn: large}).owner(fqn)
    large.grad = torch.full_like(large, 0.1)
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


def _check_alone(
    program: Program, every: list[TensorSpec], whole: _Dry, *, names: Sequence[str]
) -> None:
    """An owner steps some of the tensors: the update of one must not hang on the others."""
    if not names:
        return
    if whole.optimizers.begun:
        raise ProgramError(
            f"optimizer {shown(names[0], whole.optimizers.each[names[0]])}: it is not element-wise "
            "and has state before its first step; make that state in its first step"
        )
    parameters = {id(parameter) for parameter in whole.named.values()}
    for name in names:
        optimizer = whole.optimizers.each[name]
        strange = [k for k in optimizer.state if id(k) not in parameters and not isinstance(k, str)]
        if strange:
            raise ProgramError(
                f"optimizer {shown(name, optimizer)}: it keeps state that belongs to no parameter "
                f"({str(strange[0])[:40]!r}), which cannot be moved between ranks; {ONLY}"
            )
    for spec in whole.specs:
        if whole.optimizers.of[spec.fqn] in names:
            alone = _Dry(program, every, [spec], WHOLE)
            for number in range(DRY_STEPS):
                alone.step(number)
            if not _close(whole.named[spec.fqn], alone.named[spec.fqn]):
                raise ProgramError(
                    f"{whole.name(spec.fqn)}: the step of {spec.fqn} depends on other parameters, "
                    f"or on random numbers; {ONLY}"
                )


def with_kept(specs: Sequence[TensorSpec], kept: OptimizerEntries) -> tuple[TensorSpec, ...]:
    """Each with the index of its optimizer."""
    return tuple(
        replace(spec, optimizer=kept.of.get(spec.tied_to or spec.fqn, 0)) for spec in specs
    )
