"""Optimizers: one or several, out of a Program or by import path out of job.yaml, each over its
part of what a rank holds."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from elastic.errors import ElasticError, SpecError, alike
from elastic.program import Program, in_blocks
from elastic.types import TensorSpec
from elastic.worker.program.owned.low_bit_state import MISSING
from elastic.worker.program.owned.optimizer_counters import Values, put_back, values_of

Named = Iterable[tuple[str, nn.Parameter]]
Optimizer = torch.optim.Optimizer
MUON: type[Optimizer] = torch.optim.Muon
LOW_BIT = "torchao"  # the library of optimizers whose state has few bits
FUSED = ("Adam", "AdamW")  # of torch.optim, on CUDA, where the job does not say otherwise
OWN_KEYS = ("path", "no_decay", "parameters")
MATRICES = "matrices"  # of two dimensions, in the blocks: neither an embedding nor the head
MUON_ADAMW = "muon+adamw"


def by_name(made: object, where: str = "Program.optimizer") -> dict[str, Optimizer]:
    """Name -> optimizer; the only one is named ''. Raises SpecError where it is neither one nor a
    dict of them."""
    if isinstance(made, Optimizer):
        return {"": made}
    if not isinstance(made, Mapping) or not made:
        kind = "an empty dict" if isinstance(made, Mapping) else type(made).__name__
        raise SpecError(
            f"{where} must give a torch.optim.Optimizer, or a dict of them by name, not {kind}"
        )
    for name, one in made.items():
        if not isinstance(name, str) or not name or not isinstance(one, Optimizer):
            raise SpecError(
                f"{where} gives {name!r}: {type(one).__name__}; a dict of optimizers has texts as "
                "names and a torch.optim.Optimizer for each"
            )
    return dict(made)


def shown(name: str, optimizer: Optimizer) -> str:
    """As errors name it."""
    return f"'{name}' ({type(optimizer).__name__})" if name else type(optimizer).__name__


class Optimizers:
    """A program's optimizers over some tensors of its model; one may have none of them, as on a
    pipeline stage.

    Program.optimizer is called with all trainable parameters of the whole model, in their whole
    shapes and without memory, on every rank: what it makes of names and shapes is the same in every
    layout. Then the tensors that are here take the places of those, and what is not here is left
    out. `whole`: names of those that step whole tensors; `counting`: of those that count beside the
    state of their parameters, which they must do on every rank alike. Raises SpecError unless each
    parameter has exactly one optimizer.
    """

    def __init__(
        self,
        program: Program,
        specs: Sequence[TensorSpec],
        tensors: Mapping[str, nn.Parameter],
        *,
        whole: Collection[str] = (),
        counting: Collection[str] = (),
    ) -> None:
        wholes = {
            spec.fqn: nn.Parameter(
                torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            )
            for spec in specs
            if spec.trainable and not spec.buffer and spec.tied_to is None
        }
        for spec in specs:
            for tensor in (wholes.get(spec.fqn), tensors.get(spec.fqn)):
                if tensor is not None:
                    vars(tensor).update(spec.attributes)
        names = {id(whole): fqn for fqn, whole in wholes.items()}
        self.given = tuple(wholes.values())
        self.each = by_name(_called(program, wholes))
        self.of = _owners(self.each, names)
        self.whole = whole
        self.begun = False
        self.stand_ins: dict[tuple[str, int], nn.Parameter] = {}  # by optimizer and group
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for name, optimizer in self.each.items():
            for key in [key for key in optimizer.state if not isinstance(key, str)]:
                self.begun |= bool(optimizer.state.pop(key))
            for i, group in enumerate(optimizer.param_groups):
                if name in counting and group["params"]:
                    self.stand_ins[name, i] = _stand_in(group["params"][0], device)
                here = [fqn for whole in group["params"] if (fqn := names[id(whole)]) in tensors]
                group["params"][:] = [tensors[fqn] for fqn in here]
                if "param_names" in group:
                    group["param_names"] = here
        if isinstance(program.optimizer, JobOptimizer):
            program.optimizer.fuse(self.each)
        self.base_lr = [group["lr"] for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.each.values() for group in optimizer.param_groups]

    def owner(self, fqn: str) -> Optimizer:
        """The one that the parameter belongs to."""
        return self.each[self.of[fqn]]

    def set_factor(self, factor: float) -> None:
        """On the learning rates that they were made with."""
        for group, lr in zip(self.groups, self.base_lr, strict=True):
            group["lr"] = lr * factor

    def step(self) -> None:
        """Of all that are element-wise, also where one has no parameter here: what it counts is the
        same on every rank."""
        for name, optimizer in self.each.items():
            if name not in self.whole:
                with self.made_for(name):
                    step_of(optimizer)

    def values(self) -> dict[str, Values]:
        """Of each optimizer that steps whole tensors, its settings and what it counts, as they are
        now."""
        return {name: values_of(self.each[name]) for name in self.whole}

    def step_whole(
        self, tensors: Iterable[nn.Parameter], values: Mapping[str, Values] | None = None
    ) -> None:
        """Of those that step whole tensors: these tensors only, also where they are none. Where a
        step of the training is several of these, all begin with the `values` of the first: one that
        counts steps counts one."""
        wanted = {id(tensor) for tensor in tensors}
        for name in [name for name in self.each if name in self.whole]:
            if values is not None:
                put_back(self.each[name], values[name])
            with self.made_for(name, wanted):
                step_of(self.each[name])

    @contextmanager
    def made_for(self, name: str, wanted: Collection[int] | None = None) -> Iterator[None]:
        """The optimizer as if it had been made for these tensors only, None = all that are here. A
        group of one that counts has a stand-in where it has none of them: many leave empty groups
        out."""
        optimizer = self.each[name]
        every = [group["params"] for group in optimizer.param_groups]
        for i, (group, params) in enumerate(zip(optimizer.param_groups, every, strict=True)):
            here = params if wanted is None else [p for p in params if id(p) in wanted]
            stand_in = self.stand_ins.get((name, i))
            if not here and stand_in is not None:
                stand_in.grad = torch.zeros_like(stand_in)
                here = [stand_in]
            group["params"] = here
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, every, strict=True):
                group["params"] = params
            for stand_in in self.stand_ins.values():
                optimizer.state.pop(stand_in, None)


def _stand_in(like: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A tensor of one element, of as many dimensions."""
    made = nn.Parameter(torch.zeros((1,) * like.ndim, dtype=like.dtype, device=device))
    vars(made).update(attributes_of(like))
    return made


