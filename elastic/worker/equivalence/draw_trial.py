"""What a program draws in its forward pass, and where: passes of two samples and of three, and of
shorter ones, without values where that goes. What grows with the samples tells which dimension they
are in, what shrinks with them where their positions are."""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode

from elastic.models.experts import expert_modules
from elastic.program import Program
from elastic.user_frames import outwards
from elastic.worker.equivalence.forward_trace import (
    Batch,
    Tracer,
    eager_flex_attention,
    python_random,
)
from elastic.worker.equivalence.no_randomness import DROPOUT_AT
from elastic.worker.equivalence.small_copy import whole_model
from elastic.worker.parallel.draw_requests import arguments_of, request_of
from elastic.worker.parallel.keyed_draws import (
    FUNCTIONS,
    TELLS,
    DrawOperations,
    DrawPlace,
    Draws,
    DrawTrial,
    other_rows,
)
from elastic.worker.parallel.part_of_draw import Draw, of_one
from elastic.worker.program.calls import (
    ModelCall,
    call_model,
    inputs_of,
    length_of,
    loss_of,
    mapped,
)
from elastic.worker.program.loop_program import LoopProgram

log = logging.getLogger(__name__)

ModelPass = Callable[[Program, nn.Module, Batch], Any]

# of a model that is tried with values where it cannot be without
REAL_MOST_PARAMETERS = 100_000_000
DRAWING = frozenset((
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "dropout_", "alpha_dropout_", "feature_dropout", "scaled_dot_product_attention",
    "multi_head_attention_forward", "bernoulli", "bernoulli_", "rand", "rand_like", "randn",
    "randn_like", "randint", "randint_like", "normal", "normal_", "uniform_", "exponential_",
    "random_", "gumbel_softmax", "lstm", "gru",
))  # fmt: skip


@dataclass(frozen=True)
class _Note:
    sizes: tuple[int, ...]
    operation: str
    at: str  # module, file and line
    unknown: str = ""  # why it cannot be keyed


class _Function(TorchFunctionMode):
    """Notes which torch function is under way."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.notes.function = self.notes.function, func
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.notes.function = before


class _Notes(Draws):
    """Of one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[DrawPlace, _Note] = {}
        self.calls: set[str] = set()
        self.attending: set[str] = set()
        self.left: set[str] = set()
        self.function: Any = None
        self._counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with DrawOperations(self._drawn), _Function(self):
            yield

    def begin(self) -> None:
        self.found, self._counts = {}, Counter()
        self.block, self.on = "", True

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = request_of(func, args, kwargs)
        unknown = "" if asked is not None else _unknown(func, args, kwargs)
        if asked is not None or unknown:
            name = getattr(self.function, "__name__", "")
            self.calls.add(name)
            if self.function in DROPOUT_AT:
                self.attending.add(self.module)
            if asked is not None and _checkpointed():
                self.left.add(self.module)
                unknown = CHECKPOINTED
            count = self._counts[self.block, self.module]
            self._counts[self.block, self.module] += 1
            sizes = tuple(asked.noise.shape) if asked is not None else ()
            at = f"{self.module or 'forward'} ({Tracer.where()[0]})"
            place = DrawPlace(self.block, self.module, count)
            self.found[place] = _Note(sizes, func.overloadpacket.__name__, at, unknown)
        return func(*args, **kwargs)


def _unknown(func: Any, args: Any, kwargs: Any) -> str:
    """Why what it draws cannot be keyed; '' = it draws nothing."""
    given = arguments_of(func, args, kwargs)
    if given.get("generator") is not None:
        return "from a generator of its own, which each rank has; leave the generator out"
    if not given.get("dropout_p", 1.0):
        return ""
    return "by an operation that is not known to draw sample by sample; take torch.rand or randn"


def _checkpointed() -> bool:
    """Is a part of a module's own forward pass under way that will be computed again without the
    rest of it, and so without what it is wrapped in?"""
    inside = itertools.takewhile(
        lambda frame: frame.f_code is not Draws.inside.__code__, outwards(sys._getframe(1))
    )
    return any(frame.f_code.co_filename == CHECKPOINT for frame in inside)


def try_draws(program: Program, batch: Batch, call: ModelPass = call_model) -> DrawTrial:
    """`batch`: of its samples the first is taken; `call` calls the model with one like it. Never
    raises for what the program does."""
    for device in ("meta", "cpu"):
        try:
            model = whole_model(program, device)
            n_parameters = sum(p.numel() for p in model.parameters())
            if device == "cpu" and n_parameters > REAL_MOST_PARAMETERS:
                break
            return _tried(program, model, batch, call=call, device=device)
        except Exception as error:  # noqa: BLE001 - the user's model
            log.info("what it draws was not seen: %s", " ".join(str(error).split())[:200])
    return _by_names(program)


def try_call(program: Program, call: ModelCall) -> DrawTrial:
    """The same of a script's program, by a call of its model."""
    batch = {key: x.detach()[:1] for key, x in call.given.items()}

    def again(_: Program, model: nn.Module, batch: Batch) -> Any:
        device, numbers = next(iter(batch.values())).device, itertools.count()
        args, kwargs = mapped(
            (call.args, dict(call.kwargs)),
            lambda x: batch.get(str(next(numbers)), x.detach().to(device)),
        )
        return model(*args, **kwargs)

    return try_draws(replace(program, inputs=lambda batch: list(batch.values())), batch, again)


