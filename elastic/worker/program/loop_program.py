"""A Program made of what a script has built itself: a module, optimizers over it, a dataset."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    default_collate,
)

from elastic.data.streams import has_items
from elastic.errors import ProgramError, SpecError
from elastic.program import Program
from elastic.types import OptimizerSpec
from elastic.worker.process.call_log import OF_GROUP
from elastic.worker.process.readback import Number
from elastic.worker.program.calls import ModelCall
from elastic.worker.program.optimizers import Optimizer, attributes_of, by_name
from elastic.worker.program.owned.optimizer_counters import (
    COUNTERS,
    GROUP,
    own_of,
    set_own,
    settings_of,
)

GROUPS = COUNTERS  # the name of the optimizers' settings among the extra state
EPOCHS = "epochs"  # among the settings: instead of steps
WHERE = "elastic.loop(optimizer=...)"
EVALUATE = "elastic.loop(evaluate=...)"
MODE = "training"  # the attribute of a module
MOST_TEXT = 3072  # of what is set on modules, in the box of the settings, which has 4096 to spare
Own = Optimizer | dict[str, Optimizer]  # what a script gives: one, or several by name


class NotOfModel(ProgramError):
    """Whatever samples there are: no parameter got a gradient."""

    def __init__(self) -> None:
        super().__init__(
            "the loss given to run.backward does not depend on run.model: call run.model(...), not "
            "the model that was given to elastic.loop"
        )


@dataclass(frozen=True)
class LoopProgram(Program):
    """`settings`: keys of a job.yaml that the script gave itself. `evaluation`: (model, batch) ->
    summed loss, or a dict of sums with it. `given`: turns a batch, which is a dict inside, into
    what the script's dataset gives. `called`: how the script calls its model first, as far as a
    trial has come; `called_before`: without training it, before; `notes`: lines that a person is to
    know of it."""

    of: ClassVar[str] = "elastic.loop: "
    anyway: ClassVar[str] = 'elastic.loop(trusted_axes=["dp"])'
    builds: ClassVar[str] = "elastic.loop: a copy of the model (copy.deepcopy)"
    keys: ClassVar[str] = "of elastic.loop"

    settings: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Callable[[Any, Any], Any] | None = None
    given: Callable[[Mapping[str, torch.Tensor]], Any] = dict
    called: ModelCall | None = None
    called_before: ModelCall | None = None
    notes: tuple[str, ...] = ()


def no_loss(output: Any, batch: Any) -> Any:
    """A loop has no loss function of its own: its body computes the loss."""
    raise ProgramError(
        "a job whose script enters elastic.loop computes its loss in the script; Program.loss is "
        "not called"
    )


def evaluated(found: Any) -> tuple[Number, Mapping[str, Any]]:
    """The summed loss that a script's `evaluate` has returned, and the sums beside it. Raises
    ProgramError where it is neither."""
    beside = {}
    if isinstance(found, Mapping):
        if "loss" not in found:
            raise ProgramError(
                f"{EVALUATE} returned a dict without 'loss': name the loss so, summed over the "
                f"batch, beside {', '.join(map(repr, found)) or 'what else is summed'}"
            )
        beside = {key: value for key, value in found.items() if key != "loss"}
        found = found["loss"]
    if isinstance(found, torch.Tensor) and found.numel() == 1 or isinstance(found, int | float):
        return found, beside
    kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else None
    raise ProgramError(
        f"{EVALUATE} returned {kind or type(found).__name__}; it must return the loss summed over "
        "the batch, or a dict of sums with 'loss' among them"
    )


# ---------------------------------------------------------------------------------------- the model


def module_factory(module: nn.Module) -> Callable[[], nn.Module]:
    """Copies of the module on the device that is the default when it is called: with its values, or
    (meta) without memory."""

    def build() -> nn.Module:
        on_meta = torch.get_default_device().type == "meta"
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            value = torch.empty_like(parameter, device="meta") if on_meta else parameter.detach()
            copied = nn.Parameter(value, requires_grad=parameter.requires_grad)
            vars(copied).update(attributes_of(parameter))
            memo[id(parameter)] = copied
        for buffer in module.buffers():
            here = torch.empty_like(buffer, device="meta") if on_meta else buffer.detach().clone()
            memo[id(buffer)] = here
        return copy.deepcopy(module, memo)

    return build


# ------------------------------------------------------------------------------------ the optimizer


class OptimizerFactory:
    """Optimizers like the script's own: of their classes, with their groups and settings, over
    other tensors of the same names."""

    def __init__(self, module: nn.Module, optimizer: Own) -> None:
        names: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        self.optimizer = optimizer
        self.names: dict[str, list[list[str]]] = {}
        for key, own in by_name(optimizer, WHERE).items():
            for group in own.param_groups:
                strange = [p for p in group["params"] if id(p) not in names]
                if strange:
                    raise SpecError(
                        "elastic.loop: the optimizer holds a parameter of shape "
                        f"{list(strange[0].shape)} that the model does "
                        "not have; make it of the parameters of the model that you give"
                    )
                self.names.setdefault(key, []).append([names[id(p)] for p in group["params"]])

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> Own:
        have = dict(named)
        made = {
            key: self._like(own, self.names[key], have)
            for key, own in by_name(self.optimizer).items()
        }
        return made.get("", made)

    def _like(
        self, own: Optimizer, names: list[list[str]], have: Mapping[str, nn.Parameter]
    ) -> Optimizer:
        made: Optimizer = object.__new__(type(own))
        # schedulers wrap `step`
        made.__dict__.update({key: value for key, value in own.__dict__.items() if key != "step"})
        made.state = defaultdict(dict)
        set_own(made, copy.deepcopy(own_of(own)))
        made.param_groups = [
            {**group, "params": [have[name] for name in here if name in have]}
            for group, here in zip(own.param_groups, names, strict=True)
        ]
        return made


def rebind(optimizer: Own, made: dict[str, Optimizer]) -> None:
    """Gives the script's own optimizers the tensors and the state of those that were made like
    them, and their places; their settings stay."""
    for key, own in by_name(optimizer).items():
        for group, new in zip(own.param_groups, made[key].param_groups, strict=True):
            group["params"] = new["params"]
        own.state = made[key].state
        made[key] = own


def clear_by(factory: OptimizerFactory, optimizer: Own, model: nn.Module) -> None:
    """From now on `zero_grad` of the script's own optimizers clears the gradients of this model:
    the tensors that they step are its parts, which have theirs in a step alone."""
    held = dict(model.named_parameters())
    for key, own in by_name(optimizer).items():
        names = [name for group in factory.names[key] for name in group]
        cleared = [held[name] for name in names if name in held]
        own.zero_grad = partial(_clear, cleared)  # type: ignore[method-assign]


def _clear(parameters: list[nn.Parameter], set_to_none: bool = True) -> None:
    for parameter in parameters:
        parameter.grad = None


class ModuleNumbers:
    """Modes of modules (`training`) and numbers that they had when they were built (`drop.p`), as
    far as the script has set them inside of its loop: the modules of the next generation have them
    too. What a forward pass changes itself is none of it."""

    def __init__(self) -> None:
        # a mode is that of all modules below it, but for those that have another
        self._kept: dict[str, float] = {}
        self._text, self._known = "", True
        self._held: list[tuple[str, dict[str, Any], str]] = []
        self._built: list[Any] = []
        self._last: list[Any] = []
        self._set: set[int] = set()
        self._handed_over = False

    def begin(self, module: nn.Module) -> None:
        """Those of a generation get what was set before."""
        kept = self.kept()
        self._held = [
            (f"{name}.{key}".removeprefix("."), vars(one), key)
            for name, one in module.named_modules()
            for key, value in vars(one).items()
            if key == MODE or _is_number(value) and not key.startswith("_")
        ]
        self._last = self._built = self._values()
        self._set, self._known = set(), False
        modes: dict[str, Any] = {}
        changes = any(map(_is_mode, kept))
        for name, held, key in self._held:
            if key == MODE and changes:
                modes[name] = held[key] = kept.get(name, modes.get(_above(name), held[key]))
            elif name in kept:
                held[key] = kept[name]
        self.look()

    def look(self) -> None:
        """What has changed since the last time the script has set."""
        before, now = self._last, self._values()
        changed = {i for i, value in enumerate(now) if value is not before[i]}
        changed = {i for i in changed if not _equal(now[i], before[i])}
        self._last = now
        if changed:
            self._set |= changed
            self._known = False

    def passed(self) -> None:
        """What has changed since the last time it has not."""
        self._last = self._values()

    def hand_over(self) -> None:
        """The script waits: until `take_back` it sets nothing, and what changes is changed by a
        validation or the like."""
        self.look()
        self._handed_over = True

    def take_back(self) -> None:
        self._handed_over = False
        self.passed()

    def kept(self) -> dict[str, float]:
        """Name -> what it is set to now. Raises ProgramError where it is more than travels."""
        if not self._handed_over:
            self.look()
        if not self._known:
            self._kept = self._taken()
            self._text, self._known = _packed(self._kept), True
        return self._kept

    def text(self) -> str:
        """The same as it travels; '' = none."""
        self.kept()
        return self._text

    def load(self, text: str) -> None:
        """That of a state. A script that has a model already has set what it wants itself."""
        if not self._held and text:
            self._kept, self._text = json.loads(zlib.decompress(base64.b64decode(text))), text

    def _values(self) -> list[Any]:
        return [held.get(key) for _, held, key in self._held]

    def _taken(self) -> dict[str, float]:
        found: dict[str, float] = {}
        modes = False
        for i in sorted(self._set):
            (name, _, key), value = self._held[i], self._last[i]
            if _equal(value, self._built[i]):
                continue
            if key == MODE:
                modes = True
            elif _is_number(value):
                found[name] = float(value) if isinstance(value, float) else int(value)
        if modes:
            names = [name for name, *_ in self._held]
            last, built = (
                dict(zip(names, values, strict=True)) for values in (self._last, self._built)
            )
            each = {name: bool(last[name]) for name, _, key in self._held if key == MODE}
            above = {**each, "": built[MODE]}
            found |= {k: v for k, v in each.items() if above.get(_above(k)) is not v}
        return found


def _is_number(value: object) -> bool:
    """A flag is none: what it says is often of other attributes too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(one: Any, other: Any) -> bool:
    return (
        one is other
        or type(one) is type(other)
        and isinstance(one, int | float)
        and bool(one == other)
    )


