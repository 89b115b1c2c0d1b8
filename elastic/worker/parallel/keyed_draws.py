"""What a model draws in its forward pass, keyed: the same numbers in every layout.

A draw is known by the run's seed, the step, the sample, its place (block, module, which of its
draws) and the position inside of the sample. Modules that draw, which a trial has found
(equivalence.draw_trial), are wrapped where the program's model is built; all others run untouched.
Inside of such a module those torch functions that were seen to draw are met below autograd, where
all of them are a few operations, and what these ask for is filled row by row.

Where a forward pass is computed again (activation checkpointing, whoever does it), it draws the
same: between draws torch's own generator has a seed that is known here, and that generator is what
checkpointing puts back.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.program import Program
from elastic.types import Layout
from elastic.types.grid import Coordinates
from elastic.worker.parallel.draw_requests import DrawRequest, by_generator, request_of, same
from elastic.worker.parallel.keyed_numbers import Distribution, mixed, of_text
from elastic.worker.parallel.part_of_draw import Draw, part_of
from elastic.worker.program.calls import ModelCall, ModelCalls, length_of
from elastic.worker.program.model_profile import block_names, unit_names

log = logging.getLogger(__name__)

# of a program, that may draw too
FUNCTIONS = {"Program.inputs": "inputs", "Program.keywords": "keywords", "Program.loss": "loss"}
BEHIND = ">"  # stands for the block where all blocks are past
INNER = "_elastic_inner"  # of a block: its InnerForward
SHAPE = "a shape that says nothing of its samples"
OUTSIDE = "where nobody knows whose samples these are"
TELLS = "each layout draws others, so losses differ a little between layouts"


@dataclass(frozen=True)
class DrawPlace:
    """Where in a model something is drawn: in which block (of several groups: or module beside
    them) and module, and which of its draws."""

    block: str
    module: str
    number: int

    @cached_property
    def key(self) -> int:
        return mixed(of_text(self.block), of_text(self.module), self.number)


@dataclass(frozen=True)
class DrawTrial:
    """What a trial has found. `modules`: those that draw themselves, and names of FUNCTIONS;
    `attending`: those of them that do so inside of torch's attention; `left`: those that draw as
    they would without all this; `calls`: names of the torch functions that draw; `length`:
    positions of its samples, 0 = they have none; `problems`: a line for each draw that cannot be
    keyed; `in_experts`: a module of stacked experts that draws, '' = none does."""

    modules: tuple[str, ...] = ()
    attending: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    calls: frozenset[str] = frozenset()
    draws: Mapping[DrawPlace, Draw] = field(default_factory=dict)
    length: int = 0
    problems: tuple[str, ...] = ()
    in_experts: str = ""


@dataclass
class DrawPass:
    """A forward pass of one micro-batch (through one stage). `keys`: of its samples; `shared`: of
    what is drawn for all samples of a step; `length`: positions of its whole samples."""

    keys: Sequence[int]
    shared: int
    length: int
    name: int
    drawn: list[DrawPlace] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


class DrawOperations(TorchDispatchMode):
    """Has `drawn` make what operations that draw give."""

    supports_higher_order_operators = True

    def __init__(self, drawn: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **(kwargs or {}))
        return self.drawn(func, args, kwargs or {})


@contextmanager
def from_another(key: int, names: list[str]) -> Iterator[None]:
    """What this thread draws inside comes from a generator of its own, which begins with `key`, or
    with what it seeds torch with; operations that draw are added to `names`."""
    generator, thread, own = (
        torch.Generator().manual_seed(key),
        threading.get_ident(),
        torch.manual_seed,
    )

    def drawn(func: Any, args: Any, kwargs: Any) -> Any:
        names.append(func.overloadpacket.__name__)
        return by_generator(func, args, kwargs, generator=generator)

    def seeded(seed: int) -> torch.Generator:
        return generator.manual_seed(int(seed)) if threading.get_ident() == thread else own(seed)

    torch.manual_seed = torch.random.manual_seed = seeded
    try:
        with DrawOperations(drawn):
            yield
    finally:
        torch.manual_seed = torch.random.manual_seed = own


class _Calls(TorchFunctionMode):
    """The same only for the functions that draw: a mode below autograd costs more at each
    operation. Plain dropout on a CPU is done here, which costs least."""

    def __init__(self, draws: KeyedDraws) -> None:
        super().__init__()
        self.draws, self.names, self.left = draws, draws.trial.calls, draws.trial.left
        self.operations = DrawOperations(draws.drawn)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = self.draws
        mine = draws.on and draws.module not in self.left
        if getattr(func, "__name__", "") not in self.names or not mine:
            return func(*args, **(kwargs or {}))
        plain = func is F.dropout and len(args) < 4 and "input" not in (kwargs or {})
        if plain and (found := self._dropped(*args, **(kwargs or {}))) is not None:
            return found
        with self.operations:
            return func(*args, **(kwargs or {}))

    def _dropped(
        self, x: Any, p: float = 0.5, training: bool = True, **others: Any
    ) -> Tensor | None:
        """None = it is done by torch's own operations."""
        if type(x) is not Tensor or not x.is_cpu or any(others.values()):
            return None
        if not (training and 0 < p < 1):
            return None
        noise = torch.empty_like(x, requires_grad=False)
        asked = DrawRequest(noise, Distribution("bernoulli_", (1.0 - p,)), same)
        return x * noise.div_(1.0 - p) if self.draws.filled(asked) is not None else None