def attributes_of(parameter: torch.Tensor) -> dict[str, bool | int | float | str]:
    """What a model has set on it that other tensors in its place have too: `weight.lr_mul = 75.0`,
    for optimizers and groups that read it."""
    return {k: x for k, x in vars(parameter).items() if isinstance(x, bool | int | float | str)}


def step_of(optimizer: Optimizer) -> None:
    """torchao's compile their step, each shape by itself: on CUDA that is many kernels in one,
    elsewhere it is a C++ compiler at work for minutes."""
    on_cuda = any(p.is_cuda for group in optimizer.param_groups for p in group["params"])
    compiles = type(optimizer).__module__.partition(".")[0] == LOW_BIT and not on_cuda
    with torch.compiler.set_stance("force_eager") if compiles else nullcontext():
        optimizer.step()


def _called(program: Program, wholes: Mapping[str, nn.Parameter]) -> object:
    assert program.optimizer is not None
    try:
        return program.optimizer(list(wholes.items()))
    except ElasticError:
        raise
    except Exception as error:  # a boundary: the user's function may raise anything
        raise SpecError(
            f"Program.optimizer raised {type(error).__name__}: {line_of(error)}"
        ) from error


def _owners(each: Mapping[str, Optimizer], names: Mapping[int, str]) -> dict[str, str]:
    """Parameter -> the optimizer that has it."""
    owners: dict[str, str] = {}
    for name, optimizer in each.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                fqn = names.get(id(parameter))
                if fqn is None:
                    raise SpecError(
                        f"optimizer {shown(name, optimizer)} has a tensor of shape "
                        f"{list(parameter.shape)} that it was not "
                        "given; make each of the parameters in the (name, parameter) pairs"
                    )
                if fqn in owners:
                    raise SpecError(
                        f"parameter {fqn} is in two optimizers, '{owners[fqn]}' and '{name}'; "
                        "each trainable parameter must be in exactly one"
                    )
                owners[fqn] = name
    missing = [fqn for fqn in names.values() if fqn not in owners]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        only = f"the optimizer ({shown('', next(iter(each.values())))})"
        where = "any optimizer" if len(each) > 1 else only
        raise SpecError(
            f"parameter {missing[0]}{more} is not in {where}; each trainable parameter must be in "
            "exactly one (requires_grad False in the model freezes it)"
        )
    return owners


