"""What a script carries from step to step beside the model and its `extra_state`: a worker that
comes later, or a run that is resumed, begins with it anew. Read from the names that the script has
where it enters its loop, and from its text."""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

# methods of a module that give what it consists of
WEIGHTS = {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "modules",
    "named_modules", "children", "named_children", "get_parameter", "train", "apply"}  # fmt: skip
ANEW = "a worker that comes later, and a run that is resumed, begin with it anew"

ADVICE = {  # of classes whose objects extra_state cannot take along
    "AveragedModel": "it needs whole weights, of which a rank has parts: docs/loop.md, An average "
    "of the weights"
}


def forgotten(frame: FrameType | None, given: Mapping[int, Any]) -> tuple[str, ...]:
    """Lines that name it. `frame`: where the loop was entered; `given`: what it was given, by
    id."""
    if frame is None:
        return ()
    where = f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
    here = {**frame.f_globals, **frame.f_locals}
    tree = _tree_of(Path(frame.f_code.co_filename))
    objects = {
        name: type(x).__name__
        for name, x in here.items()
        if _keeps(x, given)
        and not (tree is not None and _is_frozen(x) and _is_only_called(tree, name, frame.f_lineno))
    }
    found = [
        f"{where}: {name} ({kind}) has a state_dict() and is not in extra_state: unless it "
        f"stays as it is, {ANEW}; " + ADVICE.get(kind, f"give extra_state={{'{name}': {name}}}")
        for name, kind in objects.items()
    ]
    for name, line in _carried(tree, frame.f_lineno) if tree is not None else ():
        found.append(
            f"{os.path.basename(frame.f_code.co_filename)}, line {line}: {name} is carried from "
            f"step to step: {ANEW}; what must not be lost belongs into an object of extra_state, "
            "or follows from run.step_index"
        )
    for name, line in _counted(tree, frame.f_lineno) if tree is not None else ():
        found.append(
            f"{os.path.basename(frame.f_code.co_filename)}, line {line}: {name} counts the batches "
            f"of one process: {ANEW}; where more than what is printed depends on it, use "
            "run.step_index"
        )
    return tuple(found)


def _tree_of(file: Path) -> ast.Module | None:
    """None: there is no file, as in a notebook."""
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _keeps(value: Any, given: Mapping[int, Any]) -> bool:
    """Has the object state that nobody else takes along? Nothing of it is called but
    `state_dict`."""
    if inspect.isclass(value) or inspect.ismodule(value) or id(value) in given:
        return False
    for method in ("state_dict", "load_state_dict"):
        if not callable(inspect.getattr_static(type(value), method, None)):
            return False
    try:
        return bool(value.state_dict())
    except Exception:  # noqa: BLE001 - the user's own code: then nothing is said of it
        return False


def _is_frozen(value: Any) -> bool:
    """A module, as a teacher, that calls of it do not change: nothing in it is trained, nor counted
    as by a BatchNorm in training mode."""
    if not isinstance(value, nn.Module) or any(p.requires_grad for p in value.parameters()):
        return False
    if not any(module.training for module in value.modules()):
        return True
    return {*value.state_dict()} <= {name for name, _ in value.named_parameters()}


def taken(model: nn.Module, others: Mapping[str, Any]) -> dict[int, Any]:
    """By id: the model's own modules, and the objects of `extra_state` and the optimizers."""
    return {id(one): one for one in (*model.modules(), *others.values())}


# ------------------------------------------------------------------------------------ from the text


def _loops(tree: ast.Module, line: int) -> tuple[ast.AST, list[ast.For]]:
    """Through what was entered in that line, with the function that they stand in."""
    scope: ast.AST = tree
    for node in ast.walk(tree):  # the innermost function is walked last
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            scope = node
    runs = _runs(scope, line)
    return scope, [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.For) and node.lineno >= line and _goes_through(node.iter, runs)
    ]


def _goes_through(what: ast.AST, runs: set[str]) -> bool:
    """The run itself, or a call that is given it, as enumerate(run)."""
    if isinstance(what, ast.Call):
        given = (*what.args, *(keyword.value for keyword in what.keywords))
        return any(_goes_through(one, runs) for one in given)
    return _name(what) in runs


def _name(node: ast.AST | None) -> str:
    """`run` or `self.run`; '' = neither."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _is_read(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _carried(tree: ast.Module, line: int) -> Iterator[tuple[str, int]]:
    """Names that the loop's body makes of what they were (n += 1), and that are first set before
    the loop that was entered in that line."""
    scope, loops = _loops(tree, line)
    for loop in loops:
        before = {name for name, at, _ in _set(scope) if at < line}
        fresh = set[str]()  # what a step sets anew
        for name, at, itself in _set(loop):
            if itself and name in before and name not in fresh:
                yield name, at
            fresh.add(name)


def _counted(tree: ast.Module, line: int) -> Iterator[tuple[str, int]]:
    """What enumerate() gives beside the batches of that loop, where the body reads it."""
    for loop in _loops(tree, line)[1]:
        calls = (_name(node.func) for node in ast.walk(loop.iter) if isinstance(node, ast.Call))
        if "enumerate" not in calls or not isinstance(loop.target, ast.Tuple):
            continue
        counter = _name(loop.target.elts[0])
        read = (node for one in loop.body for node in ast.walk(one) if _is_read(node))
        if counter in map(_name, read):
            yield counter, loop.lineno


def _is_only_called(tree: ast.Module, name: str, line: int) -> bool:
    """Is an object of the script only read where steps are made, behind `line` and in functions:
    called, or given to a call whose result is taken? An average of the weights is not."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.Lambda)
        for node in ast.walk(scope)
    }
    return all(
        _reads(node, parents)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name)
        and node.id == name
        and (node.lineno > line or id(node) in inside)
    )


def _reads(node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    call = parents.get(node)
    if isinstance(call, ast.keyword):
        call = parents.get(call)
    if isinstance(call, ast.Attribute) and call.attr not in WEIGHTS:  # teacher.encode(x)
        call = parents.get(call)
    if not isinstance(call, ast.Call):
        return False
    return call.func is node or not isinstance(parents.get(call), ast.Expr)


def _runs(scope: ast.AST, line: int) -> set[str]:
    """What the loop that is entered in `line` is called."""
    found = set[str]()
    for node in ast.walk(scope):
        last = getattr(node, "end_lineno", 0) or 0
        if isinstance(node, ast.With) and node.lineno <= line <= node.body[0].lineno:
            found |= {_name(item.optional_vars) for item in node.items}
        elif isinstance(node, ast.Assign) and node.lineno <= line <= last:
            found |= {_name(target) for target in node.targets}
    return found - {""}


def _set(scope: ast.AST) -> list[tuple[str, int, bool]]:
    """Names that are set, in the order of the text, with their lines: is it made of what it
    was?"""
    found = []
    for node in ast.walk(scope):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.append((node.target.id, node.lineno, True))
        elif isinstance(node, ast.Assign):
            read = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
            found += [
                (target.id, node.lineno, target.id in read)
                for target in node.targets
                if isinstance(target, ast.Name)
            ]
    return sorted(found, key=lambda one: one[1])
