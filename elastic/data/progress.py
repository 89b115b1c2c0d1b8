"""Long work on data says that it makes progress, to whoever waits for it in the same thread: a
worker that prepares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[], None] | None] = ContextVar("listener", default=None)


def gets_on() -> None:
    """Another piece of the work is done."""
    listener = _listener.get()
    if listener is not None:
        listener()


@contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called for each piece that is done inside, after those that listen already."""
    outer = _listener.get()

    def both() -> None:
        if outer is not None:
            outer()
        listener()

    token = _listener.set(both)
    try:
        yield
    finally:
        _listener.reset(token)