def _is_mode(name: str) -> bool:
    return name.rpartition(".")[2] == MODE


def _above(mode: str) -> str:
    """That of the module which has the one of this mode; "" = none has it."""
    module = mode.removesuffix(MODE).removesuffix(".")
    return f"{module.rpartition('.')[0]}.{MODE}".removeprefix(".") if module else ""


def _packed(settings: Mapping[str, float]) -> str:
    text = base64.b64encode(zlib.compress(json.dumps(settings).encode())).decode()
    if len(text) > MOST_TEXT:
        raise ProgramError(
            f"the script sets modes and numbers on modules of run.model inside of its loop, "
            f"{len(settings)} that are not as they were built ({next(iter(settings))} ...), more "
            "than go along with a change of the workers: set them before elastic.loop"
        )
    return text if settings else ""


class Settings:
    """The optimizers' learning rates and other settings, and what they count beside, as extra
    state: whoever changes them, they travel with the model. So does what the script sets on its
    modules."""

    def __init__(self, optimizer: Own) -> None:
        self.each = by_name(optimizer, WHERE)
        self.modules: ModuleNumbers | None = None  # of the model that is trained, in a worker
        self.counts: tuple[str, ...] = ()  # that a state must have beside settings

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for own in self.each.values() for group in own.param_groups]

    def state_dict(self) -> dict[str, Any]:
        own = [own_of(one) for one in self.each.values()]
        found = {"groups": settings_of(self.groups)} | ({"own": own} if any(own) else {})
        text = self.modules.text() if self.modules is not None else ""
        return found | ({"modules": text} if text else {})

    def expect(self, specs: Iterable[OptimizerSpec], step: int) -> None:
        """What is loaded next is the state behind so many steps of these optimizers."""
        names = [name for spec in specs for name in spec.counters]
        self.counts = tuple(name for name in names if not name.startswith(f"{GROUP}.") and step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "own" not in state and self.counts:
            raise ProgramError(
                f"the state to continue from has no {self.counts[0]}, which the script's optimizer "
                "counts: it was stored by a version that did not keep it, and the next step would "
                "be another one; begin a new run with its weights (elastic checkpoint import)"
            )
        for group, saved in zip(self.groups, state["groups"], strict=True):
            group.update(saved)
        if self.modules is not None:
            self.modules.load(state.get("modules", ""))
        # a state from before the first step may have none
        for optimizer, own in zip(
            self.each.values(), state.get("own") or [{}] * len(self.each), strict=True
        ):
            set_own(optimizer, own)


def numbers_of(optimizer: Own) -> dict[str, float]:
    """Learning rates and whatever else is a number among the optimizers' settings, by where it
    stands, as far as it is in host memory; to six digits, since the mathematics of two kinds of
    machines differ in the last ones."""
    found = {}
    for name, one in by_name(optimizer).items():
        where = f"optimizer[{name!r}]" if name else "optimizer"
        for i, group in enumerate(settings_of(one.param_groups)):
            for key, value in group.items():
                place = f"{where}{OF_GROUP}{i}][{key!r}]"
                several = isinstance(value, list | tuple)
                for k, number in enumerate(value if several else (value,)):
                    if isinstance(number, torch.Tensor):
                        plain = number.numel() == 1 and number.device.type == "cpu"
                    else:
                        plain = _is_number(number) or isinstance(number, np.number)
                    if plain:
                        found[f"{place}[{k}]" if several else place] = float(f"{float(number):.6g}")
    return found


# ----------------------------------------------------------------------------------------- the data


def map_style(dataset: Any, name: str) -> Any:
    """The dataset of a DataLoader; whatever else is given stays. `name`: of the argument. Raises
    SpecError where it is no dataset with numbers, and where the loader does what would get lost."""
    loader = dataset if isinstance(dataset, DataLoader) else None
    dataset = dataset if loader is None else loader.dataset
    there = {"__len__": hasattr(dataset, "__len__"), "__getitem__": has_items(dataset)}
    for needed, found in there.items():
        if not found:
            raise SpecError(
                f"elastic.loop: {name} is a {type(dataset).__name__} without {needed}; it must be "
                "map-style: len() and [sample id]"
            )
    if loader is not None:
        _check_loader(loader, len(dataset))
    return dataset


def _check_loader(loader: DataLoader[Any], n_samples: int) -> None:
    if loader.collate_fn is not default_collate:
        raise SpecError(
            "elastic.loop: the DataLoader has a collate_fn of its own; batches are stacked here: "
            "do in the dataset's [sample id] what it does"
        )
    known = {SequentialSampler, RandomSampler, DistributedSampler, BatchSampler, type(None)}
    by_batches = loader.batch_sampler
    for own in (loader.sampler, by_batches, getattr(by_batches, "sampler", None)):
        what, give = type(own).__name__, "give the dataset alone"
        if isinstance(own, RandomSampler):
            if own.replacement:
                what += "(replacement=True)"
            elif own.num_samples != len(own.data_source):
                what += f"(num_samples={own.num_samples})"
        n = _samples_of(own)
        if n is not None and n != n_samples:
            what += f" of {n} of the {n_samples} samples"
            give = "give torch.utils.data.Subset(dataset, indices)"
        if type(own) not in known or what != type(own).__name__:
            raise SpecError(
                f"elastic.loop: the DataLoader has a {what}; the order is elastic's, each sample "
                f"of an epoch once: {give}"
            )


def _samples_of(sampler: Any) -> int | None:
    """How many there are for it to choose from; None: it does not say."""
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler.indices)
    of: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", None))
    return len(of) if hasattr(of, "__len__") else None


@dataclass(frozen=True)
class Numbered:
    """A dataset of tuples, or of single tensors, as one of dicts: "0", "1", ..."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.dataset[index]
        return {
            str(i): part
            for i, part in enumerate(item if isinstance(item, tuple | list) else (item,))
        }


def as_tuple(batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(batch[str(i)] for i in range(len(batch)))


def as_tensor(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return batch["0"]


def given_of(item: Any) -> Callable[[Mapping[str, torch.Tensor]], Any]:
    """How a batch of such items is given to the script. Raises SpecError where an item is none that
    can be stacked."""
    if isinstance(item, Mapping):
        return dict
    if isinstance(item, tuple | list):
        return as_tuple
    if isinstance(item, torch.Tensor | np.ndarray):
        return as_tensor
    raise SpecError(
        f"elastic.loop: a sample is a {type(item).__name__}; it must be a dict or tuple of "
        "tensors, or a tensor"
    )
