"""The state of one parameter, as an optimizer keeps it, as a form and its leaves.

Leaves are tensors of any shape and plain numbers: these are boxes of the training state. The form
is JSON: dicts, lists and tuples around them, and what never changes (None, texts). Nothing in it is
ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import ProgramError
from elastic.types import DTYPE_BYTES, OwnedEntry
from elastic.worker.program.owned.low_bit_state import (
    CLASSES,
    is_low_bit,
    low_bit_of,
    parts_of,
    said_of,
)

BEGUN = "begun"  # the entry that says which leaves are there: of the whole state, then of each
NUMBERS = {"bool": "bool", "int": "int64", "float": "float64"}
Tree = dict[str, Any]
NONE: Tree = {"is": None}
Get = Callable[[str], torch.Tensor | None]


@dataclass(frozen=True)
class StateForm:
    """`tree`: {"dict": [[key, tree], ...]}, {"list": [...]}, {"tuple": [...]}, {"leaf": [name,
    kind]}, {"low_bit": [what it says of itself, [[part, tree], ...]]} or {"is": value}. What is not
    there after each step is a {"maybe": tree}, None while its leaves are missing, or in a dict an
    {"absent": tree}, which then has no key."""

    tree: Tree

    @classmethod
    def parse(cls, text: str) -> StateForm:
        return cls(json.loads(text))

    def text(self) -> str:
        return json.dumps(self.tree, separators=(",", ":"))

    def build(self, get: Get) -> dict[Any, Any]:
        """The state with these leaves; those that `get` has not are left out."""
        made: dict[Any, Any] = _built(self.tree, get)
        return made

    def leaves(self, state: Mapping[Any, Any]) -> dict[str, Any]:
        """Name -> tensor or number, of those that are there. Raises ProgramError where the state
        has another form."""
        found: dict[str, Any] = {}
        _read(self.tree, state, "", found=found)
        return found


def form_of(states: Iterable[Mapping[Any, Any]]) -> tuple[StateForm, tuple[OwnedEntry, ...]]:
    """Of a parameter's state after each step of a trial, and its entries, BEGUN first. Raises
    ProgramError that names what cannot be kept."""
    found: dict[str, OwnedEntry] = {}
    tree: Tree | None = None
    for state in states:
        tree = _merged(tree, _tree(state, "", found), "")
    assert tree is not None
    begun = OwnedEntry(BEGUN, (1 + len(found),), "uint8", on_host=True)
    return StateForm(tree), (begun, *found.values())


def _tree(value: Any, name: str, found: dict[str, OwnedEntry]) -> Tree:
    if is_low_bit(value):
        parts = [[k, _tree(v, _under(name, k), found)] for k, v in parts_of(value).items()]
        return {"low_bit": [said_of(value), parts]}
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES or value.layout != torch.strided:
            raise ProgramError(f"its state '{name}' is a tensor of {dtype}, {value.layout}")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise ProgramError(
                f"its state '{name}' is a {type(value).__name__}; of tensors of few bits "
                f"{' and '.join(CLASSES)} can be kept"
            )
        on_host = value.device.type == "cpu" and not value.ndim
        entry = OwnedEntry(name, tuple(value.shape), dtype, on_host)
        before = found.setdefault(name, entry)
        if (before.shape, before.dtype) != (entry.shape, entry.dtype):
            raise ProgramError(
                f"its state '{name}' is {before.dtype} {list(before.shape)} after one step and "
                f"{dtype} {list(entry.shape)} after another"
            )
        return {"leaf": [name, "tensor"]}
    kind = type(value).__name__
    if kind in NUMBERS:
        number = found.get(name)
        if number is None or number.dtype != NUMBERS["float"]:
            found[name] = OwnedEntry(name, (), NUMBERS[kind], on_host=True)
        return {"leaf": [name, kind]}
    if isinstance(value, Mapping):
        pairs = [[key, _tree(one, _under(name, key), found)] for key, one in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_tree(one, _under(name, i), found) for i, one in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, str):
        return {"is": value}
    raise ProgramError(
        f"its state '{name}' is a {kind}; it may hold tensors, numbers, texts, None, lists, tuples "
        "and dicts"
    )


def _under(name: str, key: Any) -> str:
    if not isinstance(key, str | int) or {".", "/"} & set(str(key)):
        raise ProgramError(
            f"its state '{name}' has the key {key!r}; keys may be numbers and texts without . and /"
        )
    return f"{name}/{key}" if name else str(key)


def _merged(one: Tree | None, other: Tree, name: str) -> Tree:
    """Of two steps."""
    if one is None or one == other:
        return other
    (kind, was), (now, has) = next(iter(one.items())), next(iter(other.items()))
    if kind == "maybe":
        return one if other == NONE else {"maybe": _merged(was, other, name)}
    if NONE in (one, other):
        return {"maybe": _with_leaves(other if one == NONE else one, name)}
    if kind == now == "dict":
        old, new = dict(map(tuple, was)), dict(map(tuple, has))
        keys = dict.fromkeys([*old, *new])
        return {"dict": [[k, _of_key(old.get(k), new.get(k), _under(name, k))] for k in keys]}
    if kind == now and kind in ("list", "tuple") and len(was) == len(has):
        return {kind: [_merged(a, b, name) for a, b in zip(was, has, strict=True)]}
    if kind == now == "leaf" and {was[1], has[1]} == {"int", "float"}:
        return {"leaf": [was[0], "float"]}
    raise ProgramError(
        f"its state '{name}' is of one kind after one step, of another after another"
    )


def _of_key(one: Tree | None, other: Tree | None, name: str) -> Tree:
    if one is not None and "absent" in one:
        return one if other is None else {"absent": _merged(one["absent"], other, name)}
    if one is None or other is None:
        there = one if other is None else other
        assert there is not None
        return {"absent": _with_leaves(there, name)}
    return _merged(one, other, name)


def _with_leaves(tree: Tree, name: str) -> Tree:
    if not _leaves(tree):
        raise ProgramError(
            f"its state '{name}' comes and goes, and holds neither tensor nor number"
        )
    return tree


def _leaves(tree: Tree) -> list[str]:
    ((kind, content),) = tree.items()
    if kind in ("maybe", "absent"):
        return _leaves(content)
    if kind == "leaf":
        return [content[0]]
    if kind == "is":
        return []
    pairs = content[1] if kind == "low_bit" else content
    parts = [part for _, part in pairs] if kind in ("dict", "low_bit") else content
    return [name for part in parts for name in _leaves(part)]


def _built(tree: Tree, get: Get) -> Any:
    ((kind, content),) = tree.items()
    if kind == "is":
        return content
    if kind == "leaf":
        value = get(content[0])
        return value if value is None or content[1] == "tensor" else value.item()
    if kind in ("maybe", "absent"):
        there = any(get(name) is not None for name in _leaves(content))
        return _built(content, get) if there else None
    if kind == "low_bit":
        said, parts = content
        return low_bit_of(said, {key: _built(part, get) for key, part in parts})
    if kind == "dict":
        pairs = ((key, part, _built(part, get)) for key, part in content)
        return {
            key: value for key, part, value in pairs if value is not None or "absent" not in part
        }
    items = [_built(part, get) for part in content]
    return items if kind == "list" else tuple(items)


def _read(tree: Tree, value: Any, name: str, *, found: dict[str, Any]) -> None:
    ((kind, content),) = tree.items()
    if kind in ("maybe", "absent"):
        if value is not None:
            _read(content, value, name, found=found)
        return
    if kind == "low_bit":
        if is_low_bit(value) and said_of(value) == content[0]:
            for (key, part), one in zip(content[1], parts_of(value).values(), strict=True):
                _read(part, one, _under(name, key), found=found)
            return
    elif kind == "leaf":
        tensor = isinstance(value, torch.Tensor) and not is_low_bit(value)
        if tensor == (content[1] == "tensor") and (tensor or type(value).__name__ in NUMBERS):
            found[content[0]] = value
            return
    elif kind == "is":
        if value == content:
            return
    elif kind == "dict" and isinstance(value, Mapping):
        known = dict(map(tuple, content))
        strange = [key for key in value if key not in known]
        missing = [key for key, part in content if key not in value and "absent" not in part]
        if strange or missing:
            raise _changed(_under(name, (strange or missing)[0]))
        for key, one in value.items():
            _read(known[key], one, _under(name, key), found=found)
        return
    elif kind != "dict" and isinstance(value, list | tuple) and len(value) == len(content):
        for part, one in zip(content, value, strict=True):
            _read(part, one, name, found=found)
        return
    raise _changed(name)


def _changed(name: str) -> ProgramError:
    return ProgramError(
        f"its state '{name}' is not what the steps of the trial had; what an optimizer keeps must "
        "have its kind and shape from its first steps on"
    )
