"""Optimizers: by import path out of job.yaml, and the proof that one may be cut, by dry steps on tiny replicas.

Ranks give the optimizer their own parts of the tensors. That is exact where the update of a part is that part of the whole
tensor's update, where all state is of the parameter's shape or scalar, and where it begins as constants.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import TensorSpec
from elastic.worker.loop_program import Settings

Named = Iterable[tuple[str, nn.Parameter]]
FUSED = ("Adam", "AdamW")  # of torch.optim, on CUDA, where the job does not say otherwise
OWN_KEYS = ("path", "no_decay")
DRY_STEPS = 3
ONLY = "only element-wise optimizers (AdamW, SGD, RMSprop ...) can be cut over ranks"
PART, WHOLE = 2, 3  # rows of a tiny replica


# ------------------------------------------------------------------------------------------------ by import path


class JobOptimizer:
    """Makes the optimizer of a job's `optimizer`: `path` and what its class takes; `no_decay`: patterns of parameter names."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.kind = class_of(given["path"])
        self.no_decay = tuple(given.get("no_decay") or ())
        self.keywords = {k: _tuple(v) for k, v in given.items() if k not in OWN_KEYS}
        _check_keywords(self.kind, self.keywords, bool(self.no_decay))

    def __call__(self, named: Named) -> torch.optim.Optimizer:
        decayed: list[nn.Parameter] = []
        spared: list[nn.Parameter] = []
        for name, parameter in named:
            (spared if any(fnmatchcase(name, pattern) for pattern in self.no_decay) else decayed).append(parameter)
        groups: list[Any] = [{"params": decayed}] if decayed or not spared else []
        if spared:
            groups.append({"params": spared, "weight_decay": 0.0})
        every = [*decayed, *spared]
        keywords = {**self.keywords, **({"fused": True} if self._fuses(every) else {})}
        try:
            return self.kind(groups, **keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"job.yaml: optimizer {self.kind.__name__}: {_line(error)}") from error

    def _fuses(self, parameters: list[nn.Parameter]) -> bool:
        ours = self.kind.__module__.startswith("torch.optim") and self.kind.__name__ in FUSED
        said = {"fused", "foreach", "capturable", "differentiable"} & set(self.keywords)
        return ours and not said and bool(parameters) and all(p.is_cuda and p.is_floating_point() for p in parameters)

    def check_names(self, names: Iterable[str]) -> None:
        """Raises SpecError for a pattern that matches no parameter."""
        known = list(names)
        for pattern in self.no_decay:
            if not any(fnmatchcase(name, pattern) for name in known):
                near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
                raise SpecError(
                    f"job.yaml: key 'optimizer.no_decay': no parameter is named like '{pattern}'; near it: {', '.join(near)}"
                )


def class_of(path: str) -> type[torch.optim.Optimizer]:
    """The optimizer class at `package.module.Class`. Raises SpecError."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError) as error:
        raise SpecError(f"job.yaml: key 'optimizer.path': '{path}' cannot be imported: {_line(error)}") from error
    except AttributeError:
        names = [n for n, v in vars(importlib.import_module(module)).items() if isinstance(v, type)]
        near = difflib.get_close_matches(name, names, n=1)
        more = f"; did you mean '{module}.{near[0]}'?" if near else ""
        raise SpecError(f"job.yaml: key 'optimizer.path': {module} has no '{name}'{more}") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise SpecError(f"job.yaml: key 'optimizer.path': '{path}' is no torch.optim.Optimizer")
    return found


def _check_keywords(kind: type, keywords: Mapping[str, Any], decays: bool) -> None:
    parameters = inspect.signature(kind).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names = [name for name in parameters if name not in ("params", "self")]
    for key in keywords:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            more = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(names)}"
            raise SpecError(f"job.yaml: unknown key 'optimizer.{key}' of {kind.__name__}; {more}")
    if decays and "weight_decay" not in names:
        raise SpecError(f"job.yaml: key 'optimizer.no_decay': {kind.__name__} has no weight_decay")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# ------------------------------------------------------------------------------------------------ what it keeps


@dataclass(frozen=True)
class Kept:
    """State entries of an optimizer: of the parameter's shape, scalar; and with which values they begin, where not with 0."""

    entries: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    first: tuple[tuple[str, float], ...] = ()


