"""One forward pass of a program, followed: how its blocks are called, what is done between them,
what draws random numbers, branches on values or writes buffers. On the meta device nothing is
computed and no weight is stored, whatever the size."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.program import Program
from elastic.types import coarsest
from elastic.user_frames import INSTALLED, STDLIB, outwards
from elastic.version import PACKAGE
from elastic.worker.equivalence.passes.python_numbers import numbers_of
from elastic.worker.parallel.draw_requests import arguments_of
from elastic.worker.program.calls import inputs_of, keywords_of, tensors_in
from elastic.worker.program.norms.batch_norms import by_hand

Batch = dict[str, Tensor]
Labels = frozenset[str]

INPUT = "the model's input"
KEYWORDS = "Program.keywords"
PYTHON, NUMPY = "Python's random", "numpy's random"
FAR = 100_000  # a value that Python asks for, in passes that try what large ones do
MORE_OPERATIONS = 10_000  # than a pass before had: a loop over such a value
NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
NONE: Labels = frozenset()
INTERNAL = (str(Path(torch.__file__).parent), str(PACKAGE / "worker"))
# their outputs have the shape of what they are given, and nothing of its values
SHAPE_ONLY = frozenset(
    f"{kind}{how}"
    for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for how in ("_like", "")
) | {
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "empty_strided",
    "arange",
}


@dataclass(frozen=True)
class Op:
    """An operation outside of all blocks, or one that looks at values or draws. `labels`: what its
    inputs were made from."""

    name: str
    where: str  # file and line of the program
    labels: Labels
    inside: str = ""  # the block, '' = none
    makes: frozenset[int] = frozenset()  # storages
    own: bool = True  # in the program's own files, not in an installed package


@dataclass
class Call:
    """One call of a block. `before`: the operations since the block before, outside of all
    blocks."""

    block: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: list[Op]
    output: Any = None
    depth: int = 0  # of blocks around it
    given: Labels = NONE  # what its arguments were made from
    others: Labels = NONE  # the same without the first positional one


@dataclass
class Followed:
    """What one pass has shown."""

    calls: list[Call] = field(default_factory=list)
    tail: list[Op] = field(default_factory=list)  # behind the last block
    # where the last part or other shape of something was taken outside of the blocks
    viewed: str = ""
    draws: list[Op] = field(default_factory=list)
    branches: list[Op] = field(default_factory=list)  # values that Python has asked for
    written: dict[str, Labels] = field(default_factory=dict)  # buffers -> what was written from
    # those with parameters, in the order of their calls
    modules: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of all operations
    # in blocks behind the first: what did not come through their arguments
    beside: list[Op] = field(default_factory=list)
    weights_written: dict[str, str] = field(default_factory=dict)  # and where
    # attributes of modules with what was made from the samples
    keeps: list[str] = field(default_factory=list)
    computes_in: str = ""  # the type of fewest bits that was made from the samples, '' = float32
    norm: str = ""  # where statistics are taken by a function, outside of any nn.BatchNorm
    python_random: str = ""  # PYTHON or NUMPY, where it was drawn from
    # numbers of Python that modules keep, which were others behind the pass
    numbers: list[str] = field(default_factory=list)
    truth: bool | None = None
    blocks: tuple[str, ...] = ()
    output: Any = None


class Tracer:
    """Follows forward passes of `model`. `truth`: what a truth value that Python asks for is, None
    = as it is, and true on the meta device, where there is none; on a real device False is the
    opposite of what it is. `far`: what each number is."""

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        blocks: Iterable[str],
        *,
        truth: bool | None = None,
        far: int | None = None,
    ) -> None:
        self.program, self.model, self.blocks = program, model, list(blocks)
        self.truth, self.far = truth, far
        self.found = Followed(truth=truth, blocks=tuple(self.blocks))
        self.stack: list[Call] = []
        self.ops: list[Op] = []
        self.labels: dict[int, Labels] = {}
        self.kept: list[Tensor] = []  # so that no two storages have one address
        self.buffers: dict[int, str] = {}
        self.weights: dict[int, str] = {}
        self.persistent: set[str] = set()
        self.most_operations = sys.maxsize
        self.autocast: list[str] = []  # types that it would compute in where the operation is

    # --------------------------------------------------------------------------------------- labels

    def label(self, tensor: Tensor, labels: Labels) -> None:
        self.kept.append(tensor)
        self.labels[_storage(tensor)] = labels

    def labels_of(self, value: Any) -> Labels:
        """What the tensors in a value were made from."""
        return NONE.union(*(self.labels.get(_storage(x), NONE) for x in tensors_in(value)))

    def _label_model(self) -> None:
        self.persistent = set(self.model.state_dict())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.label(parameter, frozenset({f"the weight {name}"}))
            self.weights[_storage(parameter)] = name
        for name, buffer in self.model.named_buffers():
            self.kept.append(buffer)
            self.buffers[_storage(buffer)] = name

    def of_samples(self, labels: Labels) -> bool:
        """Is something made from the samples?"""
        return bool(labels & {INPUT, KEYWORDS, *self.blocks})

    def _buffer_written(self, name: str, labels: Labels) -> None:
        if name in self.persistent or self.of_samples(labels):
            self.found.written[name] = self.found.written.get(name, NONE) | labels

    # ------------------------------------------------------------------------------------- the pass

    def run(self, first: Any, keywords: Mapping[str, Any]) -> Followed:
        """Calls the model in training mode, without gradients. `first`: its positional input.
        Raises what the model raises."""
        self._label_model()
        for tensor in tensors_in(keywords):
            self.label(tensor, frozenset({KEYWORDS}))
        for tensor in tensors_in(first):
            self.label(tensor, frozenset({INPUT}))
        self.model.train()
        before = {name: id(buffer) for name, buffer in self.model.named_buffers()}
        weights = {
            name: (id(p), _storage(p))
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        held = {_storage(x) for _, x in _held(self.model)}
        numbers = numbers_of(self.model)
        with ExitStack() as stack:
            for i, name in enumerate(self.blocks):
                block = self.model.get_submodule(name)
                stack.callback(
                    block.register_forward_pre_hook(self._enters(i), with_kwargs=True).remove
                )
                stack.callback(block.register_forward_hook(self._leaves(), with_kwargs=True).remove)
            for name, module in self.model.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    hook = module.register_forward_pre_hook(
                        lambda *_, name=name: self.found.modules.append(name)
                    )
                    stack.callback(hook.remove)
            drawn = stack.enter_context(python_random(0.999 if self.truth is False else 0.0))
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager_flex_attention())
            stack.enter_context(_Functions(self))
            stack.enter_context(_Mode(self))
            self.found.output = self.model(first, **keywords)
        self.found.tail = self.ops
        after = numbers_of(self.model)
        self.found.numbers = [name for name in after if after[name] != numbers.get(name)]
        self.found.python_random = next(iter(drawn), "")
        for name, buffer in self.model.named_buffers():
            if before.get(name) != id(buffer) and name not in self.found.written:
                self._buffer_written(name, self.labels_of(buffer))
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if weights.get(name) != (id(p), _storage(p)):
                self.found.weights_written.setdefault(name, "")
        for name, tensor in _held(self.model):
            if (
                _storage(tensor) not in held
                and self.of_samples(self.labels_of(tensor))
                and name not in self.found.keeps
            ):
                self.found.keeps.append(name)
        return self.found

    def _enters(self, block: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given, others = self.labels_of((args, kwargs)), self.labels_of((args[1:], kwargs))
            call = Call(
                block, args, kwargs, self.ops, depth=len(self.stack), given=given, others=others
            )
            self.ops = []
            self.found.calls.append(call)
            self.stack.append(call)

        return hook

    def _leaves(self) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            call = self.stack.pop()
            call.output = output
            if not self.stack:
                for tensor in tensors_in(output):
                    self.label(tensor, frozenset({self.blocks[call.block]}))
                self.ops = []

        return hook

    # ----------------------------------------------------------------------------------- operations

    def value(self, tensor: Tensor, real: Any) -> Any:
        """What Python gets that asks for a value."""
        truth = tensor.dtype == torch.bool
        self._note(self.found.branches, "a truth" if truth else "a value", self.labels_of(tensor))
        if truth:
            if real is None or self.truth:
                return self.truth is not False
            return real if self.truth is None else not real
        if self.far is None and real is not None:
            return real
        number = self.far if self.far is not None else int(self.truth is not False)
        number = number if tensor.dtype.is_signed else abs(number)
        if not tensor.is_floating_point() and not tensor.is_complex():
            number = (
                min(number, torch.iinfo(tensor.dtype).max)
                if number > 0
                else max(number, torch.iinfo(tensor.dtype).min)
            )
        return torch.full((), number, dtype=tensor.dtype, device="cpu").item()

    def seen(self, func: Any, args: Any, kwargs: Any, *, out: Any) -> None:
        """One operation that was dispatched."""
        plain = isinstance(func, torch._ops.OpOverload)  # one of a higher order has no schema
        name = func.overloadpacket.__name__ if plain else func.name()
        self.found.names.append(name)
        if len(self.found.names) > self.most_operations:
            raise RuntimeError("too many operations")
        given = (*args, *(kwargs or {}).values())
        labels = self.labels_of(given)
        if (
            plain
            and torch.Tag.nondeterministic_seeded in func.tags
            and arguments_of(func, args, kwargs or {}).get("dropout_p", 1.0)
        ):
            self._note(self.found.draws, name, labels)
        made = list(tensors_in(out))
        if self.of_samples(labels):
            self.found.computes_in = coarsest(
                (self.found.computes_in, *self.autocast, *map(_type, made))
            )
        storages = {_storage(x) for x in tensors_in(given)}
        fresh = NONE if name in SHAPE_ONLY else labels
        mutable = plain and func._schema.is_mutable
        for tensor in made:
            if _storage(tensor) not in storages:
                self.label(tensor, fresh)
            elif mutable:
                self.labels[_storage(tensor)] = self.labels.get(_storage(tensor), NONE) | fresh
        if mutable:
            self._writes(func, args, kwargs or {})
        elif name in NORMS and args[5]:  # its schema does not say that it writes in training
            self._write(args[3:5], labels)
        if self.stack and self.stack[0].block:
            self._beside(name, labels)
        if not self.stack and plain and func.is_view:
            self.found.viewed = self.where()[0]
        elif not self.stack:
            self.ops.append(Op(name, self.where()[0], labels, makes=frozenset(map(_storage, made))))

    def _writes(self, func: Any, args: Any, kwargs: Any) -> None:
        named = func._schema.arguments
        given = [(one, args[i]) for i, one in enumerate(named) if i < len(args)]
        given += [(one, kwargs[one.name]) for one in named[len(args) :] if one.name in kwargs]
        targets = [x for one, x in given if one.alias_info and one.alias_info.is_write]
        others = [x for one, x in given if not (one.alias_info and one.alias_info.is_write)]
        self._write(targets, self.labels_of(others))

    def _write(self, targets: Any, labels: Labels) -> None:
        for tensor in tensors_in(targets):
            self.label(tensor, self.labels_of(tensor) | labels)
            if (buffer := self.buffers.get(_storage(tensor))) is not None:
                self._buffer_written(buffer, labels)
            if (weight := self.weights.get(_storage(tensor))) is not None:
                self.found.weights_written.setdefault(weight, self.where()[0])

    def _beside(self, name: str, labels: Labels) -> None:
        strange = (labels & {INPUT, *self.blocks}) - self.stack[0].given
        if strange and not (self.found.beside and self.found.beside[-1].inside == self.inside):
            self._note(self.found.beside, name, strange)

    def _note(self, notes: list[Op], name: str, labels: Labels) -> None:
        where, own = self.where()
        notes.append(Op(name, where, labels, self.inside, own=own))

    @property
    def inside(self) -> str:
        """The block, '' = none."""
        return self.blocks[self.stack[0].block] if self.stack else ""

    @staticmethod
    def where() -> tuple[str, bool]:
        """File and line of the program's frame that is nearest, and whether that file is its
        own."""
        for frame in outwards(sys._getframe(1)):
            file = frame.f_code.co_filename
            if not file.startswith(INTERNAL) and not file.startswith("<"):
                return f"{Path(file).name}:{frame.f_lineno}", not file.startswith(
                    (STDLIB, INSTALLED)
                )
        return "", False


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            real = None if args[0].is_meta else func(*args, **(kwargs or {}))
            return self.tracer.value(args[0], real)
        out = func(*args, **(kwargs or {}))
        self.tracer.seen(func, args, kwargs, out=out)
        return out


class _Functions(TorchFunctionMode):
    """Which types autocast would compute in (it does nothing on the meta device, and operations
    below it do not see it), and who takes statistics of a batch."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self.tracer.autocast = [
            str(torch.get_autocast_dtype(kind)).removeprefix("torch.") for kind in kinds
        ]
        if by_hand(func, args, kwargs):
            found, inside = self.tracer.found, self.tracer.inside or "forward"
            found.norm = found.norm or f"{inside} ({Tracer.where()[0]}) calls {func.__name__}"
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.").split("_")[0]  # of all float8 the first part


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules keep as plain attributes, and in lists and dicts there."""
    own = ("_parameters", "_buffers", "_modules")
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in own:
                for tensor in _tensors_of(value):
                    yield f"{name}.{key}".removeprefix("."), tensor


def _tensors_of(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        yield value
    elif depth < 3 and isinstance(value, list | tuple | deque | dict):
        for item in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_of(item, depth + 1)


@contextmanager
def eager_flex_attention() -> Iterator[None]:
    """torch compiles it wherever it is called, which goes with no mode that follows operations, and
    refuses gradients on a CPU, which it has where it is not compiled."""
    own = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, flex_attention._validate_device
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    flex_attention._validate_device = lambda *_: None
    try:
        yield
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG, flex_attention._validate_device = own


@contextmanager
def python_random(value: float) -> Iterator[list[str]]:
    """`random.random()`, and what numpy has like it, gives `value`. What was drawn from is in the
    list afterwards."""
    made: dict[tuple[Any, str], Callable[..., Any]] = {
        (random, "random"): lambda own: own() * 0 + value,
        (np.random, "rand"): lambda own, *shape: own(*shape) * 0 + value,
        (np.random, "random"): lambda own, size=None: own(size) * 0 + value,
        (np.random, "random_sample"): lambda own, size=None: own(size) * 0 + value,
        (np.random, "uniform"): lambda own, low=0.0, high=1.0, size=None: (
            own(low, high, size) * 0 + low + (high - low) * value
        ),
    }
    own = {at: getattr(*at) for at in made}
    state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    found: list[str] = []
    for at, call in made.items():
        setattr(*at, partial(call, own[at]))
    try:
        yield found
    finally:
        for at, one in own.items():
            setattr(*at, one)
        if random.getstate() != state:
            found.append(PYTHON)
        if not _same_state(np.random.get_state(legacy=False), numpy_state):
            found.append(NUMPY)
        random.setstate(state)
        np.random.set_state(numpy_state)


def _same_state(one: Any, other: Any) -> bool:
    mine, its = one["state"], other["state"]
    return (
        all(np.array_equal(mine[key], its[key]) for key in mine)
        and one["has_gauss"] == other["has_gauss"]
    )


def follow(
    program: Program, tracer: Tracer, batch: Batch, *, most_operations: int = sys.maxsize
) -> Followed:
    """A pass of the whole model over a batch on the model's device."""
    tracer.most_operations = most_operations
    keywords = keywords_of(program, {key: x.clone() for key, x in batch.items()})
    return tracer.run(inputs_of(program, batch), keywords)


def shape_of(value: Any) -> Any:
    """The form of a value: shapes and dtypes of its tensors, and what is no tensor as it is."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape_of(item) for item in value]
    return (
        value if isinstance(value, int | float | str | bool | type(None)) else type(value).__name__
    )