def with_notes(program: LoopProgram) -> LoopProgram:
    """With what a person is to know of what a script draws, as far as the trial of its loop
    tells."""
    if program.called is None:
        return program
    trial = try_call(program, program.called)
    stray = trial.modules and program.called.rows is None
    name = trial.modules[0] or "forward" if stray else ""
    told = (f"{name} draws {other_rows(program.called)}: {TELLS}",) if stray else ()
    return replace(program, notes=(*program.notes, *(told or trial.problems)))


def _tried(
    program: Program, model: nn.Module, batch: Batch, *, call: ModelPass, device: str
) -> DrawTrial:
    notes = _Notes()
    notes.wrap(model, program, [name for name, _ in model.named_modules()])
    program = replace(program, **notes.wrapped(program, FUNCTIONS))
    one_pass = partial(_pass, program, notes, model, call=call, device=device)
    two, drawn = one_pass(batch=batch, rows=2)
    if not two:
        return DrawTrial(problems=_python(drawn))
    three, _ = one_pass(batch=batch, rows=3)
    length = length_of(inputs_of(program, batch))
    short: dict[DrawPlace, _Note] = {}
    try:
        long = {key for key, x in batch.items() if x.ndim > 1 and x.shape[1] == length}
        half = {key: x[:, : length // 2] if key in long else x for key, x in batch.items()}
        short, _ = one_pass(batch=half, rows=2)
    except Exception as error:  # noqa: BLE001 - the user's model, which may take one length only
        log.info("what shorter samples draw was not seen: %s", " ".join(str(error).split())[:200])
    draws, problems = {}, []
    experts, in_experts = tuple(expert_modules(model, program.experts)), ""
    for place, one in two.items():
        other = three.get(place)
        why = one.unknown or ("" if len(two) == len(three) else LOOP)
        if name := next((n for n in experts if f"{place.module}.".startswith(f"{n}.")), ""):
            why, in_experts = why or EXPERTS, in_experts or name
        rows_at = None if other is None else _rows_at(one.sizes, other.sizes)
        if not why and rows_at is not None:
            draws[place] = _draw(one, short.get(place), rows_at, length=length)
        else:
            problems.append(f"{one.at} draws ({one.operation}) {why or SHAPE}: {TELLS}")
    modules = tuple(dict.fromkeys(place.module for place in two))
    return DrawTrial(
        modules, tuple(notes.attending), tuple(notes.left), frozenset(notes.calls), draws, length,
        (*dict.fromkeys(problems), *_python(drawn)), in_experts,
    )  # fmt: skip


CHECKPOINT = str(torch.utils.checkpoint.__file__)
CHECKPOINTED = (
    "inside of a function that it checkpoints; checkpoint modules, or draw with one (nn.Dropout)"
)
SHAPE = "a shape that says nothing of the samples; take one with the samples in one dimension"
EXPERTS = "where tokens stand in the order of their experts; draw before or behind the experts"
LOOP = "as often as there are samples; draw for all samples at once"


def _python(drawn: str) -> tuple[str, ...]:
    return (f"forward draws from {drawn}: {TELLS}; draw with torch instead",) if drawn else ()


def _pass(
    program: Program,
    notes: _Notes,
    model: nn.Module,
    *,
    call: ModelPass,
    batch: Batch,
    rows: int,
    device: str,
) -> tuple[dict[DrawPlace, _Note], str]:
    """What is drawn, and from which random numbers that are not torch's."""
    given = {key: torch.cat([x[:1]] * rows).to(device) for key, x in batch.items()}
    model.train()
    notes.begin()
    quiet = warnings.catch_warnings(action="ignore")  # checkpointing misses gradients
    with quiet, torch.no_grad(), python_random(0.0) as drawn, eager_flex_attention():
        output = call(program, model, given)
        try:
            loss_of(program, output, given)
        except Exception as error:  # noqa: BLE001 - the user's loss, on a device without values
            log.info("what its loss draws was not seen: %s", " ".join(str(error).split())[:200])
    return notes.found, next(iter(drawn), "")


def _rows_at(two: tuple[int, ...], three: tuple[int, ...]) -> int | None:
    """The dimension of the samples, -1 = none; None = it cannot be told."""
    if len(two) != len(three):
        return None
    differ = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not differ:
        return -1
    (first, *more) = differ
    return first if not more and 3 * two[first] == 2 * three[first] else None


def _draw(one: _Note, short: _Note | None, rows_at: int, *, length: int) -> Draw:
    """`short`: the same of samples of half the length."""
    if short is None or len(short.sizes) != len(one.sizes) or length < 2:
        return Draw(one.sizes, rows_at)
    whole, half = (of_one(x.sizes, rows_at, 2) for x in (one, short))
    changed = {i: (a, b) for i, (a, b) in enumerate(zip(whole, half, strict=True)) if a != b}
    along = tuple(i for i, sizes in changed.items() if sizes == (length, length // 2))
    return Draw(one.sizes, rows_at, along, one_length=len(along) < len(changed))


def _by_names(program: Program) -> DrawTrial:
    """Of a model that cannot be followed: does it look as if it draws?"""
    model = whole_model(program, "meta")
    drops = any(
        isinstance(value, float) and value > 0 and ("drop" in name.lower() or name == "p")
        for module in model.modules()
        for name, value in vars(module).items()
        if "drop" in (type(module).__name__ + name).lower()
    )
    return DrawTrial(("",), calls=DRAWING) if drops else DrawTrial()
