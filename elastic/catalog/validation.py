"""What pydantic finds wrong with what a person wrote, in one line: the key, what is wrong, what
would be right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from elastic.catalog.bounded_yaml import SHOWN_MOST

TYPE_NAMES = ("int", "str", "float")  # that pydantic puts into the place of an error
KeyPath = Sequence[str | int]


def first_problem(error: ValidationError) -> Any:
    """An unknown key before others, since a misspelled key also shows as a missing one; where a
    word or a number may stand, what is wrong with a number says more."""

    def late(problem: Any) -> tuple[bool, bool]:
        word = problem["type"] == "literal_error" and not isinstance(problem.get("input"), str)
        return problem["type"] != "extra_forbidden", word

    return min(error.errors(), key=late)


def in_words(
    problem: Any,
    near: Callable[[KeyPath], str],
    shown_key: Callable[[str], str] = lambda key: f"'{key}'",
) -> str:
    """`near`: how the message about an unknown key ends."""
    path, kind = problem["loc"], problem["type"]
    if kind == "extra_forbidden":
        return f"unknown key '{_dotted(path)}'{near(path)}"
    key = _dotted(
        part
        for part in path
        if isinstance(part, int) or (part.isidentifier() and part not in TYPE_NAMES)
    )
    if kind == "missing":
        return f"key '{key}' is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if kind == "none_required":
        message = "not in this version; leave it out"
    given = problem.get("input")
    said = isinstance(given, str | int | float) and kind != "value_error"
    shown = f" (it is {shown_of(given)})" if said else ""
    return f"key {shown_key(key)}: {message[:1].lower()}{message[1:]}{shown}" if key else message


def shown_of(value: str | float) -> str:
    """As an error shows it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "an integer of thousands of digits"
    return text if len(text) <= SHOWN_MOST else f"{text[:SHOWN_MOST]}... of {len(text)} characters"


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(str(part) for part in path if part != "")
