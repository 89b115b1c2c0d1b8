"""One forward pass of a program, followed: how its blocks are called, what is done between them, what draws random numbers,
branches on values or writes buffers. On the meta device nothing is computed and no weight is stored, whatever the size."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.program import Program
from elastic.worker.calls import inputs_of, keywords_of
from elastic.worker.sequence import tensors_in

Batch = dict[str, Tensor]
Labels = frozenset[str]

INPUT = "the model's input"
KEYWORDS = "Program.keywords"
NONE: Labels = frozenset()
INSTALLED = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"])
INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
# their outputs have the shape of what they are given, and nothing of its values
SHAPE_ONLY = frozenset(
    f"{kind}{how}" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint") for how in ("_like", "")
) | {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_strided", "arange"}


@dataclass(frozen=True)
class Op:
    """An operation outside of all blocks, or one that looks at values or draws. `labels`: what its inputs were made from."""

    name: str
    where: str  # file and line of the program
    labels: Labels
    inside: str = ""  # the block, '' = none
    makes: frozenset[int] = frozenset()  # storages
    own: bool = True  # in the program's own files, not in an installed package


@dataclass
class Call:
    """One call of a block. `before`: the operations since the block before, outside of all blocks."""

    block: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: list[Op]
    output: Any = None
    depth: int = 0  # of blocks around it


@dataclass
class Followed:
    """What one pass has shown."""

    calls: list[Call] = field(default_factory=list)
    tail: list[Op] = field(default_factory=list)  # behind the last block
    draws: list[Op] = field(default_factory=list)
    branches: list[Op] = field(default_factory=list)  # values that Python has asked for
    written: dict[str, Labels] = field(default_factory=dict)  # buffers -> what was written from
    modules: list[str] = field(default_factory=list)  # those with parameters, in the order of their calls
    names: list[str] = field(default_factory=list)  # of all operations
    python_random: bool = False
    output: Any = None


class Tracer:
    """Follows forward passes of `model`. `truth`: what a value that Python asks for is on the meta device, where there is none;
    on a real device only truth values are overruled."""

    def __init__(self, program: Program, model: nn.Module, blocks: Iterable[str], truth: bool = True) -> None:
        self.program, self.model, self.blocks, self.truth = program, model, list(blocks), truth
        self.found = Followed()
        self.stack: list[Call] = []
        self.ops: list[Op] = []
        self.labels: dict[int, Labels] = {}
        self.kept: list[Tensor] = []  # so that no two storages have one address
        self.buffers: dict[int, str] = {}

    # ------------------------------------------------------------------------------------------ labels

    def label(self, tensor: Tensor, labels: Labels) -> None:
        self.kept.append(tensor)
        self.labels[_storage(tensor)] = labels

    def labels_of(self, value: Any) -> Labels:
        """What the tensors in a value were made from."""
        return NONE.union(*(self.labels.get(_storage(x), NONE) for x in tensors_in(value)))

    def _label_model(self) -> None:
        kept = set(self.model.state_dict())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.label(parameter, frozenset({f"the weight {name}"}))
        for name, buffer in self.model.named_buffers():
            self.kept.append(buffer)
            if name in kept:
                self.buffers[_storage(buffer)] = name

    # ------------------------------------------------------------------------------------------ the pass

    def run(self, first: Any, keywords: Mapping[str, Any]) -> Followed:
        """Calls the model in training mode, without gradients. `first`: its positional input. Raises what the model raises."""
        self._label_model()
        for tensor in tensors_in(keywords):
            self.label(tensor, frozenset({KEYWORDS}))
        for tensor in tensors_in(first):
            self.label(tensor, frozenset({INPUT}))
        self.model.train()
        state = random.getstate()
        before = {name: id(buffer) for name, buffer in self.model.named_buffers()}
        with ExitStack() as stack:
            for i, name in enumerate(self.blocks):
                block = self.model.get_submodule(name)
                stack.callback(block.register_forward_pre_hook(self._enters(i), with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leaves(), with_kwargs=True).remove)
            for name, module in self.model.named_modules():
                if next(module.parameters(recurse=False), None) is not None:
                    stack.callback(module.register_forward_pre_hook(self._called(name)).remove)
            stack.enter_context(python_random(0.0 if self.truth else 0.999))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Mode(self))
            self.found.output = self.model(first, **keywords)
        self.found.tail = self.ops
        self.found.python_random = random.getstate() != state
        random.setstate(state)
        for name, buffer in self.model.named_buffers():
            if before.get(name) != id(buffer):
                self.found.written.setdefault(name, self.labels_of(buffer))
        return self.found

    def _enters(self, block: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = Call(block, args, kwargs, self.ops, depth=len(self.stack))
            self.ops = []
            self.found.calls.append(call)
            self.stack.append(call)

        return hook

    def _leaves(self) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = self.stack.pop()
            call.output = output
            if not self.stack:
                for tensor in tensors_in(output):
                    self.label(tensor, frozenset({self.blocks[call.block]}))
                self.ops = []

        return hook

    def _called(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.found.modules.append(name)

        return hook

    # ------------------------------------------------------------------------------------------ operations

    def value(self, tensor: Tensor, real: Any) -> Any:
        """What Python is told that asks for a value."""
        self._note(self.found.branches, "a value", self.labels_of(tensor))
        if tensor.dtype == torch.bool:
            return self.truth
        return real if real is not None else torch.full((), 1 if self.truth else 0, dtype=tensor.dtype, device="cpu").item()

    def seen(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """One operation that was dispatched."""
        name = func.overloadpacket.__name__
        self.found.names.append(name)
        given = (*args, *(kwargs or {}).values())
        labels = self.labels_of(given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note(self.found.draws, name, labels)
        made = list(tensors_in(out))
        storages = {_storage(x) for x in tensors_in(given)}
        fresh = NONE if name in SHAPE_ONLY else labels
        for tensor in made:
            if _storage(tensor) not in storages:
                self.label(tensor, fresh)
            elif func._schema.is_mutable:
                self.labels[_storage(tensor)] = self.labels.get(_storage(tensor), NONE) | fresh
        if func._schema.is_mutable:
            for tensor in tensors_in(args[:1]):
                if (buffer := self.buffers.get(_storage(tensor))) is not None:
                    self.found.written[buffer] = self.found.written.get(buffer, NONE) | self.labels_of(args[1:])
        if not self.stack and not func.is_view:
            self.ops.append(Op(name, self._where()[0], labels, makes=frozenset(map(_storage, made))))

    def _note(self, notes: list[Op], name: str, labels: Labels) -> None:
        inside = self.blocks[self.stack[0].block] if self.stack else ""
        where, own = self._where()
        notes.append(Op(name, where, labels, inside, own=own))

    @staticmethod
    def _where() -> tuple[str, bool]:
        """File and line of the program's frame that is nearest, and whether that file is its own."""
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(INTERNAL) and not file.startswith("<"):
                return f"{Path(file).name}:{frame.f_lineno}", not file.startswith(INSTALLED)
            frame = frame.f_back  # type: ignore[assignment]
        return "", False


class _Mode(TorchDispatchMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            real = None if args[0].is_meta else func(*args, **(kwargs or {}))
            return self.tracer.value(args[0], real)
        out = func(*args, **(kwargs or {}))
        self.tracer.seen(func, args, kwargs, out)
        return out


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def python_random(value: float) -> Iterator[None]:
    """`random.random()` gives `value`, and counts as drawn."""
    own = random.random

    def drawn() -> float:
        own()
        return value

    random.random = drawn
    try:
        yield
    finally:
        random.random = own


def follow(program: Program, model: nn.Module, blocks: Iterable[str], batch: Batch, truth: bool = True) -> Followed:
    """A pass of the whole model over a batch on the model's device."""
    tracer = Tracer(program, model, blocks, truth)
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
    return value if isinstance(value, int | float | str | bool | type(None)) else type(value).__name__