class _Notes(dict[str, Any]):
    """State of one parameter that notes what each entry was at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, torch.Tensor] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.first.setdefault(key, value.detach().clone())
        super().__setitem__(key, value)


@dataclass
class _Dry:
    """An optimizer over replicas of `rows` rows per dimension 0, with the same gradients whatever the rows."""

    program: Program
    specs: list[TensorSpec]
    rows: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values = {s.fqn: torch.rand(_tiny(s), generator=generator) + 0.5 for s in self.specs}
        self.gradients = [
            {s.fqn: torch.rand(_tiny(s), generator=generator) - 0.3 for s in self.specs} for _ in range(DRY_STEPS)
        ]
        self.named = {fqn: nn.Parameter(self._part(value).clone()) for fqn, value in self.values.items()}
        assert self.program.optimizer is not None
        self.optimizer = self.program.optimizer(list(self.named.items()))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ProgramError(f"Program.optimizer must return one torch.optim.Optimizer, not {type(self.optimizer).__name__}")
        self.name = type(self.optimizer).__name__

    def _part(self, value: torch.Tensor) -> torch.Tensor:
        return value[: self.rows] if value.ndim else value

    def step(self, number: int) -> None:
        for fqn, parameter in self.named.items():
            parameter.grad = self._part(self.gradients[number][fqn]).clone()
        try:
            self.optimizer.step()
        except Exception as error:  # a boundary: any optimizer may raise anything
            text = f"{type(error).__name__}: {_line(error)}"
            why = "it communicates" if "process group" in text.lower() else "a plain step() fails"
            raise ProgramError(f"optimizer {self.name}: {why} ({text}); {ONLY}") from error

    def settings(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in self.optimizer.param_groups]


def _tiny(spec: TensorSpec) -> list[int]:
    return [WHOLE, *(min(d, 2) + 1 for d in spec.shape[1:])] if spec.shape else []


def what_it_keeps(program: Program, specs: Iterable[TensorSpec]) -> Kept:
    """Found by dry steps. Raises ProgramError (SpecError for an optimizer of job.yaml) that names it where it cannot be cut."""
    if program.optimizer is None:
        return Kept()
    if not isinstance(program.optimizer, JobOptimizer):
        return _kept(program, specs)
    try:
        return _kept(program, specs)
    except ProgramError as error:
        raise SpecError(f"job.yaml: {error}") from error


def _kept(program: Program, specs: Iterable[TensorSpec]) -> Kept:
    every = [s for s in specs if s.trainable and s.tied_to is None]
    if isinstance(program.optimizer, JobOptimizer):
        program.optimizer.check_names(s.fqn for s in every)
    kinds = {re.sub(r"\d+", "*", spec.fqn) + str(len(spec.shape)): spec for spec in reversed(every)}
    whole = _Dry(program, list(reversed(kinds.values())), WHOLE)
    noted = _note(whole)
    before = whole.settings()
    whole.step(0)
    kept = _entries(whole, noted)
    _check_first_step(whole, _Dry(program, whole.specs, WHOLE), kept)
    for number in range(1, DRY_STEPS):
        whole.step(number)
    changed = [key for old, new in zip(before, whole.settings(), strict=True) for key in old if old[key] != new.get(key)]
    if changed and not any(isinstance(held, Settings) for held in program.extra_state.values()):
        raise ProgramError(
            f"optimizer {whole.name}: a step changes '{changed[0]}' in its param_groups, which is no part of the training "
            "state; only optimizers whose state is in `state` can be moved between layouts"
        )
    _check_parts(whole, _Dry(program, whole.specs, PART), kept)
    return kept


def _note(dry: _Dry) -> dict[str, _Notes]:
    """From now on the first value of each state entry is noted; some are there before the first step."""
    noted: defaultdict[torch.Tensor, _Notes] = defaultdict(_Notes)
    for parameter, state in dry.optimizer.state.items():
        for key, value in state.items():
            noted[parameter][key] = value
    dry.optimizer.state = noted
    return {fqn: noted[parameter] for fqn, parameter in dry.named.items()}


def _entries(dry: _Dry, noted: Mapping[str, _Notes]) -> Kept:
    found: set[Kept] = set()
    for fqn, parameter in dry.named.items():
        state = noted[fqn]
        like = tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape and v.ndim)
        scalar = tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim == 0)
        odd = [k for k, v in state.items() if k not in like and k not in scalar and v is not None]
        if odd:
            raise ProgramError(
                f"optimizer {dry.name}: state '{odd[0]}' of {fqn} is neither a scalar tensor nor of the parameter's shape; "
                + ONLY
            )
        first = tuple((key, value) for key in (*like, *scalar) if (value := _constant(state.first[key])))
        found.add(Kept(like, scalar, first))
    if len(found) > 1:
        raise ProgramError(f"optimizer {dry.name} keeps different entries for different parameters: {found}")
    return found.pop() if found else Kept()


def _constant(value: torch.Tensor) -> float:
    """The number that all elements are, 0 where they differ."""
    flat = value.flatten()
    return float(flat[0]) if flat.numel() and bool((flat == flat[0]).all()) else 0.0


def _check_first_step(done: _Dry, filled: _Dry, kept: Kept) -> None:
    """A state that was filled with constants beforehand must give the same first step."""
    first = dict(kept.first)
    for parameter in filled.named.values():
        state: dict[str, Any] = filled.optimizer.state[parameter]
        for key in kept.scalars:
            state[key] = torch.tensor(first.get(key, 0.0))
        for key in kept.entries:
            state[key] = torch.full_like(parameter, first.get(key, 0.0), requires_grad=False)
    filled.step(0)
    for fqn, parameter in done.named.items():
        if not torch.allclose(parameter, filled.named[fqn], rtol=1e-5, atol=1e-7):
            raise ProgramError(
                f"optimizer {done.name}: its state does not begin as constants ({fqn}), as with dampening; such an optimizer "
                "cannot be set up before its first step"
            )


def _check_parts(whole: _Dry, part: _Dry, kept: Kept) -> None:
    for number in range(DRY_STEPS):
        part.step(number)
    for fqn, parameter in whole.named.items():
        pairs = [(parameter, part.named[fqn])]
        pairs += [(whole.optimizer.state[parameter][key], part.optimizer.state[part.named[fqn]][key]) for key in kept.entries]
        for mine, other in pairs:
            cut = mine[:PART] if mine.ndim else mine
            if not torch.allclose(cut, other, rtol=1e-5, atol=1e-7):
                raise ProgramError(
                    f"optimizer {whole.name} is not element-wise: a step on a part of {fqn} depends on the rest of it; " + ONLY
                )
