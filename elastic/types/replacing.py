"""`replace` for nouns that are replaced at each event.

That of the standard library reads every field and sets every field again. A State has more than a
hundred fields and is replaced five times for each step of a run: more than half of the driver's
time, and of the simulator's. Here the fields are copied at once.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a type checker knows it by this name
    from dataclasses import replace as replace
else:

    def replace(noun: Any, /, **changes: Any) -> Any:
        """A copy of a frozen dataclass with other values; what it has cached of the old ones is
        left behind."""
        kind = type(noun)
        names = _copied(kind)
        if names is None:
            return dataclasses.replace(noun, **changes)
        if not names >= changes.keys():
            raise TypeError(
                f"{kind.__name__} has no field {', '.join(sorted(changes.keys() - names))}"
            )
        made = object.__new__(kind)
        values = made.__dict__
        values.update(noun.__dict__)
        if len(values) > len(names):
            for name in values.keys() - names:
                del values[name]
        values.update(changes)
        return made


@cache
def _copied(kind: type) -> frozenset[str] | None:
    """Names of the fields of a class whose instances are nothing but their fields; None: its
    __init__ has to be called."""
    fields = dataclasses.fields(kind)
    plain = (
        all(field.init for field in fields)
        and not hasattr(kind, "__post_init__")
        and not hasattr(kind, "__slots__")
    )
    return frozenset(field.name for field in fields) if plain else None
