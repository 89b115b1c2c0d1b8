"""`replace` for nouns that are replaced at each event, and what follows from some of their fields.

That of the standard library reads every field and sets every field again. A State has more than a
hundred fields and is replaced four times for each step of a run: more than half of the driver's
time, and of the simulator's. Here the fields are copied at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, cached_property, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

KEPT_ANSWERS = 4  # of a function of a noun


class Derived(cached_property[T], Generic[T]):
    """What is found out once from the fields `of`, and known until one of these is replaced."""

    def __init__(self, func: Callable[[Any], T], of: tuple[str, ...]) -> None:
        super().__init__(func)
        self.of = frozenset(of)


def derived(*of: str) -> Callable[[Callable[[Any], T]], Derived[T]]:
    """Decorates a method that reads these fields alone."""
    return lambda func: Derived(func, of)


def follows_from(*fields: str, kept: int = KEPT_ANSWERS) -> Callable[[F], F]:
    """Decorates a function that reads of its first argument, a noun, these fields alone: while they
    and the other arguments are equal, so is what it has found, which nobody changes in place.
    Without fields it is known for the same noun only. `kept`: so many answers are, the newest."""
    one, read = len(fields) == 1, attrgetter(*fields) if fields else None

    def decorate(func: Any) -> Any:
        known: list[tuple[Any, Any, Any]] = []  # what was read, other arguments, what was found

        @wraps(func)
        def found(noun: Any, *others: Any, **named: Any) -> Any:
            given = (others, named) if named else others
            values = noun if read is None else (read(noun),) if one else read(noun)
            for at, (before, same, answer) in enumerate(known):
                if same == given and (before == values if read else before is values):
                    if at or before is not values:  # the next question finds the same objects
                        del known[at]
                        known.insert(0, (values, given, answer))
                    return answer
            answer = func(noun, *others, **named)
            known.insert(0, (values, given, answer))
            del known[kept:]
            return answer

        found.fields_read = fields  # type: ignore[attr-defined]
        return found

    return decorate


if TYPE_CHECKING:  # a type checker knows it by this name
    from dataclasses import replace as replace
else:

    def replace(noun: Any, /, **changes: Any) -> Any:
        """A copy of a frozen dataclass with other values; what is cached stays where it is derived
        from none of these."""
        kind = type(noun)
        stale = _stale(kind, tuple(changes))
        if stale is None:
            return dataclasses.replace(noun, **changes)
        other = object.__new__(kind)
        values = other.__dict__
        values.update(noun.__dict__)
        for name in stale:
            values.pop(name, None)
        values.update(changes)
        return other


@cache  # there are as many sets of changes as places in the code
def _stale(kind: type, changed: tuple[str, ...]) -> tuple[str, ...] | None:
    """What is cached and follows from one of these fields; None: the class's __init__ has to be
    called. Raises TypeError for what is no field."""
    names, cached = _copied(kind)
    if names is None:
        return None
    unknown = sorted(set(changed) - names)
    if unknown:
        raise TypeError(f"{kind.__name__} has no field {', '.join(unknown)}")
    return tuple(name for name, of in cached if not of.isdisjoint(changed))


def made(kind: Any, values: dict[str, Any]) -> Any:
    """`kind(**values)`, of a noun: a frozen dataclass of the standard library's sets one field
    after the other. A field that is missing has its default."""
    defaults = _defaults(kind)
    if defaults is None:
        return kind(**values)
    whole = {**defaults, **values}
    if len(whole) != len(_copied(kind)[0] or ()):
        return kind(**values)  # which says what is missing, or too much
    noun = object.__new__(kind)
    noun.__dict__.update(whole)
    return noun


@cache
def _defaults(kind: type) -> dict[str, Any] | None:
    """Of its fields; None: its __init__ has to be called."""
    if not dataclasses.is_dataclass(kind):  # a tuple
        return None
    fields = dataclasses.fields(kind)
    if _copied(kind)[0] is None or any(
        field.default_factory is not dataclasses.MISSING for field in fields
    ):
        return None
    return {
        field.name: field.default for field in fields if field.default is not dataclasses.MISSING
    }


@cache
def _copied(kind: type) -> tuple[frozenset[str] | None, tuple[tuple[str, frozenset[str]], ...]]:
    """Names of the fields of a class whose instances are nothing but their fields; None: its
    __init__ has to be called. And what it caches, with the fields that each follows from."""
    fields = dataclasses.fields(kind)
    plain = (
        all(field.init for field in fields)
        and not hasattr(kind, "__post_init__")
        and not hasattr(kind, "__slots__")
    )
    names = frozenset(field.name for field in fields)
    cached = tuple(
        (name, value.of if isinstance(value, Derived) else names)
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    )
    return (names if plain else None), cached
