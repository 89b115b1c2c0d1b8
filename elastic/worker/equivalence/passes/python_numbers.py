"""Numbers of Python that a program keeps: on its modules, and beside the model, where its functions
find them again."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from elastic.program import Program
from elastic.user_frames import LIBRARIES

MOST_NUMBERS = 1000  # of a list that is looked into


def numbers_of(model: nn.Module) -> dict[str, int | float]:
    """What modules keep as numbers of Python: as attributes, in lists and dicts there, and in plain
    objects of the program's own."""
    found: dict[str, int | float] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found.update(_numbers_in(own, name, 3))
    return found


def _numbers_in(value: Any, name: str, depth: int) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float):
        yield name, value
        return
    if isinstance(value, list | dict | set | deque):
        yield f"len({name})", len(value)
    if isinstance(value, list | tuple | deque):
        value = dict(enumerate(value))
    elif not isinstance(value, dict):
        plain = not isinstance(value, nn.Module | Tensor | type) and hasattr(value, "__dict__")
        value = vars(value) if plain and not type(value).__module__.startswith("torch") else {}
    if depth and len(value) < MOST_NUMBERS:
        for key, item in list(value.items()):
            yield from _numbers_in(item, f"{name}.{key}".removeprefix("."), depth - 1)


def numbers_beside(program: Program, model: nn.Module) -> dict[str, int | float]:
    """What the program's own files keep as numbers beside the modules: as globals, on classes and
    functions, and in what its functions close over."""
    own = (program.loss, program.inputs, program.keywords, program.count)
    calls: list[Any] = [call for call in own if call is not None]
    calls += [kind.forward for kind in {type(module) for module in model.modules()}]
    found: dict[str, int | float] = {}
    for module in {id(m): m for call in calls for m in _modules(call)}.values():
        for key, value in list(vars(module).items()):
            if not key.startswith("__") and not isinstance(value, nn.Module | ModuleType):
                found.update(_numbers_in(value, key, 2))
                found.update(_numbers_on(value, key, module))
    for call in calls:
        found.update(_closed_over(call))
    return found


def _function(call: Any) -> tuple[FunctionType | None, list[Any]]:
    """The function that is called, and what is held for it."""
    held: list[Any] = []
    while not isinstance(call, FunctionType):
        if isinstance(call, functools.partial):
            held += [*call.args, *call.keywords.values()]
            call = call.func
        elif isinstance(call, MethodType):
            held.append(call.__self__)
            call = call.__func__
        elif isinstance(inner := vars(type(call)).get("__call__"), FunctionType):
            held.append(call)
            call = inner
        else:
            return None, held
    return call, held


def _modules(call: Callable[..., Any]) -> Iterator[ModuleType]:
    """The file of the program's own in which it is written."""
    function, _ = _function(call)
    module = sys.modules.get(function.__module__) if function is not None else None
    file = getattr(module, "__file__", None)
    if module is not None and file and not file.startswith(LIBRARIES):
        yield module


def _numbers_on(value: Any, name: str, module: ModuleType) -> Iterator[tuple[str, int | float]]:
    """Of a class or a function that is written there."""
    if isinstance(value, type | FunctionType) and value.__module__ == module.__name__:
        for key, item in list(vars(value).items()):
            if isinstance(item, int | float):
                yield f"{name}.{key}", item
        if isinstance(value, FunctionType):
            yield from _closed_over(value)


def _closed_over(call: Any) -> Iterator[tuple[str, int | float]]:
    function, held = _function(call)
    for item in held:
        if not isinstance(item, nn.Module):
            yield from _numbers_in(item, type(item).__name__, 2)
        else:
            yield from numbers_of(item).items()
    if function is not None and function.__closure__:
        for key, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if not isinstance(value, nn.Module):
                yield from _numbers_in(value, key, 2)