# ----------------------------------------------------------------------------------- by import path


@dataclass(frozen=True)
class OptimizerPart:
    """One optimizer of a job. `key`: where it stands in job.yaml; `patterns`: of the names of its
    parameters, or MATRICES, None = those that no other has."""

    key: str
    kind: type[Optimizer]
    patterns: tuple[str, ...] | str | None
    no_decay: tuple[str, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, key: str, given: Mapping[str, Any]) -> OptimizerPart:
        kind = class_of(given["path"], key)
        patterns = given.get("parameters")
        keywords = {
            k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k not in OWN_KEYS
        }
        patterns = tuple(patterns) if isinstance(patterns, list) else patterns
        part = cls(key, kind, patterns, tuple(given.get("no_decay") or ()), keywords)
        part.check_keywords()
        return part

    def asks(self, name: str, parameter: nn.Parameter, blocks: str | Sequence[str]) -> bool:
        """Is it one of those that it names?"""
        if self.patterns == MATRICES:
            return parameter.ndim == 2 and in_blocks(name, blocks)
        return matched(name, self.patterns or ())

    def make(self, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        if not named and self.patterns == MATRICES:
            raise SpecError(
                f"job.yaml: key '{self.key}': the model has no matrices in its blocks "
                "(`blocks` of the program says which modules these are); give it `parameters`"
            )
        if not named:
            raise SpecError(
                f"job.yaml: key '{self.key}': no parameter is left for it; leave it out, or give "
                "it `parameters`"
            )
        decayed = [p for name, p in named if not matched(name, self.no_decay)]
        spared = [p for name, p in named if matched(name, self.no_decay)]
        groups: list[Any] = [{"params": decayed}] if decayed else []
        if spared:
            groups.append({"params": spared, "weight_decay": 0.0})
        try:
            return self.kind(groups, **self.keywords)
        except (TypeError, ValueError, RuntimeError) as error:
            more = "; `muon+adamw` gives it the matrices alone" if self.kind is MUON else ""
            raise SpecError(
                f"job.yaml: {self.key} {self.kind.__name__}: {line_of(error)}{more}"
            ) from error

    @property
    def may_fuse(self) -> bool:
        ours = self.kind.__module__.startswith("torch.optim") and self.kind.__name__ in FUSED
        return ours and not {"fused", "foreach", "capturable", "differentiable"} & set(
            self.keywords
        )

    def check_names(self, known: Sequence[str]) -> None:
        """Raises SpecError for a pattern that matches no parameter."""
        names = self.patterns if isinstance(self.patterns, tuple) else ()
        for key, patterns in (("no_decay", self.no_decay), ("parameters", names)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):
                    near = alike(pattern, known, 3, least=0.3) or known[:3]
                    raise SpecError(
                        f"job.yaml: key '{self.key}.{key}': no parameter is named like "
                        f"'{pattern}'; near it: {', '.join(near)}"
                    )

    def check_keywords(self) -> None:
        """Raises SpecError for one that the class does not take."""
        parameters = inspect.signature(self.kind).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return
        names = [name for name in parameters if name not in ("params", "self")]
        for key in self.keywords:
            if key not in names:
                near = alike(key, names)
                more = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(names)}"
                raise SpecError(
                    f"job.yaml: unknown key '{self.key}.{key}' of {self.kind.__name__}; {more}"
                )
        if self.no_decay and "weight_decay" not in names:
            raise SpecError(
                f"job.yaml: key '{self.key}.no_decay': {self.kind.__name__} has no weight_decay"
            )