class Draws(ABC):
    """Follows in which block and module a forward pass is."""

    def __init__(self) -> None:
        self.block = self.module = self._around = ""
        self.on = False
        self._depth = threading.local()  # autograd has threads of its own

    def __deepcopy__(self, _: Any) -> Draws:
        return self  # of a copied model's modules

    @abstractmethod
    def watching(self) -> AbstractContextManager[object]:
        """DrawOperations that draw are met inside."""

    def wrap(
        self, model: nn.Module, program: Program, modules: Iterable[str], *, compiled: bool = False
    ) -> nn.Module:
        """Names of modules and parameters stay. What is wrapped is not compiled."""
        blocks = block_names(model, program.blocks)
        for name in blocks:
            self.follow(name, model.get_submodule(name))
        # of several groups, a stage has some of these: what they draw is counted in each by itself
        beside = unit_names(model, blocks) if not isinstance(program.blocks, str) else []
        for name in beside[len(blocks) :]:
            unit = model.get_submodule(name)
            unit.register_forward_pre_hook(partial(self._enters_unit, name))
            unit.register_forward_hook(self._leaves_unit, always_call=True)
        self.put(model, modules, compiled=compiled)
        return model

    def put(self, model: nn.Module, modules: Iterable[str], *, compiled: bool) -> None:
        """In the place of the forward passes of these modules."""
        for name in modules:
            if name not in FUNCTIONS:
                module = model.get_submodule(name)
                inner = vars(module).get(INNER, module)
                call = partial(self.inside, name, inner.forward)
                inner.forward = torch.compiler.disable(call) if compiled else call

    def follow(self, name: str, block: nn.Module) -> None:
        """Notes when a forward pass is in this block."""
        block.register_forward_pre_hook(partial(self._enters, name))
        block.register_forward_hook(self._leaves, always_call=True)

    def wrapped(self, program: Program, names: Iterable[str]) -> dict[str, Any]:
        """Those of the program's functions that draw."""
        found = {FUNCTIONS[name]: name for name in names if name in FUNCTIONS}
        return {
            key: partial(self.inside, name, getattr(program, key))
            for key, name in found.items()
            if getattr(program, key) is not None
        }

    def _enters(self, name: str, *_: Any) -> None:
        self.block = name

    def _leaves(self, *_: Any) -> None:
        self.block = BEHIND

    def _enters_unit(self, name: str, *_: Any) -> None:
        self._around, self.block = self.block, name

    def _leaves_unit(self, *_: Any) -> None:
        self.block = self._around

    def inside(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the forward pass of a module that draws."""
        if not self.on:
            return call(*args, **kwargs)
        before, depth = self.module, getattr(self._depth, "n", 0)
        self.module, self._depth.n = name, depth + 1
        try:
            with nullcontext() if depth else self.watching():
                return call(*args, **kwargs)
        finally:
            self.module, self._depth.n = before, depth


class InnerForward:
    """A block's own forward pass, which can be wrapped when others have wrapped the block
    already."""

    def __init__(self, block: nn.Module) -> None:
        self.forward = block.forward
        vars(block)[INNER] = block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class KeyedDraws(Draws):
    """Of one process, for all of its generations."""

    def __init__(
        self,
        trial: DrawTrial | None = None,
        compiled: bool = False,
        *,
        find: Callable[[Program, ModelCall], DrawTrial] | None = None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """Without a trial `find` makes it, of the first call of a script's model: what that is
        called with nobody knows before. `say`: what a person is to know."""
        super().__init__()
        self.compiled, self.find, self.say = compiled, find, say
        self._take(trial or DrawTrial())
        self.stray = OUTSIDE  # why what is drawn outside of all passes is not keyed
        self.layout, self.at = Layout(), Coordinates(0, 0, 0, 0, 0)
        self._pass: DrawPass | None = None
        # of torch's generator -> which draw is next
        self._seeds: dict[int, tuple[DrawPass, int]] = {}
        self._told: set[str] = set()

    def _take(self, trial: DrawTrial) -> None:
        self.trial = trial
        self._calls = _Calls(self)
        # of attention, torch's other kernels on a GPU draw by themselves
        self._plain = frozenset(trial.attending if torch.cuda.is_available() else ())

    def learn(self, program: Program, model: nn.Module, call: ModelCall) -> None:
        """The first call of a script's model, which is built already, is about to come."""
        if self.find is None or not isinstance(program.model, KeyedModel):
            return
        find, self.find = self.find, None
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            self._take(find(program.model.program, call))
        self.put(model, self.trial.modules, compiled=self.compiled)
        for problem in self.trial.problems:
            self.say(problem)

    @property
    def idle(self) -> bool:
        """Is nothing drawn?"""
        return self.find is None and not self.trial.modules

    def of(self, program: Program) -> Program:
        """The program whose models draw by this."""
        own = self.wrapped(program, self.trial.modules)
        return replace(program, model=KeyedModel(self, program), **own)

    def watching(self) -> AbstractContextManager[object]:
        return self._calls

    def inside(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.on and name in self._plain:
            with sdpa_kernel(SDPBackend.MATH):
                return super().inside(name, call, *args, **kwargs)
        return super().inside(name, call, *args, **kwargs)

    @contextmanager
    def step(self, layout: Layout, at: Coordinates, *, told: bool = False) -> Iterator[None]:
        """Forward and backward passes of a step run inside. `told`: what is drawn between them is
        a script's, and told."""
        self.layout, self.at, self.on = layout, at, told
        self._seeds.clear()
        try:
            yield
        finally:
            self.pause()

    def begin(
        self, keys: Sequence[int], shared: int, *, length: int = 0, behind: bool = False
    ) -> None:
        """A forward pass of samples with these keys comes next; `behind`: through a stage that has
        nothing of what stands before the blocks. The rest: see DrawPass."""
        name = mixed(shared, len(self._seeds), *keys[:1])
        self._pass = DrawPass(keys, shared, length, name)
        self.block, self.on = BEHIND if behind else "", True
        self._next(self._pass, 0)

    def pause(self) -> None:
        """What is drawn next belongs to no sample."""
        self.on, self._pass = False, None

    def _next(self, one: DrawPass, number: int) -> None:
        seed = mixed(one.name, number)
        self._seeds[seed] = one, number
        torch.default_generator.manual_seed(seed)

    def _place(self) -> tuple[DrawPass, DrawPlace] | None:
        """Of the draw that comes now, or of the one that is made again."""
        found = self._seeds.get(torch.default_generator.initial_seed())
        if found is None:
            return None  # the program has seeded torch by itself
        one, number = found
        if number == len(one.drawn):
            count = one.counts[self.block, self.module]
            one.counts[self.block, self.module] += 1
            one.drawn.append(DrawPlace(self.block, self.module, count))
        self._next(one, number + 1)
        return one, one.drawn[number]

    def drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives that draws."""
        asked = request_of(func, args, kwargs)
        if asked is None:
            return func(*args, **kwargs)
        noise = self.filled(asked)
        if noise is None:
            known = torch.default_generator.initial_seed() in self._seeds
            self._tell(func.overloadpacket.__name__, SHAPE if known else self.stray)
            return func(*args, **kwargs)
        return asked.finish(noise)

    def filled(self, asked: DrawRequest) -> Tensor | None:
        """The noise that is asked for, keyed; None = it cannot be told which part of what it
        is."""
        found = self._place()
        if found is None:
            return None
        one, place = found
        part = part_of(
            asked.noise,
            len(one.keys),
            self.trial.draws.get(place),
            lengths=(self.trial.length, one.length),
            layout=self.layout,
            at=self.at,
        )
        if part is None:
            return None
        rows = one.keys if part.rows_at >= 0 else (one.shared,)
        here = place.key
        part.fill(asked.distribution, [mixed(key ^ here) for key in rows], asked.noise)
        return asked.noise

    def _tell(self, operation: str, why: str) -> None:
        """Once of each module, or of all that is drawn outside of all passes."""
        what = self.module if why is SHAPE else why
        self.tell(what, f"{self.module or 'forward'} draws ({operation}) {why}")

    def tell(self, about: str, text: str) -> None:
        """Once, of what is not keyed."""
        if about not in self._told:
            self._told.add(about)
            self.say(f"{text}: {TELLS}")


class KeyedModel:
    """Makes a program's model with its draws keyed."""

    def __init__(self, draws: KeyedDraws, program: Program) -> None:
        self.draws, self.program = draws, program

    def __call__(self) -> nn.Module:
        draws, model = self.draws, self.program.model()
        if draws.find is not None:
            for name in block_names(model, self.program.blocks):
                InnerForward(model.get_submodule(name))
        return draws.wrap(model, self.program, draws.trial.modules, compiled=draws.compiled)


def draws_of(program: Program) -> KeyedDraws | None:
    """None: the program draws nothing."""
    return program.model.draws if isinstance(program.model, KeyedModel) else None


def other_rows(call: ModelCall) -> str:
    """Why what is drawn in a script's call of its model is not keyed."""
    behind = f" behind {call.first}" if call.first else ""
    return (
        f"for the {call.n} rows{behind} that run.model is called with, where the batch has "
        f"{call.n_rows}: nobody knows whose they are; call it with the batch, or with parts of it "
        "in their order, samples in dimension 0"
    )


def row_keys(seed: int, step: int, ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Keys of samples, given as parts of a step in the order of all ranks: a sample that comes up
    twice in a step has two."""
    seen: Counter[int] = Counter()
    base, found = mixed(seed, step), []
    for part in ids:
        keys = []
        for sample in part:
            keys.append(mixed(base, sample, seen[sample]))
            seen[sample] += 1
        found.append(keys)
    return found


@dataclass(frozen=True)
class StepDraws:
    """Whose samples draw in a step. `keys`: of those in each of this rank's batches; `lengths`:
    positions of their whole samples; `shared`: see DrawPass."""

    draws: KeyedDraws
    keys: Sequence[Sequence[int]]
    lengths: Sequence[int]
    shared: int

    def begin(self, batch: int, rows: range, stage: int = 0) -> None:
        """A forward pass of these rows of a batch, through a stage."""
        keys = self.keys[batch][rows.start : rows.stop]
        self.draws.begin(keys, self.shared, length=self.lengths[batch], behind=stage > 0)

    @contextmanager
    def of_call(self, call: ModelCall, program: Program, model: nn.Module) -> Iterator[None]:
        """A script's call of its model. The script's own random numbers stay what they are."""
        draws = self.draws
        if call.graph or not call.evaluates:
            draws.learn(program, model, call)
        if call.rows is None or draws.idle:
            draws.stray = other_rows(call)
            yield
            return
        keys, shared = self.keys[0][call.rows.start : call.rows.stop], self.shared
        if call.again:  # a second pass draws others
            keys, shared = [mixed(key, call.again) for key in keys], mixed(shared, call.again)
        draws.stray = OUTSIDE
        own = torch.get_rng_state()
        draws.begin(keys, shared, length=length_of(call.given))
        try:
            yield
        finally:
            torch.set_rng_state(own)

    def check_all(self, calls: ModelCalls) -> None:
        """Of a script's step: tells where samples are missing."""
        if calls.first and not self.draws.idle:
            self.draws.tell(
                "parts",
                f"run.model was called with {calls.first} of the {calls.n_rows} samples of a "
                "batch, nobody knows which",
            )