class JobOptimizer:
    """Makes what a job's `optimizer` names: one (`path`, what its class takes, `no_decay`: patterns
    of parameter names), or several by name, each with `parameters`: patterns of the names of its
    own; one without them has the rest. `blocks`: as Program has them."""

    def __init__(
        self, given: Mapping[str, Any], blocks: str | Sequence[str] = Program.blocks
    ) -> None:
        self.blocks = blocks
        if given.get("path") == MUON_ADAMW:
            self.parts = _muon_adamw(given)
            return
        several = "path" not in given
        self.parts = {
            name: OptimizerPart.of(f"optimizer.{name}" if name else "optimizer", one)
            for name, one in (given.items() if several else (("", given),))
        }

    def __call__(self, named: Named) -> Optimizer | dict[str, Optimizer]:
        every = list(named)
        if "" in self.parts:
            return self.parts[""].make(every)
        parts, blocks = self.parts.values(), self.blocks
        taken = {n for n, p in every if any(part.asks(n, p, blocks) for part in parts)}
        made = {}
        for key, part in self.parts.items():
            rest = part.patterns is None
            own = [
                (n, p) for n, p in every if (n not in taken if rest else part.asks(n, p, blocks))
            ]
            made[key] = part.make(own)
        return made

    def check_names(self, names: Iterable[str]) -> None:
        """Raises SpecError for a pattern that matches no parameter."""
        known = list(names)
        for part in self.parts.values():
            part.check_names(known)

    def fuse(self, each: Mapping[str, Optimizer]) -> None:
        """Fused kernels, where the class has them and all of its tensors here are on CUDA."""
        for name, optimizer in each.items():
            here = [p for group in optimizer.param_groups for p in group["params"]]
            fit = here and all(p.is_cuda and p.is_floating_point() for p in here)
            if fit and self.parts[name].may_fuse:
                for group in optimizer.param_groups:
                    group["fused"] = True


def _muon_adamw(given: Mapping[str, Any]) -> dict[str, OptimizerPart]:
    """Muon for the matrices, with steps of the size of AdamW's, and AdamW for the rest: one
    learning rate and one weight decay serve both. A key goes to each of the two that takes it."""
    takes = {kind: set(inspect.signature(kind).parameters) for kind in (MUON, torch.optim.AdamW)}
    known = set().union(*takes.values())
    for key in given:
        if key not in OWN_KEYS and key not in known:
            near = alike(key, known)
            more = f"; did you mean '{near[0]}'?" if near else ""
            raise SpecError(
                f"job.yaml: unknown key 'optimizer.{key}': neither Muon nor AdamW takes it{more}"
            )
    own = {"adjust_lr_fn": "match_rms_adamw", "parameters": MATRICES}
    return {
        kind.__name__.lower(): OptimizerPart.of(
            "optimizer",
            {
                **(own if kind is MUON else {}),
                **{k: v for k, v in given.items() if k == "no_decay" or k in names},
                "path": f"torch.optim.{kind.__name__}",
            },
        )
        for kind, names in takes.items()
    }


def matched(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def class_of(path: str, key: str = "optimizer") -> type[Optimizer]:
    """The optimizer class at `package.module.Class`, which stands under `key` of job.yaml. Raises
    SpecError."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name in (LOW_BIT, module)
        why = MISSING if missing and module.startswith(LOW_BIT) else line_of(error)
        raise SpecError(
            f"job.yaml: key '{key}.path': '{path}' cannot be imported: {why}"
        ) from error
    except AttributeError:
        names = [n for n, v in vars(importlib.import_module(module)).items() if isinstance(v, type)]
        near = alike(name, names)
        more = f"; did you mean '{module}.{near[0]}'?" if near else ""
        raise SpecError(f"job.yaml: key '{key}.path': {module} has no '{name}'{more}") from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise SpecError(f"job.yaml: key '{key}.path': '{path}' is no torch.optim.Optimizer")
    return found


def line_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
